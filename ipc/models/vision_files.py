"""Reads from a model's files how it reads images.

Must not know: pixels, tensors' values, torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..errors import InvalidParameterError, ModelLoadError
from ..json_files import read_json, read_json_if_exists
from .config_values import integer, malformed
from .gguf import is_gguf
from .mmproj import find_mmproj, vision_of_mmproj
from .vision_config import VisionConfig
from .vision_families import FAMILIES, READERS, VisionFamily, tower_of

# Parts of config.json with a configuration of their own, and lists that grow with the model.
_PARTS = ("vision_config", "text_config", "audio_config")
_OF_THE_TEXT = ("rms_norm_eps",)  # keys of the text part that a projector reads


def find_vision(
    directory: Path, hf_config: dict[str, Any], overrides: dict[str, Any], mmproj: str | None
) -> VisionConfig | None:
    """How the model of `directory` reads images; None: it does not.

    hf_config: of its text part. overrides: of keys of config.json; those of vision_config apply
    here. mmproj: the setting, for a GGUF file. Raises ModelLoadError for files that cannot be read
    or that the family's encoder does not support.
    """
    if is_gguf(directory):
        path = find_mmproj(directory, mmproj)
        return None if path is None else vision_of_mmproj(path, directory, hf_config)
    if mmproj is not None:
        raise InvalidParameterError("mmproj", "is for a model in a GGUF file")
    whole = read_json(directory / "config.json")
    name, tower = _name_of(whole), whole.get("vision_config")
    if name not in READERS or not isinstance(tower, dict):
        return None
    if isinstance(overrides.get("vision_config"), dict):
        tower = tower | overrides["vision_config"]
    family, text = FAMILIES[READERS[name]], whole.get("text_config") or {}
    beside = {key: value for key, value in whole.items() if key not in _PARTS}
    beside["text_config"] = {key: text[key] for key in _OF_THE_TEXT if key in text}
    processor, processor_file = _read_processor(directory)
    deep = tower.get("deepstack_visual_indexes", family.deepstack)
    if not isinstance(deep, list | tuple):
        raise malformed("deepstack_visual_indexes", "a list of layers", deep)
    vision = VisionConfig(
        family=family.name,
        hidden_size=hf_config["hidden_size"],
        tower=tower,
        whole=beside,
        processor=processor,
        processor_file=processor_file,
        image_token_id=_image_token(family, whole),
        unit=1,  # follows from the tower
        num_vectors=1 + len(deep),
        mrope_section=_mrope_section(family, hf_config),
        **family.of_text(hf_config),
    )
    made = tower_of(vision)
    for projector in made.projectors:
        if projector.layer is not None and projector.layer >= made.num_layers:
            raise ModelLoadError(
                f"config.json: deepstack_visual_indexes names layer {projector.layer}, the tower "
                f"has {made.num_layers}"
            )
    return replace(vision, unit=made.unit)


def _name_of(whole: dict[str, Any]) -> str:
    names = whole.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) else ""


def _read_processor(directory: Path) -> tuple[dict[str, Any], str]:
    """The settings of the processor, and the name of their file."""
    own = read_json_if_exists(directory / (name := "preprocessor_config.json"))
    if not own:
        whole = read_json_if_exists(directory / (name := "processor_config.json"))
        own = {} if whole.get("image_processor") is None else whole["image_processor"]
    if not isinstance(own, dict):
        raise malformed("image_processor", "an object", own, name)
    return own, name


def _image_token(family: VisionFamily, whole: dict[str, Any]) -> int:
    key, default = family.image_token
    for name in (key, "image_token_id", "image_token_index"):
        if whole.get(name) is not None:
            return integer(name, whole[name], least=0)
    return default


def _mrope_section(family: VisionFamily, hf_config: dict[str, Any]) -> tuple[int, ...]:
    if not family.mrope_section:
        return ()
    for key in ("rope_parameters", "rope_scaling"):
        found = hf_config.get(key)
        if isinstance(found, dict) and (section := found.get("mrope_section")) is not None:
            is_list = isinstance(section, list) and len(section) == 3
            if not is_list or not all(type(one) is int and one >= 0 for one in section):
                raise malformed("mrope_section", "a list of 3 numbers", section)
            return tuple(section)
    return family.mrope_section
