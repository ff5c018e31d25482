"""LoRARequest: which LoRA adapter a request uses.

Must not know: the files of an adapter, which adapters are loaded, the engine.
"""

from __future__ import annotations

import msgspec

from .checks import INT64_MAX, NamedArguments, require, require_int, require_kind, require_text

MAX_LORA_NAME_LENGTH = 256
MAX_LORA_PATH_LENGTH = 4096


class LoRARequest(
    msgspec.Struct,
    metaclass=NamedArguments,
    array_like=True,
    omit_defaults=True,
    frozen=True,
    gc=False,
):
    """A LoRA adapter, under vLLM's names.

    Raises InvalidParameterError on construction and on decoding. Files are checked when the adapter
    is loaded: by `add_lora`, or for the first request that uses it.
    """

    lora_name: str
    lora_int_id: int  # at least 1; one adapter of the engine has it at a time
    lora_path: str  # directory in PEFT's format, as the engine's process sees it
    # load the files again, though an adapter with this lora_int_id is loaded
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for name, most in (
            ("lora_name", MAX_LORA_NAME_LENGTH),
            ("lora_path", MAX_LORA_PATH_LENGTH),
        ):
            value = getattr(self, name)
            require_text(name, value)
            require(
                0 < len(value) <= most and "\0" not in value,
                name,
                f"must have 1 to {most} characters, none of them NUL, got {len(value)}",
            )
        require_int("lora_int_id", self.lora_int_id, 1, INT64_MAX)
        require_kind(
            isinstance(self.load_inplace, bool), "load_inplace", "True or False", self.load_inplace
        )
