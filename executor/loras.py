"""The LoRA adapters of one rank.

Must not know: which adapters should be in memory, requests, names that users give.
"""

from __future__ import annotations

from typing import Any

from ..ipc.errors import InvalidParameterError
from ..ipc.lora import LoRARequest


class Loras:
    """Reads adapters, and owns those that requests can use. The core numbers them; see Executor.

    They stay when the model is replaced (Worker.load_weights), or sleeps and wakes up.
    """

    def read(self, request: LoRARequest) -> Any:
        """Reads and checks the files of an adapter. In a thread: it changes nothing that a step
        uses. Raises InvalidParameterError.
        """
        raise InvalidParameterError(
            "lora_request", f"{request.lora_name}: LoRA adapters are not supported yet"
        )

    def add(self, request: LoRARequest, adapter: Any) -> None:
        """Makes what `read` returned usable as `request.lora_int_id`. Between two steps."""
        raise InvalidParameterError(
            "lora_request", f"{request.lora_name}: LoRA adapters are not supported yet"
        )

    def remove(self, lora_int_id: int) -> bool:
        """Frees an adapter that no slot uses; False: there is none. Between two steps."""
        return False

    def list(self) -> set[int]:
        """The numbers of the adapters that were added."""
        return set()
