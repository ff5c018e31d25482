"""Heads that draft: which models may have them, under which names a checkpoint has one, and how
large it is.

Must not know: torch, tensors' values, how a head computes, requests.

A head for multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3) is a layer of the model's kind
after a projection of two inputs, each with a norm; Nemotron-H, whose layers have one block, has two
layers there. Its tensors have these names here: fc, token_norm, hidden_norm, norm, and those of
layers. A model may have several heads, each of which continues the one before. A head of EAGLE-3
(Li et al. 2025) is a layer of Llama's kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..config import SchedulerConfig, resolved
from ..errors import ModelLoadError
from .architectures import PRE_NORMS, Architecture
from .checkpoint import FLOAT_BYTES, find_weight_files, read_header
from .decoder_config import DecoderConfig, LayerConfig, parse_decoder_config
from .gguf import is_gguf, read_gguf
from .quantization_config import CheckpointQuantization
from .stacked_experts import stacked_pieces

# keys of layers; a head sees the whole context
_OF_LAYERS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")


class HeadNames(NamedTuple):
    """Names in a checkpoint. `is_hidden_first` is about the concatenation that fc reads."""

    fc: str
    token_norm: str
    hidden_norm: str
    norm: str
    layers: tuple[str, ...]
    is_hidden_first: bool = False

    def of(self, name: str) -> str:
        """The checkpoint's name of a tensor of the head: fc.weight, layers.0.mlp.up_proj.weight."""
        part, _, rest = name.partition(".")
        if part != "layers":
            return f"{self._asdict()[part]}.{rest}"
        index, _, rest = rest.partition(".")
        return f"{self.layers[int(index)]}.{rest}"


def known_names(num_layers: int, num_head_layers: int = 1, depth: int = 0) -> list[HeadNames]:
    """The names of MiMo, of DeepSeek and GLM, of Qwen, and of Nemotron-H, for the head at a depth
    of a chain. DeepSeek and GLM number the head's layer after the model's `num_layers`; Nemotron-H
    has `num_head_layers` layers in it. Qwen's heads share all but their layers.
    """
    mimo = f"model.mtp_layers.{depth}"
    own = range(depth * num_head_layers, (depth + 1) * num_head_layers)
    first, last = f"mtp.layers.{own[0]}", f"mtp.layers.{own[-1]}"
    return [
        HeadNames(
            f"{mimo}.input_proj",
            f"{mimo}.token_layernorm",
            f"{mimo}.hidden_layernorm",
            f"{mimo}.final_layernorm",
            (mimo,),
            is_hidden_first=True,
        ),
        _of_deepseek(num_layers + depth),
        HeadNames(
            "mtp.fc",
            "mtp.pre_fc_norm_embedding",
            "mtp.pre_fc_norm_hidden",
            "mtp.norm",
            (first,),
        ),
        HeadNames(
            f"{first}.eh_proj",
            f"{first}.enorm",
            f"{first}.hnorm",
            f"{last}.final_layernorm",
            tuple(f"mtp.layers.{index}" for index in own),
        ),
    ]


def _of_deepseek(layer_index: int) -> HeadNames:
    layer = f"model.layers.{layer_index}"
    norms = f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.shared_head.norm"
    return HeadNames(f"{layer}.eh_proj", *norms, (layer,))


def find_heads(
    directory: Path, num_layers: int, num_head_layers: int, most: int
) -> list[HeadNames]:
    """Finds the names that safetensors files use for the heads of a chain, at most `most`; see
    known_names. Tensors of a GGUF file, whose path `directory` is, have those of DeepSeek
    (gguf_architectures.py), and its first head is found. Raises ModelLoadError where there is no
    head with so many layers, and for files that cannot be read.
    """
    if is_gguf(directory):
        fc = f"blk.{num_layers}.nextn.eh_proj.weight"
        if fc in read_gguf(directory).tensors and num_head_layers == 1:
            return [_of_deepseek(num_layers)]
        raise ModelLoadError(f"{directory}: has no head for multi-token prediction ({fc})")
    stored = {name for path in find_weight_files(directory) for name in read_header(path)}
    chains = [
        [names for names in chain if len(names.layers) == num_head_layers]
        for chain in zip(*(known_names(num_layers, num_head_layers, d) for d in range(most)))
    ]
    for chain in filter(None, chains):
        found = list(takewhile(lambda names: _has_head(names, stored), chain))
        if found:
            return found
    tried = ", ".join(f"{chain[0].fc}.weight" for chain in chains if chain)
    raise ModelLoadError(f"{directory}: has no head for multi-token prediction ({tried})")


