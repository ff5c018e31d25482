"""The families of models that read images: what each one's vision tower and projector are.

Must not know: tensors' values, layers, pixels, how any of it is computed. executor/models/vision/
builds the encoders from what `tower_of` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .config_values import malformed
from .encoder_config import Keys
from .vision_config import VisionConfig
from .vision_tower import (
    ALIGNED,
    MEAN,
    RMS,
    ROWS_THEN_COLUMNS,
    TABLE,
    Attention,
    Dense,
    Norm,
    Projector,
    Stored,
    Tower,
    TowerLayer,
)

HALF = (0.5, 0.5, 0.5)


class VisionFamily(msgspec.Struct, frozen=True):
    """A family's row. `image_token`: the key of config.json that has the placeholder's id, and the
    id of models whose config.json lacks it.
    """

    name: str
    tower: Callable[[VisionConfig], Tower]
    image_token: tuple[str, int]
    deepstack: tuple[int, ...] = ()  # of a vision_config without deepstack_visual_indexes
    mrope_section: tuple[int, ...] = ()  # of a text_config without it
    sees_whole_images: bool = False


class TowerKeys(Keys):
    """Reads vision_config of config.json, and what a preprocessor's file says of channels."""

    def __init__(self, vision: VisionConfig, **renamed: str):
        super().__init__(vision.tower, renamed)
        self.vision = vision

    def side(self, name: str, default: int) -> int:
        """A size of both sides of a square: one number, or the same number twice."""
        value = self.get(name, default)
        if isinstance(value, list):
            if len(value) != 2 or value[0] != value[1]:
                raise malformed(name, "a number, or the same number twice", value)
            value = value[0]
        if type(value) is not int or not 0 < value < 2**16:
            raise malformed(name, "an integer from 1 to 65535", value)
        return value

    def channels(self, mean: tuple[float, ...] = HALF, std: tuple[float, ...] = HALF) -> Any:
        """Tower's `mean` and `std`; the arguments are of a preprocessor that does not say."""
        found = {}
        for field, default in (("mean", mean), ("std", std)):
            value = self.vision.processor.get(f"image_{field}") or list(default)
            is_list = isinstance(value, list) and len(value) == 3
            if not is_list or not all(isinstance(one, (int, float)) for one in value):
                raise malformed(f"image_{field}", "a list of 3 numbers", value)
            found[field] = tuple(float(one) for one in value)
        return found

    def square_root(self, name: str, value: int) -> int:
        """The side of a square table of `value` rows."""
        side = round(value**0.5)
        if side * side != value:
            raise malformed(name, "a square number", value)
        return side


def tower_of(vision: VisionConfig) -> Tower:
    """The tower of a model that reads images.

    Raises ModelLoadError, naming the key, for a key of vision_config that is missing, malformed or
    not supported.
    """
    return FAMILIES[vision.family].tower(vision)


def _conv(name: str, out: int, patch: int, frames: int = 1, has_bias: bool = True) -> Dense:
    """The patch projection, which files have as a convolution: [out, channels, frames, height,
    width], the frames only where there are several. Pixels come as [frames, height, width,
    channels].
    """
    shape, dims = (out, 3, patch, patch), (0, 2, 3, 1)
    if frames > 1:
        shape, dims = (out, 3, frames, patch, patch), (0, 2, 3, 4, 1)
    return Dense(name, frames * patch * patch * 3, out, has_bias, stored=Stored(shape, dims, shape))


