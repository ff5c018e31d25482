"""The encoder of images in a GGUF file of its own (architecture "clip"), beside the text model's.

Must not know: tensors' values, torch, pixels, layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..errors import InvalidParameterError, ModelLoadError
from .gguf import GGUFFile, read_gguf
from .vision_config import VisionConfig
from .vision_families import FAMILIES, tower_of
from .vision_tower import Projector, Tower

CLIP = "clip"
# clip.projector_type -> the family; that of Qwen3-VL is also that of Qwen3.5, by the text model
PROJECTORS = {
    "qwen3vl_merger": "qwen3_vl",
    "qwen2.5vl_merger": "qwen2_5_vl",
    "gemma3": "gemma3",
    "gemma4v": "gemma4",
    "pixtral": "mistral3",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "lfm2": "lfm2_vl",
}
# the text of the placeholder's token
_PLACEHOLDERS = {
    "qwen3_vl": "<|image_pad|>",
    "qwen3_5": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "gemma3": "<image_soft_token>",
    "gemma4": "<|image|>",
    "mistral3": "[IMG]",
    "pixtral": "[IMG]",
    "idefics3": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "lfm2_vl": "<image>",
}
# of each family's projector: the names of a norm before and one after the patches are joined, and
# of the linear layers
_PROJECTOR_NAMES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "qwen3_vl": ("v.post_ln", "", ("mm.0", "mm.2")),
    "qwen3_5": ("v.post_ln", "", ("mm.0", "mm.2")),
    "qwen2_5_vl": ("v.post_ln", "", ("mm.0", "mm.2")),
    "gemma3": ("", "mm.soft_emb_norm", ("mm.input_projection",)),
    "gemma4": ("", "", ("mm.input_projection",)),
    "mistral3": ("mm.input_norm", "", ("mm.patch_merger", "mm.1", "mm.2")),
    "pixtral": ("", "", ("mm.1", "mm.2")),
    "idefics3": ("", "", ("mm.model.fc",)),
    "internvl": ("", "mm.model.mlp.0", ("mm.model.mlp.1", "mm.model.mlp.3")),
    "lfm2_vl": ("", "mm.input_norm", ("mm.1", "mm.2")),
}


def find_mmproj(model: Path, wanted: str | None) -> Path | None:
    """The file that the setting mmproj names, or else the one mmproj-*.gguf beside a GGUF file.

    Raises InvalidParameterError where there is no such file, or where there are several.
    """
    if wanted is not None:
        path = Path(wanted).expanduser().resolve()
        if not path.is_file():
            raise InvalidParameterError("mmproj", f"must be a GGUF file, got {wanted!r}")
        return path
    found = sorted(one for one in model.parent.glob("*.gguf") if "mmproj" in one.name.lower())
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise InvalidParameterError("mmproj", f"must name one of the files: {names}")
    return found[0] if found else None


def vision_of_mmproj(path: Path, model: Path, hf_config: dict[str, Any]) -> VisionConfig:
    """How the text model in the GGUF file `model`, whose configuration is hf_config, reads images
    with the encoder in the file at `path`.

    Raises ModelLoadError, naming the file, for one that is no such encoder or not supported.
    """
    file, text = read_gguf(path), read_gguf(model)
    own = _Own(file)
    if file.metadata.get("general.architecture") != CLIP:
        raise ModelLoadError(f"{path}: the architecture must be {CLIP}")
    kind = own.get("projector_type", file.metadata.get("clip.projector_type"))
    if kind not in PROJECTORS:
        raise ModelLoadError(
            f"{path}: clip.projector_type={kind!r:.100} is not supported; supported: "
            f"{', '.join(PROJECTORS)}"
        )
    name = PROJECTORS[kind]
    if name == "qwen3_vl" and str(hf_config.get("model_type")).startswith("qwen3_5"):
        name = "qwen3_5"
    if name == "mistral3" and "mm.patch_merger.weight" not in file.tensors:
        name = "pixtral"
    family, width = FAMILIES[name], own.size("projection_dim")
    if width != hf_config["hidden_size"]:
        raise ModelLoadError(
            f"{path}: its rows have {width} numbers, the text model's embeddings have "
            f"{hf_config['hidden_size']}"
        )
    deep = [i for i, is_deep in enumerate(own.get("is_deepstack_layers", [])) if is_deep]
    sections = text.metadata.get(f"{text.metadata['general.architecture']}.rope.dimension_sections")
    section = tuple(sections[:3]) if isinstance(sections, list) else family.mrope_section
    # those of LFM2 have norm_eps
    of_text = {key: hf_config[key] for key in ("rms_norm_eps",) if key in hf_config}
    vision = VisionConfig(
        family=name,
        hidden_size=width,
        tower=_tower_keys(own, deep),
        whole=_whole_keys(own) | {"text_config": of_text},
        processor_file=path.name,
        processor=_processor_keys(own, name),
        image_token_id=_placeholder(text, name),
        unit=1,
        num_vectors=1 + len(deep),
        mrope_section=section if family.mrope_section else (),
        **family.of_text(hf_config),
        file=str(path),
    )
    return replace(vision, unit=tower_of(vision).unit)


class _Own:
    """Reads the encoder's keys."""

    def __init__(self, file: GGUFFile):
        self.file = file

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"clip.vision.{key}", default)

    def size(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or not 0 < value < 2**24:
            raise ModelLoadError(
                f"{self.file.paths[0]}: clip.vision.{key} must be a positive integer, got "
                f"{value!r:.100}"
            )
        return value

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self.file.tensors.get(name)
        return None if tensor is None else tensor.shape


def _tower_keys(own: _Own, deep: list[int]) -> dict[str, Any]:
    """What vision_config of config.json would say."""
    size, heads = own.size("embedding_length"), own.size("attention.head_count")
    keys: dict[str, Any] = {
        "hidden_size": size,
        "intermediate_size": own.size("feed_forward_length"),
        "num_hidden_layers": own.size("block_count"),
        "num_attention_heads": heads,
        "patch_size": own.size("patch_size"),
        "image_size": own.size("image_size"),
        "spatial_merge_size": own.get("spatial_merge_size", 2),
        "deepstack_visual_indexes": deep,
        "layer_norm_eps": own.get("attention.layer_norm_epsilon", 1e-6),
        # of the families that do not always have them
        "standardize": "v.std_bias" in own.file.tensors,
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in own.file.tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in own.file.tensors,
        "attention_bias": "v.blk.0.attn_q.bias" in own.file.tensors,
    }
    if (shape := own.shape("v.position_embd.weight")) is not None:
        rows = shape[-2]
        keys |= {"num_position_embeddings": rows, "num_patches": rows}
        keys["position_embedding_size"] = rows
    if (shape := own.shape("v.blk.0.attn_q.weight")) is not None:
        keys["head_dim"] = shape[0] // heads
    if own.file.metadata.get("clip.use_silu"):
        keys["hidden_act"] = "silu"
    if own.get("window_size") is not None:
        keys["window_size"] = own.size("window_size")
    if own.get("n_wa_pattern"):  # each so-and-so-many-th layer sees the whole image
        every = own.size("n_wa_pattern")
        keys["fullatt_block_indexes"] = list(range(every - 1, own.size("block_count"), every))
    return keys


def _whole_keys(own: _Own) -> dict[str, Any]:
    """What the other keys of config.json would say."""
    merge = own.get("projector.scale_factor")
    keys: dict[str, Any] = {"multimodal_projector_bias": "mm.1.bias" in own.file.tensors}
    keys["projector_bias"] = keys["multimodal_projector_bias"]
    keys["projector_use_layernorm"] = "mm.input_norm.weight" in own.file.tensors
    if isinstance(spatial := own.get("spatial_merge_size"), int):
        keys["spatial_merge_size"] = spatial
    if (shape := own.shape("mm.1.weight")) is not None:
        keys["projector_hidden_size"] = shape[0]
    side = own.size("image_size") // own.size("patch_size")
    if isinstance(merge, int) and merge > 0:
        keys |= {"scale_factor": merge, "downsample_factor": merge, "downsample_ratio": 1 / merge}
    keys["mm_tokens_per_image"] = (side // (merge or 4)) ** 2
    return keys


def _processor_keys(own: _Own, family: str) -> dict[str, Any]:
    """What preprocessor_config.json would say, as far as the file does."""
    keys = {key: own.get(key) for key in ("image_mean", "image_std") if own.get(key)}
    longest = own.get("preproc_image_size")
    if family == "idefics3" and type(longest) is int:
        keys["size"] = {"longest_edge": longest}
        keys["max_image_size"] = {"longest_edge": own.size("image_size")}
    low, high = own.get("image_min_pixels"), own.get("image_max_pixels")
    if type(low) is int and type(high) is int:
        keys["size"] = {"shortest_edge": low, "longest_edge": high}
    return keys


def _placeholder(text: GGUFFile, family: str) -> int:
    tokens = text.metadata.get("tokenizer.ggml.tokens") or []
    wanted = _PLACEHOLDERS[family]
    return tokens.index(wanted) if wanted in tokens else FAMILIES[family].image_token[1]


def mmproj_names(tower: Tower, family: str) -> dict[str, tuple[str, ...]]:
    """Our name of each tensor -> the names of the tensors that hold it, one or one per frame."""
    names = dict(_ends(tower))
    for index in range(tower.num_layers if tower.layer is not None else 0):
        for own, stored in _layer(tower):
            names[own.format(index)] = f"v.blk.{index}.{stored}"
    for projector in tower.projectors:
        names |= dict(_projector(projector, family))
    found = {}
    for own in tower.weight_shapes():
        # a bound stands beside the weight's name, other names have the same ending
        block, _, end = own.rpartition(".")
        stem = names.get(own) or names.get(block)
        if own in names:
            found[own] = (names[own],)
        elif stem is None:
            found[own] = (names[f"{block}.linear"] + f".{end}",)
        else:
            found[own] = (f"{stem}.{end}",)
    if tower.frames == 2:
        patch = f"{tower.patch.name}.weight"
        found[patch] = "v.patch_embd.weight", "v.patch_embd.weight.1"
    return found


Names = Iterator[tuple[str, str]]


def _ends(tower: Tower) -> Names:
    yield tower.patch.name, "v.patch_embd"
    if tower.positions:
        yield tower.position_name, "v.position_embd.weight"
    if tower.class_token:
        yield tower.class_token, "v.class_embd"
    for norm, name in ((tower.first_norm, "v.pre_ln"), (tower.final_norm, "v.post_ln")):
        if norm is not None:
            yield norm.name, name


def _layer(tower: Tower) -> Names:
    layer = tower.layer
    assert layer is not None
    attention = layer.attention
    parts = ("attn_qkv",) if len(attention.qkv) == 1 else ("attn_q", "attn_k", "attn_v")
    yield from ((dense.name, name) for dense, name in zip(attention.qkv, parts))
    yield attention.out.name, "attn_out"
    up = ("ffn_up",) if len(layer.up) == 1 else ("ffn_gate", "ffn_up")
    yield from ((dense.name, name) for dense, name in zip(layer.up, up))
    yield layer.down.name, "ffn_down"
    for norm, name in (
        (layer.attention_norm, "ln1"),
        (layer.mlp_norm, "ln2"),
        (layer.attention_after, "attn_post_norm"),
        (layer.mlp_after, "ffn_post_norm"),
        (attention.q_norm, "attn_q_norm"),
        (attention.k_norm, "attn_k_norm"),
    ):
        if norm is not None:
            yield norm.name, name
    for factor, name in ((layer.attention_factor, "ls1"), (layer.mlp_factor, "ls2")):
        if factor:
            yield factor, f"{name}.weight"


def _projector(projector: Projector, family: str) -> Names:
    before, after, dense = _PROJECTOR_NAMES[family]
    if projector.layer is not None:
        block = f"v.deepstack.{projector.layer}"
        before, after, dense = "", f"{block}.norm", (f"{block}.fc1", f"{block}.fc2")
    for norm, name in ((projector.before, before), (projector.after, after)):
        if norm is not None and norm.name:
            yield norm.name, name
    yield from ((one.name, name) for one, name in zip(projector.dense, dense))
    if projector.shift:
        yield projector.shift, "v.std_bias"
        yield projector.scale, "v.std_scale"
