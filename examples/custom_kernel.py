"""Another implementation of an operation, registered from outside the package.

docs/extending.md says how an installed package brings a kernel to engines in other processes.
"""

import sys

import torch
from quire import LLM, SamplingParams
from quire.kernels.registry import register

num_calls = 0


@register("silu_and_mul", name="example")
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> [T, I], as kernels/ops.py says."""
    global num_calls
    num_calls += 1
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=16)

    def tokens(**settings) -> list[int]:
        with LLM(engine="inproc", dtype="float32", **settings) as llm:
            return llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids

    own_tokens = tokens(kernels={"silu_and_mul": "example"})
    print(f"the kernel ran {num_calls} times")
    reference_tokens = tokens(kernels={"silu_and_mul": "reference"})
    print("same tokens as the reference:", own_tokens == reference_tokens)
    if not num_calls or own_tokens != reference_tokens:
        sys.exit(1)


if __name__ == "__main__":
    main()
