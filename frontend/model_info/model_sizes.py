"""A model's sizes, from its config.json alone: parameters, bytes of weights, bytes of KV cache per
token. Parameters of models that run through transformers are read from the headers of their files.

Must not know: torch, tensors' values, memory. tests/frontend/model_info/test_model_sizes.py
compares the sizes with the models in executor/models/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...ipc.models.architectures import (
    ARCHITECTURES,
    BESIDE_NORMS,
    ENCODERS,
    NATIVE,
    Architecture,
)
from ...ipc.models.checkpoint import find_weight_files, read_header, read_stored_weights
from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.draft_heads import eagle3_config, head_config, head_shapes
from ...ipc.models.encoder_config import EncoderConfig
from ...ipc.models.fallback_architectures import TRANSFORMERS, parse_model
from ...ipc.models.gguf import is_gguf, read_gguf
from ...ipc.models.gguf_weights import DTYPE_BYTES, tensors_by_name
from ...ipc.models.memory_plan import HEAD_BITS, QUANTIZATION_BITS, quantized_bytes
from ...ipc.models.quantization_config import parse_quantization
from ...ipc.models.vision_config import VisionConfig
from ...ipc.models.vision_families import tower_of

# kernels/triton/top_k_top_p.py lists tokens for a cut, with their orders and masses
SAMPLING_ROW_BYTES = 2 * 8192 * 8
ATTENTION_PIECES = 32  # kernels/triton/attention_decode.py
# these matrices are no linear layers: experts, positions, embeddings of layers
_NOT_LINEAR = re.compile(r"\.experts\.|wpe|embed|router")
_FP32_VECTORS = (
    *("sinks", ".A_log", ".dt_bias", ".D", ".expert_bias", ".e_score_correction_bias"),
    *("router.scale", "router.per_expert_scale", ".o_norm.weight"),
    *("altup.correction_coefs.weight", "altup.prediction_coefs.weight"),
)
KV_SCALE_BYTES = 4  # per head in int8 (kernels/ops.py: kv_cache_row)


def kv_bytes_by_layer(
    config: DecoderConfig | EncoderConfig, dtype: str, kv_cache_dtype: str = "auto"
) -> list[int]:
    """Returns the bytes of a token's keys and values in each layer that owns some
    (DecoderConfig.cache_layers). A text encoder has none.
    """
    number_bytes = DTYPE_BYTES[dtype] if kv_cache_dtype == "auto" else 1
    scale_bytes = KV_SCALE_BYTES if kv_cache_dtype == "int8" else 0
    kinds = [config.layer(index) for index in config.cache_layers]
    has_values = isinstance(config, EncoderConfig) or config.latent is None
    heads = [(1 + has_values) * one.num_kv_heads for one in kinds]
    return [count * (one.head_dim * number_bytes + scale_bytes) for count, one in zip(heads, kinds)]


def largest_head_dim(config: DecoderConfig | EncoderConfig) -> int:
    """Returns the size of heads in the layer with the largest ones."""
    return max(config.layer(index).head_dim for index in range(config.num_hidden_layers))


def kv_bytes_per_token(
    config: DecoderConfig | EncoderConfig, dtype: str, kv_cache_dtype: str = "auto"
) -> int:
    """Returns the bytes of keys and values of all layers, or 0 for a model without a cache."""
    return sum(kv_bytes_by_layer(config, dtype, kv_cache_dtype))


@dataclass(frozen=True)
class ModelSizes:
    architecture: str
    config: DecoderConfig | EncoderConfig
    num_parameters: int
    num_fp32: int  # parameters of norms and heads that are fp32 in every dtype

    def weights_bytes(self, dtype: str, quantization: str | None = None) -> int:
        """Returns the bytes as packed by the engine. With quantization, the embedding of an untied
        head, biases and norms keep the dtype.
        """
        wider = self.wider_bytes(dtype)
        if quantization is None:
            return self.num_parameters * DTYPE_BYTES[dtype] + wider
        linears = [(shape, QUANTIZATION_BITS[quantization]) for shape in self.linear_shapes()]
        if self.config.has_lm_head:
            linears.append(((self.config.vocab_size, self.config.hidden_size), HEAD_BITS))
        rest = self.num_parameters - sum(rows * columns for (rows, columns), _ in linears)
        packed = sum(quantized_bytes(*shape, bits) for shape, bits in linears)
        return rest * DTYPE_BYTES[dtype] + wider + packed

    def wider_bytes(self, dtype: str) -> int:
        """Returns how many bytes fp32 adds to those of the dtype."""
        return self.num_fp32 * (DTYPE_BYTES["float32"] - DTYPE_BYTES[dtype])

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Returns (rows, columns) of every linear layer's weight as merged by
        executor/models/layers.py, without the head.
        """
        return _linear_shapes(self.config, self.architecture)

    def experts_bytes(self, dtype: str, quantization: str | None = None) -> int:
        """Returns how many of weights_bytes the routed experts take, which engines may divide."""
        shapes = NATIVE[self.architecture].weight_shapes(self.config)  # type: ignore[arg-type]
        rest = sum(prod(shape) for name, shape in shapes.items() if ".experts." in name)
        if quantization is None:
            return rest * DTYPE_BYTES[dtype]
        linears, bits = _expert_shapes(self.config), QUANTIZATION_BITS[quantization]
        rest -= sum(rows * columns for rows, columns in linears)
        packed = sum(quantized_bytes(*shape, bits) for shape in linears)
        return rest * DTYPE_BYTES[dtype] + packed

    def step_bytes(self, dtype: str, num_tokens: int, num_logits: int) -> int:
        """Estimates the peak memory of a step on a GPU, in bytes: the residual stream, inputs and
        outputs of the widest layer, logits and a copy of them, and the buffers of sampling and of
        decode attention. The engine measures the actual value.
        """
        config = self.config
        kinds = [config.layer(index) for index in range(config.num_hidden_layers)]
        heads = config.num_attention_heads
        attention = max(2 * (heads + one.num_kv_heads) * one.head_dim for one in kinds)
        inner, results = 3 * config.intermediate_size, 0
        if config.experts is not None:  # results of experts are in fp32
            inner = max(inner, config.experts.per_token * config.experts.size)
            results = 4 * config.experts.per_token * config.hidden_size
        per_token = (2 * config.hidden_size + max(attention, inner)) * DTYPE_BYTES[dtype] + results
        pieces = heads * ATTENTION_PIECES * (max(one.head_dim for one in kinds) + 2) * 4
        return num_tokens * per_token + num_logits * (
            2 * config.vocab_size * 4 + SAMPLING_ROW_BYTES + pieces
        )


