"""Whether other weights are of the model that runs.

Must not know: layers, tensors' values, requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...ipc.config import EngineConfig
from ...ipc.errors import ModelLoadError
from ...ipc.json_files import read_json
from ...ipc.models.architectures import text_part
from ...ipc.models.gguf import is_gguf, read_gguf
from ...ipc.models.gguf_config import gguf_config
from . import find_model_class


def check_same_architecture(config: EngineConfig, model_class: Any, directory: Path) -> None:
    """Checks that the config.json or GGUF file of new weights, if there is one, describes the
    running model.

    Not every difference shows in a shape. Raises ModelLoadError naming the first key that differs.
    """
    path = directory if is_gguf(directory) else directory / "config.json"
    if not path.exists():
        return
    hf_config = gguf_config(read_gguf(path)) if is_gguf(path) else text_part(read_json(path))
    described = find_model_class(hf_config, config.model_config.model_impl)
    if described is not model_class:
        raise ModelLoadError(
            f"{path}: the architecture is {described.__name__}, the engine runs "
            f"{model_class.__name__}"
        )
    known = config.model_config.hf_config
    # the architecture may have been converted (ipc/models/resolve_pooling.py)
    made = ("architectures", "score_token_ids")
    overrides = {
        key: known[key] for key in (*config.model_config.hf_overrides, *made) if key in known
    }
    mine, other = (
        model_class.parse_config(config.model_config.hf_config),
        model_class.parse_config(hf_config | overrides),
    )
    for name in mine.__dataclass_fields__:
        if getattr(mine, name) != getattr(other, name):
            raise ModelLoadError(
                f"{path}: {name} is {getattr(other, name)!r}, the engine runs a model with "
                f"{getattr(mine, name)!r}"
            )
