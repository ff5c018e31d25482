"""The families of models that read images: what each one's vision tower and projector are.

Must not know: tensors' values, layers, pixels, how any of it is computed. executor/models/vision/
builds the encoders from what `tower_of` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import ModelLoadError
from .config_values import malformed
from .encoder_config import Keys
from .vision_config import VisionConfig
from .vision_tower import (
    ALIGNED,
    ALTERNATING,
    AXES,
    BUCKETS,
    HALVES_OF_HEADS,
    LAYER,
    MEAN,
    PAIRS,
    RESIZED,
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
OF_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
OF_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class VisionFamily(msgspec.Struct, frozen=True):
    """A family's row. `image_token`: the key of config.json that has the placeholder's id, and the
    id of models whose config.json lacks it.
    """

    name: str
    tower: Callable[[VisionConfig], Tower]
    image_token: tuple[str, int]
    deepstack: tuple[int, ...] = ()  # of a vision_config without deepstack_visual_indexes
    mrope_section: tuple[int, ...] = ()  # of a text_config without it
    has_interleaved_mrope: bool = True
    sees_whole_images: bool = False
    # whether layers get inputs of their own by token ids, with the padding token's for images
    reads_padding: bool = False

    def of_text(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Fields of VisionConfig that say how the text model reads rows. hf_config: its keys."""
        pad_token_id = hf_config.get("pad_token_id") or 0
        return {
            "has_interleaved_mrope": self.has_interleaved_mrope,
            "sees_whole_images": self.sees_whole_images
            or hf_config.get("use_bidirectional_attention") == "vision",
            "only_windows_see_whole_images": not self.sees_whole_images,
            "row_token_id": pad_token_id if self.reads_padding else None,
        }


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

    def heads(self, default: int, size: int) -> int:
        """The number of heads, each with an equal part of `size`."""
        heads = self.size("num_attention_heads", default)
        if size % heads:
            raise malformed(self._key("num_attention_heads"), f"a divisor of {size}", heads)
        return heads

    def channels(self, mean: tuple[float, ...] = HALF, std: tuple[float, ...] = HALF) -> Any:
        """Tower's `mean` and `std`, of values from 0 to 1; the arguments are of a preprocessor that
        does not say. A processor has (byte * rescale_factor - image_mean) / image_std.
        """
        rescales, normalizes = self._flag("do_rescale"), self._flag("do_normalize")
        factor = self._processor_get("rescale_factor", 1 / 255) if rescales else 1.0
        if not _is_number(factor) or not 0 < factor <= 1:
            raise self._malformed("rescale_factor", "a number above 0 and at most 1", factor)
        scale = factor * 255 if abs(factor * 255 - 1) > 1e-6 else 1.0
        found = {"mean": (0.0,) * 3, "std": (1 / scale,) * 3}
        for field, default in (("mean", mean), ("std", std)) if normalizes else ():
            value = self._processor_get(f"image_{field}", list(default))
            is_list = isinstance(value, list) and len(value) == 3
            if not is_list or not all(map(_is_number, value)):
                raise self._malformed(f"image_{field}", "a list of 3 numbers", value)
            if field == "std" and min(value) <= 0:
                raise self._malformed("image_std", "a list of 3 numbers above 0", value)
            found[field] = tuple(one / scale for one in value)
        return found

    def _processor_get(self, name: str, default: Any) -> Any:
        value = self.vision.processor.get(name)
        return default if value is None else value

    def _malformed(self, name: str, wanted: str, value: Any) -> ModelLoadError:
        return malformed(name, wanted, value, self.vision.processor_file)

    def _flag(self, name: str) -> bool:
        value = self._processor_get(name, True)
        if not isinstance(value, bool):
            raise self._malformed(name, "true or false", value)
        return value

    def square_root(self, name: str, value: int) -> int:
        """The side of a square table of `value` rows."""
        side = round(value**0.5)
        if side * side != value:
            raise malformed(name, "a square number", value)
        return side


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e6  # NaN is not


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
    size = keys.size("hidden_size", 1152)
    heads = keys.heads(16, size)
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
                kv_heads=heads,
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
    heads = keys.heads(heads_default, size)
    inner = keys.size("intermediate_size", inner_default)
    eps = keys.number("layer_norm_eps", 1e-6, 0, 1)
    return TowerLayer(
        attention=Attention(
            heads=heads,
            kv_heads=heads,
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
    keys: TowerKeys, base: str, patch_size: int, side: int, merge: int, positions: str, **other: Any
) -> Tower:
    """A SigLIP tower; `side`: that of the square of places in its table."""
    size = other.pop("hidden_size", keys.size("hidden_size", 768))
    return Tower(
        hidden_size=size,
        num_layers=keys.size("num_hidden_layers", 12),
        patch_size=patch_size,
        merge=merge,
        **keys.channels(),
        positions=positions,
        position_name=f"{base}embeddings.position_embedding.weight",
        position_shape=(side * side, size),
        final_norm=Norm(f"{base}post_layernorm", size, keys.number("layer_norm_eps", 1e-6, 0, 1)),
        **{"patch": _conv(f"{base}embeddings.patch_embedding", size, patch_size), **other},
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


def _gemma4(vision: VisionConfig) -> Tower:
    keys, base = TowerKeys(vision), "vision_tower."
    size, patch = keys.size("hidden_size", 768), keys.side("patch_size", 16)
    rows, eps = keys.size("position_embedding_size", 10240), keys.number("rms_norm_eps", 1e-6, 0, 1)
    standardizes = keys.switch("standardize", False)
    return Tower(
        hidden_size=size,
        num_layers=keys.size("num_hidden_layers", 16),
        patch_size=patch,
        merge=keys.size("pooling_kernel_size", 3),
        mean=HALF,  # in the model's own code, whatever the preprocessor says
        std=HALF,
        patch=Dense(f"{base}patch_embedder.input_proj", 3 * patch * patch, size, False),
        positions=AXES,
        position_name=f"{base}patch_embedder.position_embedding_table",
        position_shape=(2, rows, size),
        layer=_gemma4_layer(keys, size, eps, f"{base}encoder.layers.{{}}."),
        projectors=(
            Projector(
                pooling=MEAN,
                factor=size**0.5,
                shift=f"{base}std_bias" if standardizes else "",
                scale=f"{base}std_scale" if standardizes else "",
                after=Norm("", size, eps, RMS, is_fp32=True),
                dense=(
                    Dense("embed_vision.embedding_projection", size, vision.hidden_size, False),
                ),
            ),
        ),
    )


def _gemma4_layer(keys: TowerKeys, size: int, eps: float, block: str) -> TowerLayer:
    heads, head_dim = keys.size("num_attention_heads", 12), keys.size("head_dim", 64)
    kv_heads, inner = keys.size("num_key_value_heads", heads), keys.size("intermediate_size", 3072)
    is_clipped = keys.switch("use_clipped_linears", False)

    def norm(name: str, size: int) -> Norm:
        return Norm(name and block + name, size, eps, RMS, is_fp32=True)

    def dense(name: str, inputs: int, outputs: int) -> Dense:
        return Dense(f"{block}{name}.linear", inputs, outputs, False, is_clipped=is_clipped)

    counts = zip("qkv", (heads, kv_heads, kv_heads))
    return TowerLayer(
        attention=Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.0,
            qkv=tuple(dense(f"self_attn.{x}_proj", size, n * head_dim) for x, n in counts),
            out=dense("self_attn.o_proj", heads * head_dim, size),
            q_norm=norm("self_attn.q_norm", head_dim),
            k_norm=norm("self_attn.k_norm", head_dim),
            value_norm=norm("", head_dim),
            rope=HALVES_OF_HEADS,
            rope_theta=_rope_theta(keys, 100.0),
        ),
        attention_norm=norm("input_layernorm", size),
        attention_after=norm("post_attention_layernorm", size),
        mlp_norm=norm("pre_feedforward_layernorm", size),
        mlp_after=norm("post_feedforward_layernorm", size),
        up=(dense("mlp.gate_proj", size, inner), dense("mlp.up_proj", size, inner)),
        down=dense("mlp.down_proj", inner, size),
        activation=keys.activation("hidden_activation", "gelu_pytorch_tanh"),
    )


def _gemma4_unified(vision: VisionConfig) -> Tower:
    """Gemma 4 12B, which has no layers: large patches become rows."""
    keys, base = TowerKeys(vision), "vision_embedder."
    size, eps = keys.size("mm_embed_dim", 3840), keys.number("rms_norm_eps", 1e-6, 0, 1)
    patch = keys.side("patch_size", 16) * keys.size("pooling_kernel_size", 3)
    pixels, rows = 3 * patch * patch, keys.size("mm_posemb_size", 1120)
    projection = "embed_vision.embedding_projection"
    return Tower(
        hidden_size=size,
        num_layers=0,
        patch_size=patch,
        **keys.channels((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        pixel_norm=Norm(f"{base}patch_ln1", pixels, 1e-5),
        patch=Dense(f"{base}patch_dense", pixels, size),
        patch_norm=Norm(f"{base}patch_ln2", size, 1e-5),
        positions=PAIRS,
        position_name=f"{base}pos_embedding",
        position_shape=(rows, 2, size),
        first_norm=Norm(f"{base}pos_norm", size, 1e-5),
        projectors=(
            Projector(
                after=Norm("", size, eps, RMS, is_fp32=True),
                dense=(Dense(projection, size, vision.hidden_size, False),),
            ),
        ),
    )


def _rope_theta(keys: TowerKeys, default: float) -> float:
    given = keys.get("rope_parameters") or {}
    theta = given.get("rope_theta") if isinstance(given, dict) else None
    theta = keys.get("rope_theta", default) if theta is None else theta
    if not isinstance(theta, (int, float)) or theta <= 1:
        raise malformed("rope_theta", "a number above 1", theta)
    return float(theta)


def _pixtral(vision: VisionConfig) -> Tower:
    """Pixtral, in Mistral 3 with a projector that joins patches, or in LLaVA without it."""
    keys, base, whole = TowerKeys(vision), "vision_tower.", Keys(vision.whole, {})
    size, heads = keys.size("hidden_size", 1024), keys.size("num_attention_heads", 16)
    head_dim, inner = keys.size("head_dim", size // heads), keys.size("intermediate_size", 4096)
    block, width = f"{base}transformer.layers.{{}}.", vision.hidden_size
    if (layer := whole.get("vision_feature_layer", -1)) != -1:
        raise malformed("vision_feature_layer", "-1 for a Pixtral tower", layer)
    merge, name = 1, "multi_modal_projector."
    before, dense = None, []
    if vision.family == "mistral3":
        merge = whole.size("spatial_merge_size", 2)
        text = Keys(vision.whole.get("text_config") or {}, {})
        before = Norm(f"{name}norm", size, text.number("rms_norm_eps", 1e-5, 0, 1), RMS)
        inputs = size * merge * merge
        stored = Stored((size, inputs), (0, 2, 3, 1), (size, size, merge, merge))
        dense.append(Dense(f"{name}patch_merger.merging_layer", inputs, size, False, stored=stored))
    has_bias = whole.switch("multimodal_projector_bias", vision.family == "pixtral")
    activation = whole.activation("projector_hidden_act", "gelu")
    dense.append(Dense(f"{name}linear_1", size, width, has_bias, activation))
    dense.append(Dense(f"{name}linear_2", width, width, has_bias))
    gated = (f"{block}feed_forward.{x}_proj" for x in ("gate", "up"))
    return Tower(
        hidden_size=size,
        num_layers=keys.size("num_hidden_layers", 24),
        patch_size=(patch := keys.side("patch_size", 16)),
        merge=merge,
        **keys.channels(*OF_CLIP),
        patch=_conv(f"{base}patch_conv", size, patch, has_bias=False),
        first_norm=Norm(f"{base}ln_pre", size, 1e-5, RMS),
        layer=TowerLayer(
            attention=Attention(
                heads=heads,
                kv_heads=heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                qkv=tuple(
                    Dense(f"{block}attention.{x}_proj", size, heads * head_dim, False)
                    for x in "qkv"
                ),
                out=Dense(f"{block}attention.o_proj", heads * head_dim, size, False),
                rope=ALTERNATING,
                rope_theta=_rope_theta(keys, 10_000.0),
            ),
            attention_norm=Norm(f"{block}attention_norm", size, 1e-5, RMS),
            mlp_norm=Norm(f"{block}ffn_norm", size, 1e-5, RMS),
            up=tuple(Dense(one, size, inner, False) for one in gated),
            down=Dense(f"{block}feed_forward.down_proj", inner, size, False),
            activation=keys.activation("hidden_act", "gelu"),
        ),
        projectors=(Projector(before=before, dense=tuple(dense)),),
    )


def _idefics3(vision: VisionConfig) -> Tower:
    """Idefics 3 and SmolVLM."""
    keys, base = TowerKeys(vision), "vision_model."
    size, patch = keys.size("hidden_size", 1152), keys.side("patch_size", 32)
    merge = Keys(vision.whole, {}).size("scale_factor", 2)
    inputs, side = size * merge * merge, keys.side("image_size", 224) // patch
    return _siglip(
        *(keys, base, patch, side, merge, BUCKETS),
        hidden_size=size,
        layer=_siglip_layer(keys, size, f"{base}encoder.layers.{{}}.", heads_default=16),
        projectors=(
            Projector(
                dense=(
                    Dense("connector.modality_projection.proj", inputs, vision.hidden_size, False),
                )
            ),
        ),
    )


def _lfm2(vision: VisionConfig) -> Tower:
    keys, base = TowerKeys(vision), "vision_tower."
    whole, name = Keys(vision.whole, {}), "multi_modal_projector."
    size, patch = keys.size("hidden_size", 768), keys.side("patch_size", 16)
    side = keys.square_root("num_patches", keys.size("num_patches", 256))
    merge, middle = whole.size("downsample_factor", 2), whole.size("projector_hidden_size", 2560)
    inputs, has_bias = size * merge * merge, whole.switch("projector_bias", True)
    after = None
    if whole.switch("projector_use_layernorm", True):
        after = Norm(f"{name}layer_norm", inputs, 1e-5)
    activation = whole.activation("projector_hidden_act", "gelu")
    return _siglip(
        *(keys, base, patch, side, merge, RESIZED),
        patch=Dense(f"{base}embeddings.patch_embedding", 3 * patch * patch, size),
        layer=_siglip_layer(keys, size, f"{base}encoder.layers.{{}}."),
        projectors=(
            Projector(
                after=after,
                dense=(
                    Dense(f"{name}linear_1", inputs, middle, has_bias, activation),
                    Dense(f"{name}linear_2", middle, vision.hidden_size, has_bias),
                ),
            ),
        ),
    )


def _internvl(vision: VisionConfig) -> Tower:
    keys, base = TowerKeys(vision), "vision_tower."
    whole, name = Keys(vision.whole, {}), "multi_modal_projector."
    size, patch = keys.size("hidden_size", 1024), keys.side("patch_size", 14)
    side, eps = keys.side("image_size", 448) // patch, keys.number("layer_norm_eps", 1e-6, 0, 1)
    merge = round(1 / whole.number("downsample_ratio", 0.5, 0.01, 1))
    if (layer := whole.get("vision_feature_layer", -1)) != -1:
        raise malformed("vision_feature_layer", "-1 for an InternVL tower", layer)
    if not keys.switch("use_absolute_position_embeddings", True):
        raise malformed("use_absolute_position_embeddings", "true", False)
    inputs, width = size * merge * merge, vision.hidden_size
    has_final = not keys.switch("use_mean_pooling", True)
    activation = whole.activation("projector_hidden_act", "gelu")
    return Tower(
        hidden_size=size,
        num_layers=keys.size("num_hidden_layers", 24),
        patch_size=patch,
        merge=merge,
        **keys.channels(*OF_IMAGENET),
        patch=_conv(f"{base}embeddings.patch_embeddings.projection", size, patch),
        positions=TABLE,
        position_name=f"{base}embeddings.position_embeddings",
        position_shape=(1, side * side + 1, size),
        class_token=f"{base}embeddings.cls_token",
        layer=_internvl_layer(keys, size, eps, f"{base}encoder.layer.{{}}."),
        final_norm=Norm(f"{base}layernorm", size, eps) if has_final else None,
        projectors=(
            Projector(
                after=Norm(f"{name}layer_norm", inputs, 1e-5),
                dense=(
                    Dense(f"{name}linear_1", inputs, width, activation=activation),
                    Dense(f"{name}linear_2", width, width),
                ),
            ),
        ),
    )


def _internvl_layer(keys: TowerKeys, size: int, eps: float, block: str) -> TowerLayer:
    heads, inner = keys.heads(16, size), keys.size("intermediate_size", 4096)
    has_bias, is_normed = keys.switch("attention_bias", False), keys.switch("use_qk_norm", False)
    kind = {"layer_norm": LAYER, "rms_norm": RMS}.get(keys.get("norm_type", "layer_norm"))
    if kind is None:
        raise malformed("norm_type", "layer_norm or rms_norm", keys.get("norm_type"))

    def norm_of(x: str) -> Norm | None:
        return Norm(f"{block}attention.{x}_norm", size, 1e-6, RMS) if is_normed else None

    return TowerLayer(
        attention=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=size // heads,
            scale=(size // heads) ** -0.5,
            qkv=tuple(Dense(f"{block}attention.{x}_proj", size, size, has_bias) for x in "qkv"),
            out=Dense(f"{block}attention.projection_layer", size, size),
            q_norm=norm_of("q"),
            k_norm=norm_of("k"),
        ),
        attention_norm=Norm(f"{block}layernorm_before", size, eps, kind),
        attention_factor=f"{block}lambda_1",
        mlp_norm=Norm(f"{block}layernorm_after", size, eps, kind),
        mlp_factor=f"{block}lambda_2",
        up=(Dense(f"{block}mlp.fc1", size, inner),),
        down=Dense(f"{block}mlp.fc2", inner, size),
        activation=keys.activation("hidden_act", "gelu"),
    )


def _qwen2_5(vision: VisionConfig) -> Tower:
    keys = TowerKeys(vision, num_hidden_layers="depth", num_attention_heads="num_heads")
    size = keys.size("hidden_size", 3584)
    heads = keys.heads(16, size)
    inner, merge = keys.size("intermediate_size", 3420), keys.size("spatial_merge_size", 2)
    patch, frames = keys.side("patch_size", 14), keys.side("temporal_patch_size", 2)
    window = keys.size("window_size", 112) // merge // patch
    whole_layers = keys.get("fullatt_block_indexes", (7, 15, 23, 31))
    if not isinstance(whole_layers, list | tuple) or window < 1:
        raise malformed("fullatt_block_indexes", "a list of layers", whole_layers)
    block, joined = "visual.blocks.{}.", size * merge * merge
    return Tower(
        hidden_size=size,
        num_layers=keys.size("num_hidden_layers", 32),
        patch_size=patch,
        frames=frames,
        merge=merge,
        **keys.channels(*OF_CLIP),
        patch=_conv("visual.patch_embed.proj", size, patch, frames, has_bias=False),
        layer=TowerLayer(
            attention=Attention(
                heads=heads,
                kv_heads=heads,
                head_dim=size // heads,
                scale=(size // heads) ** -0.5,
                qkv=(Dense(f"{block}attn.qkv", size, 3 * size),),
                out=Dense(f"{block}attn.proj", size, size),
                rope=ROWS_THEN_COLUMNS,
                window=window,
                whole_layers=tuple(whole_layers),
            ),
            attention_norm=Norm(f"{block}norm1", size, 1e-6, RMS),
            mlp_norm=Norm(f"{block}norm2", size, 1e-6, RMS),
            up=tuple(Dense(f"{block}mlp.{x}_proj", size, inner) for x in ("gate", "up")),
            down=Dense(f"{block}mlp.down_proj", inner, size),
            activation=keys.activation("hidden_act", "silu"),
        ),
        projectors=(
            Projector(
                before=Norm("visual.merger.ln_q", size, 1e-6, RMS),
                dense=(
                    Dense("visual.merger.mlp.0", joined, joined, activation="gelu"),
                    Dense("visual.merger.mlp.2", joined, vision.hidden_size),
                ),
            ),
        ),
    )


FAMILIES = {
    family.name: family
    for family in (
        VisionFamily("qwen3_5", _qwen3, ("image_token_id", 248_056), mrope_section=(11, 11, 10)),
        VisionFamily(
            *("qwen3_vl", _qwen3, ("image_token_id", 151_655)),
            deepstack=(8, 16, 24),
            mrope_section=(24, 20, 20),
        ),
        VisionFamily(
            *("qwen2_5_vl", _qwen2_5, ("image_token_id", 151_655), (), (16, 24, 24)),
            has_interleaved_mrope=False,
        ),
        VisionFamily("gemma3", _gemma3, ("image_token_index", 262_144), sees_whole_images=True),
        VisionFamily("gemma4", _gemma4, ("image_token_id", 258_880), reads_padding=True),
        VisionFamily("gemma4_unified", _gemma4_unified, ("image_token_id", 258_880)),
        VisionFamily("mistral3", _pixtral, ("image_token_index", 10)),
        VisionFamily("pixtral", _pixtral, ("image_token_index", 32_000)),
        VisionFamily("idefics3", _idefics3, ("image_token_id", 128_257)),
        VisionFamily("internvl", _internvl, ("image_token_id", 151_667)),
        VisionFamily("lfm2_vl", _lfm2, ("image_token_id", 396)),
    )
}
# the architectures that read images, with their families
READERS = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Mistral3ForConditionalGeneration": "mistral3",
    "LlavaForConditionalGeneration": "pixtral",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "InternVLForConditionalGeneration": "internvl",
    "Lfm2VlForConditionalGeneration": "lfm2_vl",
}