@dataclass(frozen=True)
class HeadSizes(ModelSizes):
    """Sizes of a head that drafts, without the embedding and output head that are the model's."""

    linears: tuple[tuple[int, int], ...]
    num_states: int  # [tokens of a pass, hidden_size] each, which count as weights
    # of a head for multi-token prediction, by the names of ipc/models/draft_heads.py
    shapes: Mapping[str, list[int]] = field(default_factory=dict)

    def linear_shapes(self) -> list[tuple[int, int]]:
        """See ModelSizes."""
        return list(self.linears)

    def states_bytes(self, dtype: str, num_rows: int) -> int:
        """Returns the bytes of the states for passes of so many tokens."""
        return self.num_states * num_rows * self.config.hidden_size * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class StoredSizes(ModelSizes):
    """Sizes of a model whose tensors are known from its files alone."""

    shapes: Mapping[str, list[int]]
    kept: Mapping[str, list[int]]  # of quantized weights that may stay blocks

    def weights_bytes(self, dtype: str, quantization: str | None = None) -> int:
        """See ModelSizes. Embeddings, experts and vectors keep the dtype."""
        if quantization is None:
            return self.num_parameters * DTYPE_BYTES[dtype]
        tables = [n for n, shape in self.shapes.items() if shape[0] == self.config.vocab_size]
        num_bytes = 0
        for name, shape in self.shapes.items():
            if name in tables:  # the last is the head; a single one is also the embedding
                bits = HEAD_BITS if name == tables[-1] and len(shape) == 2 else None
            else:
                is_linear = len(shape) == 2 and not _NOT_LINEAR.search(name)
                bits = QUANTIZATION_BITS[quantization] if is_linear else None
            num_bytes += (
                prod(shape) * DTYPE_BYTES[dtype]
                if bits is None
                else quantized_bytes(shape[0], shape[1], bits)
            )
        return num_bytes