def _qwen3(vision: VisionConfig) -> Tower:
    """Qwen3-VL and Qwen3.5. The former has one more projector for each of the first layers of the
    text model (deepstack).
    """
    keys = TowerKeys(vision, num_hidden_layers="depth", num_attention_heads="num_heads")
    size, heads = keys.size("hidden_size", 1152), keys.size("num_attention_heads", 16)
    inner, merge = keys.size("intermediate_size", 4304), keys.size("spatial_merge_size", 2)
    patch, frames = keys.side("patch_size", 16), keys.side("temporal_patch_size", 2)
    rows = keys.size("num_position_embeddings", 2304)
    keys.square_root("num_position_embeddings", rows)
    block, joined = "visual.blocks.{}.", size * merge * merge

    def merger(name: str, layer: int | None = None) -> Projector:
        norm = Norm(f"{name}.norm", size if layer is None else joined, 1e-6)
        return Projector(
            layer=layer,
            before=norm if layer is None else None,
            after=None if layer is None else norm,
            dense=(
                Dense(f"{name}.linear_fc1", joined, joined, activation="gelu"),
                Dense(f"{name}.linear_fc2", joined, vision.hidden_size),
            ),
        )

    deep = keys.get("deepstack_visual_indexes", FAMILIES[vision.family].deepstack)
    extra = (f"visual.deepstack_merger_list.{i}" for i in range(len(deep)))
    return Tower(
        hidden_size=size,
        num_layers=keys.size("num_hidden_layers", 27),
        patch_size=patch,
        frames=frames,
        merge=merge,
        **keys.channels(),
        patch=_conv("visual.patch_embed.proj", size, patch, frames),
        positions=ALIGNED,
        position_name="visual.pos_embed.weight",
        position_shape=(rows, size),
        layer=TowerLayer(
            attention=Attention(
                heads=heads,
                head_dim=size // heads,
                scale=(size // heads) ** -0.5,
                qkv=(Dense(f"{block}attn.qkv", size, 3 * size),),
                out=Dense(f"{block}attn.proj", size, size),
                rope=ROWS_THEN_COLUMNS,
            ),
            attention_norm=Norm(f"{block}norm1", size, 1e-6),
            mlp_norm=Norm(f"{block}norm2", size, 1e-6),
            up=(Dense(f"{block}mlp.linear_fc1", size, inner),),
            down=Dense(f"{block}mlp.linear_fc2", inner, size),
            activation=keys.activation("hidden_act", "gelu_pytorch_tanh"),
        ),
        projectors=(merger("visual.merger"), *map(merger, extra, deep)),
    )


def _siglip_layer(
    keys: TowerKeys, size: int, block: str, inner_default: int = 3072, heads_default: int = 12
) -> TowerLayer:
    heads = keys.size("num_attention_heads", heads_default)
    inner = keys.size("intermediate_size", inner_default)
    eps = keys.number("layer_norm_eps", 1e-6, 0, 1)
    return TowerLayer(
        attention=Attention(
            heads=heads,
            head_dim=size // heads,
            scale=(size // heads) ** -0.5,
            qkv=tuple(Dense(f"{block}self_attn.{x}_proj", size, size) for x in "qkv"),
            out=Dense(f"{block}self_attn.out_proj", size, size),
        ),
        attention_norm=Norm(f"{block}layer_norm1", size, eps),
        mlp_norm=Norm(f"{block}layer_norm2", size, eps),
        up=(Dense(f"{block}mlp.fc1", size, inner),),
        down=Dense(f"{block}mlp.fc2", inner, size),
        activation=keys.activation("hidden_act", "gelu_pytorch_tanh"),
    )


def _siglip(
    keys: TowerKeys, base: str, patch: int, side: int, merge: int, positions: str, **other: Any
) -> Tower:
    """A SigLIP tower; `side`: that of the square of places in its table."""
    size = keys.size("hidden_size", 768)
    return Tower(
        hidden_size=size,
        num_layers=keys.size("num_hidden_layers", 12),
        patch_size=patch,
        merge=merge,
        **keys.channels(),
        positions=positions,
        position_name=f"{base}embeddings.position_embedding.weight",
        position_shape=(side * side, size),
        final_norm=Norm(f"{base}post_layernorm", size, keys.number("layer_norm_eps", 1e-6, 0, 1)),
        **{"patch": _conv(f"{base}embeddings.patch_embedding", size, patch), **other},
    )


def _gemma3(vision: VisionConfig) -> Tower:
    keys, base = TowerKeys(vision), "vision_tower."
    size, patch = keys.size("hidden_size", 768), keys.side("patch_size", 16)
    side = keys.side("image_size", 224) // patch
    tokens = vision.whole.get("mm_tokens_per_image") or 256
    merge = side // keys.square_root("mm_tokens_per_image", tokens)
    name, eps = "multi_modal_projector.", keys.number("layer_norm_eps", 1e-6, 0, 1)
    width = vision.hidden_size
    return _siglip(
        *(keys, base, patch, side, merge, TABLE),
        layer=_siglip_layer(keys, size, f"{base}encoder.layers.{{}}."),
        projectors=(
            Projector(
                pooling=MEAN,
                after=Norm(f"{name}mm_soft_emb_norm", size, eps, RMS, 1.0, is_fp32=True),
                dense=(
                    Dense(
                        f"{name}mm_input_projection",
                        *(size, width, False),
                        stored=Stored((size, width), (1, 0), (size, width)),
                    ),
                ),
            ),
        ),
    )


FAMILIES = {
    family.name: family
    for family in (
        VisionFamily("qwen3_5", _qwen3, ("image_token_id", 248_056), mrope_section=(11, 11, 10)),
        VisionFamily("gemma3", _gemma3, ("image_token_index", 262_144), sees_whole_images=True),
    )
}
# the architectures that read images, with their families
READERS = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "Gemma3ForConditionalGeneration": "gemma3",
}
