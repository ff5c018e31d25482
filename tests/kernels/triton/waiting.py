"""Finds wrappers that would wait for a GPU, on tensors in host memory."""

from torch.overrides import TorchFunctionMode


class NothingWaits(TorchFunctionMode):
    """Raises an error for operations that read a tensor's contents, which wait for the GPU.

    A launch that does so cannot be part of a CUDA graph.
    """

    WAITS = frozenset(
        {
            "__bool__",
            "__complex__",
            "__contains__",
            "__float__",
            "__index__",
            "__int__",
            "cpu",
            "equal",
            "item",
            "masked_select",
            "nonzero",
            "numpy",
            "repeat_interleave",
            "tolist",
            "unique",
            "unique_consecutive",
        }
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", None) in self.WAITS:
            raise AssertionError(f"{func.__name__} waits for the GPU")
        return func(*args, **(kwargs or {}))
