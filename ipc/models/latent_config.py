"""What config.json says of multi-head latent attention (DeepSeek-AI 2024), and the names and shapes
of its tensors.

Must not know: torch, files, layers, which architectures there are. executor/models/latent.py builds
the layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import ModelLoadError
from .config_values import integer, malformed
from .rope_config import INDEX_TOPK, parse_rope_parameters

NORM_EPS = 1e-6  # of both norms of latent vectors, whatever rms_norm_eps says
MOST_OF_A_HEAD = 65_536


class LatentConfig(msgspec.Struct, frozen=True):
    """Sizes are counts of features."""

    rank: int  # of the latent vector of a token's keys and values
    query_rank: int  # of that of its queries; 0: they are made of the hidden state
    rotary_dim: int  # of a head's query, and of the key that all heads share
    key_dim: int  # of a head, without what rotates
    value_dim: int  # of a head
    # Where a context is longer, an indexer chooses so many of its tokens for each query; 0: there
    # is none. It is not computed: contexts are shorter (model_context).
    index_topk: int
    is_interleaved: bool  # element 2 * i is rotated with 2 * i + 1, else with half a head further

    @property
    def row(self) -> int:
        """Numbers that the cache keeps of a token."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """The size of a head's query."""
        return self.key_dim + self.rotary_dim

    def weight_shapes(
        self, hidden_size: int, num_heads: int, has_biases: bool
    ) -> Iterator[tuple[str, list[int]]]:
        """Name and shape of every tensor of a layer."""
        query_rows, bias = num_heads * self.query_dim, has_biases
        linears = [
            ("kv_a_proj_with_mqa", self.row, hidden_size, bias),
            ("kv_b_proj", num_heads * (self.key_dim + self.value_dim), self.rank, False),
            ("o_proj", hidden_size, num_heads * self.value_dim, bias),
        ]
        if self.query_rank:
            linears.append(("q_a_proj", self.query_rank, hidden_size, bias))
            linears.append(("q_b_proj", query_rows, self.query_rank, False))
            yield "q_a_layernorm.weight", [self.query_rank]
        else:
            linears.append(("q_proj", query_rows, hidden_size, False))
        yield "kv_a_layernorm.weight", [self.rank]
        for name, rows, columns, has_bias in linears:
            yield f"{name}.weight", [rows, columns]
            if has_bias:
                yield f"{name}.bias", [rows]

    def linear_shapes(self, hidden_size: int, num_heads: int) -> list[tuple[int, int]]:
        """(rows, columns) of the linear layers, as they are merged. kv_b_proj is none: its parts
        are matrices of heads.
        """
        queries = num_heads * self.query_dim
        output = (hidden_size, num_heads * self.value_dim)
        if self.query_rank:
            return [(self.query_rank + self.row, hidden_size), (queries, self.query_rank), output]
        return [(queries, hidden_size), (self.row, hidden_size), output]

    def multiplied_weights(self, hidden_size: int, num_heads: int) -> int:
        """The weights of a layer that a token multiplies."""
        of_heads = num_heads * (self.key_dim + self.value_dim) * self.rank
        shapes = self.linear_shapes(hidden_size, num_heads)
        return of_heads + sum(rows * columns for rows, columns in shapes)


def parse_latent_config(hf_config: dict[str, Any]) -> LatentConfig:
    """Raises ModelLoadError, naming the key, for one that is missing or out of range."""
    sizes = {
        key: integer(key, hf_config.get(key), MOST_OF_A_HEAD)
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    }
    query_rank = hf_config.get("q_lora_rank")
    if query_rank is not None:
        integer("q_lora_rank", query_rank, MOST_OF_A_HEAD)
    if sizes["qk_rope_head_dim"] % 2:
        raise malformed("qk_rope_head_dim", "even", sizes["qk_rope_head_dim"])
    is_interleaved = hf_config.get("rope_interleave")
    if is_interleaved not in (None, False, True):
        raise malformed("rope_interleave", "true or false", is_interleaved)
    return LatentConfig(
        sizes["kv_lora_rank"],
        query_rank or 0,
        sizes["qk_rope_head_dim"],
        sizes["qk_nope_head_dim"],
        sizes["v_head_dim"],
        hf_config.get(INDEX_TOPK) or 0,
        is_interleaved is not False,
    )


def latent_keys(hf_config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the size of what rotates, as other decoders name it."""
    return hf_config | {"head_dim": parse_latent_config(hf_config).rotary_dim}


def indexed_keys(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Those of a model with an indexer, which all of its layers have, or share.

    Raises ModelLoadError, naming the key, where it does not say how many tokens the indexer
    chooses.
    """
    integer(INDEX_TOPK, hf_config.get(INDEX_TOPK))
    return latent_keys(hf_config) | {"layer_types": None}


def latent_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The fields of DecoderConfig that multi-head latent attention determines."""
    config = parse_latent_config(hf_config)
    return {
        "latent": config,
        "head_dim": config.row,
        "num_key_value_heads": 1,
        "attention_scale": latent_scale(config, parse_rope_parameters(hf_config)),
    }


def latent_scale(config: LatentConfig, rope: dict[str, Any]) -> float:
    """The factor of the attention's logits. It grows with YaRN's factor, by mscale_all_dim
    (arXiv 2309.00071, section 3.4).
    """
    scale = config.query_dim**-0.5
    weight, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor", 1.0)
    if rope["rope_type"] != "yarn" or factor <= 1:
        return scale
    return scale * (0.1 * weight * math.log(factor) + 1.0) ** 2


def latent_dense_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    """The layers without experts: those that mlp_layer_types calls "dense"; or the first ones, and
    all but every moe_layer_freq-th.
    """
    num_layers, listed = hf_config["num_hidden_layers"], hf_config.get("mlp_layer_types")
    if listed is None:
        first = integer("first_k_dense_replace", hf_config.get("first_k_dense_replace"), least=0)
        every = integer("moe_layer_freq", hf_config.get("moe_layer_freq", 1))
        return tuple(i for i in range(num_layers) if i < first or i % every)
    kinds = {"dense", "sparse"}
    if not isinstance(listed, list) or not all(one in ("dense", "sparse") for one in listed):
        raise malformed("mlp_layer_types", f"a list of {' and '.join(sorted(kinds))}", listed)
    if len(listed) != num_layers:
        raise ModelLoadError(
            f"config.json: mlp_layer_types has {len(listed)} entries for "
            f"num_hidden_layers={num_layers}"
        )
    return tuple(i for i, kind in enumerate(listed) if kind == "dense")
