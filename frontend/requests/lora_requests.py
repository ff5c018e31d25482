"""The `lora_request` of a call: checked, with the path as the engine's process finds it.

Must not know: the files of an adapter, the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...ipc.checks import require_kind
from ...ipc.lora import LoRARequest


def placed(request: Any) -> LoRARequest:
    """Returns the request with an absolute path if this process finds the path: a daemon may have
    another directory.

    Raises InvalidParameterError for another type.
    """
    require_kind(isinstance(request, LoRARequest), "lora_request", "a LoRARequest", request)
    path = Path(request.lora_path).expanduser()
    if not path.exists():  # the engine says so, or it finds the path
        return request
    return msgspec.structs.replace(request, lora_path=str(path.absolute()))


def to_reload(requests: list[LoRARequest | None]) -> list[LoRARequest]:
    """Returns the adapters with load_inplace, each once. They are loaded before the requests are
    submitted.
    """
    return list(dict.fromkeys(one for one in requests if one is not None and one.load_inplace))