def measure_model(
    hf_config: dict[str, Any], directory: str | Path = "", model_impl: str = "auto"
) -> ModelSizes:
    """Returns the sizes of a model. `directory` is that of the weights, which is read for models
    that run through transformers.

    Raises ModelLoadError, with the engine's message, for a model that the engine would reject, and
    where those weights are not there.
    """
    implementation, architecture, config = parse_model(hf_config, model_impl)
    if implementation == TRANSFORMERS:
        kept: Mapping[str, list[int]] = {}
        if is_gguf(path := Path(directory)):
            file = tensors_by_name(read_gguf(path))
            shapes = {name: list(tensor.shape) for name, tensor in file.items()}
        else:
            stored = read_stored_weights(path, parse_quantization(hf_config))
            shapes, kept = stored.shapes, stored.kept
        num_parameters = sum(map(prod, shapes.values()))
        return StoredSizes(architecture, config, num_parameters, 0, shapes, kept)
    row = NATIVE[architecture]
    shapes = row.weight_shapes(config)  # type: ignore[arg-type]
    norms = _norms_of_layers(row, shapes) if isinstance(row, Architecture) else []
    num_fp32 = _count_fp32(config, shapes, norms)
    num_fp32 += sum(prod(shape) for layer in config.head for _, shape in layer.shapes())
    return ModelSizes(architecture, config, sum(map(prod, shapes.values())), num_fp32)


def encoder_bytes(vision: VisionConfig | None, dtype: str, quantization: str | None = None) -> int:
    """Returns the bytes of the weights of an encoder of images, or 0 for a model without one."""
    if vision is None:
        return 0
    tower = tower_of(vision)
    number_bytes = DTYPE_BYTES[dtype]
    num_bytes = sum(map(prod, tower.weight_shapes().values())) * number_bytes
    num_bytes += tower.num_fp32 * (DTYPE_BYTES["float32"] - number_bytes)
    if quantization is not None:
        bits = QUANTIZATION_BITS[quantization]
        for rows, columns in tower.linear_shapes():
            num_bytes += quantized_bytes(rows, columns, bits) - rows * columns * number_bytes
    return num_bytes


def measure_mtp_head(hf_config: dict[str, Any]) -> HeadSizes:
    """Returns the sizes of the head for multi-token prediction of a model with this config.json.

    Raises ModelLoadError for a model that the engine would reject.
    """
    _, architecture, _ = parse_model(hf_config)
    row = ARCHITECTURES[architecture]
    own = replace(head_config(row, hf_config), has_lm_head=False)
    shapes = head_shapes(row, own)
    num_fp32, size = _count_fp32(own, shapes, _norms_of_layers(row, shapes)), own.hidden_size
    linears = *_linear_shapes(own, architecture), *[(size, size)] * 2
    num_parameters = sum(map(prod, shapes.values()))
    return HeadSizes(architecture, own, num_parameters, num_fp32, linears, 1, shapes)