def _has_head(names: HeadNames, stored: Collection[str]) -> bool:
    starts = f"{names.fc}.", f"{names.layers[0]}."
    return all(any(name.startswith(start) for name in stored) for start in starts)


def scaled_outputs(config: DecoderConfig) -> str:
    """Says which models scale what heads of any kind share with them; empty where this one does
    not.
    """
    is_scaled = config.embedding_scale != 1.0 or config.logits_scale != 1.0
    return "models that scale embeddings or logits" if is_scaled else ""


def why_no_head(row: Architecture | None, config: DecoderConfig) -> str:
    """Says which models do not draft with a head for multi-token prediction; empty where this one
    does. row: of its architecture, if there is one.
    """
    if row is None:
        return "models in transformers' code or of a plugin's class"
    if (row.norms != PRE_NORMS and row.head_keys is None) or config.residual_scale != 1.0:
        return f"{row.model_type}, whose layers have other norms or scales than known heads"
    return scaled_outputs(config)


def head_config(row: Architecture, hf_config: dict[str, Any]) -> DecoderConfig:
    """The configuration of a stack with the head's layers alone, for the config.json of a model:
    what the family's own keys say (Architecture.head_keys), or one layer. It has attention that
    sees the whole context, and experts where other layers of the model have some.
    """
    if row.head_keys is not None:
        return row.parse(hf_config | row.head_keys(hf_config))
    config = row.parse(hf_config)
    experts = config.experts
    return replace(
        config,
        num_hidden_layers=1,
        layers=(LayerConfig(),) if config.layers else (),
        sliding_windows=(0,),
        unrotated_layers=(),
        experts=None if experts is None else replace(experts, dense_layers=()),
    )


def head_shapes(row: Architecture, head: DecoderConfig) -> dict[str, list[int]]:
    """The shape of each tensor of a head, whose configuration is `head`."""
    size = head.hidden_size
    norms = ("token_norm", "hidden_norm", "norm")
    shapes = {"fc.weight": [size, 2 * size]} | {f"{name}.weight": [size] for name in norms}
    return shapes | {
        f"layers.{index}.{name}": shape
        for index in range(head.num_hidden_layers)
        for name, shape in row.layer_shapes(head, index)
    }


def quantization_of_head(
    quantization: CheckpointQuantization | None,
    directory: Path,
    shapes: Mapping[str, list[int]],
    num_experts: int,
) -> CheckpointQuantization | None:
    """The quantization of a checkpoint without those layers of its head that the files store as
    plain numbers. Tools that quantize a model mostly copy its head, and config.json need not say
    so. `shapes` has the names in the files; num_experts: see stacked_pieces.
    """
    if quantization is None:
        return None
    stored = {
        name
        for path in find_weight_files(directory)
        for name, tensor in read_header(path).items()
        if tensor.dtype in FLOAT_BYTES
    }
    pieces = stacked_pieces(shapes, num_experts)
    plain = {
        name.removesuffix(".weight")
        for name in shapes
        if name in stored or (name in pieces and pieces[name].stored in stored)
    }
    is_ignored = quantization.is_ignored
    return replace(quantization, is_ignored=lambda layer: layer in plain or is_ignored(layer))


def eagle3_config(hf_config: dict[str, Any]) -> DecoderConfig:
    """Parses the config.json of a head of EAGLE-3. Raises ModelLoadError, naming the key, for one
    that is missing, out of range or unsupported.
    """
    own = {key: hf_config[key] for key in hf_config if key not in _OF_LAYERS}
    honours = "attention_bias", "mlp_bias", "is_causal"
    return parse_decoder_config(own | {"num_hidden_layers": 1}, honours=honours)


def head_rows(scheduling: SchedulerConfig, num_heads: int) -> int:
    """The most tokens of a head's pass: those of the model's pass, and those that each request has
    held back. A further head of a chain holds as many back again, and positions that read drafts.
    """
    drafts = resolved(scheduling.speculative_config).num_speculative_tokens
    most_tokens = resolved(scheduling.max_num_batched_tokens)
    of_request = drafts + 1 if num_heads == 1 else 2 * (drafts + 1) + num_heads
    return most_tokens + scheduling.max_num_seqs * of_request