def measure_eagle3(hf_config: dict[str, Any], directory: Path) -> HeadSizes:
    """Returns the sizes of a head of EAGLE-3. `directory` has its weights, whose headers say
    whether it has biases.

    Raises ModelLoadError for a head that the engine would reject.
    """
    config = replace(eagle3_config(hf_config), has_lm_head=False)
    size, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    rows = queries + 2 * config.num_key_value_heads * config.head_dim
    num_known = hf_config.get("draft_vocab_size") or config.vocab_size
    linears = (
        *[(size, size)] * 3,
        *[(rows, size)] * 2,
        *((size, queries), (2 * inner, size), (size, inner), (num_known, size)),
    )
    names = {name for path in find_weight_files(directory) for name in read_header(path)}
    vectors = 4 * size + (rows if "midlayer.self_attn.q_proj.bias" in names else 0)
    num_parameters = vectors + sum(map(prod, linears))
    return HeadSizes("LlamaForCausalLM", config, num_parameters, 0, linears, num_states=2)


def _count_fp32(
    config: DecoderConfig | EncoderConfig, shapes: Mapping[str, list[int]], norms: Iterable[str]
) -> int:
    """Counts the parameters that are fp32 in every dtype; norms: those of LayerFactory.norm."""
    fp32 = [shape for name, shape in shapes.items() if name.endswith(_FP32_VECTORS)]
    if config.fp32_norms:
        fp32 += [shapes[name] for name in norms]
    fp32 += [shape for name, shape in shapes.items() if "relative_attention_bias" in name]
    return sum(map(prod, fp32))


def _norms_of_layers(row: Architecture, names: Iterable[str]) -> list[str]:
    """The norms that LayerFactory.norm makes: all but those of mixers."""
    beside = (f"{name}.weight" for name in BESIDE_NORMS)
    ends = ("norm.weight", f".{row.names.final_norm}.weight", *beside)
    of_mixer = f".{row.names.mixer}."
    found = [name for name in names if name.endswith(ends)]
    return [name for name in found if not row.names.mixer or of_mixer not in name]


def _linear_shapes(
    config: DecoderConfig | EncoderConfig, architecture: str
) -> list[tuple[int, int]]:
    """Returns (rows, columns) of every linear layer's weight as merged by
    executor/models/layers.py, without the head.
    """
    hidden = config.hidden_size
    up = 1 + (
        config.has_gated_mlp
        if isinstance(config, DecoderConfig)
        else ENCODERS[architecture].is_gated
    )
    experts, shapes = config.experts, _expert_shapes(config)
    for index in range(config.num_hidden_layers):
        own = config.layer(index)
        if own.has_attention:
            shapes += config.attention_shapes(own)
        if own.mixer is not None:
            shapes += own.mixer.linear_shapes(hidden)
        size = own.intermediate_size or config.intermediate_size
        if experts is not None and index not in experts.dense_layers:
            size = size if experts.names.is_beside_mlp else experts.shared_size
        if own.has_mlp and size:
            shapes += [(up * size, hidden), (hidden, size)]
    if isinstance(config, DecoderConfig) and (inputs := config.per_layer_inputs) is not None:
        shapes += [(config.num_hidden_layers * inputs.size, hidden)]
        shapes += [(inputs.size, hidden), (hidden, inputs.size)] * config.num_hidden_layers
    if isinstance(config, DecoderConfig) and (altup := config.altup) is not None:
        others, rank = altup.num_streams - 1, altup.laurel_rank
        shapes += [(others * hidden, hidden), *[(hidden, hidden)] * others]
        shapes += [(rank, hidden), (hidden, rank)] * config.num_hidden_layers
    return shapes


def _expert_shapes(config: DecoderConfig | EncoderConfig) -> list[tuple[int, int]]:
    """Returns the shapes of _linear_shapes that belong to routed experts."""
    if (experts := config.experts) is None:
        return []
    hidden, latent = config.hidden_size, experts.latent_size
    width, inputs = latent or hidden, 1 if experts.names.gate is None else 2
    of_layer = [(inputs * experts.size, width), (width, experts.size)] * experts.count
    if latent:
        of_layer += [(latent, hidden), (hidden, latent)]
    return of_layer * (config.num_hidden_layers - len(experts.dense_layers))
