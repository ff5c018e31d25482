"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): the cache holds a latent vector of
each token, of which all heads make their keys and values.

Must not know: architectures, files, requests, how a layer with weights is made.

The matrices that make keys and values are never applied to the cache. A head multiplies its query
by the one, and its result by the other ("absorbed"). Prompts and decoding have the same arithmetic.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.latent_config import NORM_EPS
from ...kernels.ops import AttentionMetadata
from ..weights.packed_rows import PackedRows, copy_weights
from ..weights.table import Slice, Weight
from .layers import LayerFactory, Rope, Weights


class HeadProjections:
    """What makes the keys and values of each head of a latent vector, as it is applied to queries
    and to results. A quantized or GGUF checkpoint's weight is unpacked to the model's dtype.
    """

    saved_bytes = 0  # by blocks that are kept
    adapters = None  # LoRA applies to linear layers alone

    def __init__(self, name: str, make: LayerFactory, config: DecoderConfig):
        assert config.latent is not None
        own, total = config.latent, config.num_attention_heads
        self.name, self._pack = name, make.ops.pack_head_linear
        self._sizes = own.key_dim, own.value_dim
        height = sum(self._sizes)  # of a head's rows
        self._part: Slice | None = None
        begin, end = make.group.range_of(total * height, height)
        if make.group.size > 1:
            self._part = Slice(0, begin, end, total * height)
        self._weight: torch.Tensor | None = make.parameter(end - begin, own.rank)

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
        """Fills and packs the weight [heads * (key_dim + value_dim), rank], the rows of a head
        together.
        """
        copy_weights(tensor, values)
        heads = torch.Tensor.as_subclass(tensor, torch.Tensor).unflatten(0, (-1, sum(self._sizes)))
        of_keys, of_values = heads.split(self._sizes, dim=1)
        self.to_latent = self._pack(of_keys.transpose(1, 2).contiguous())
        self.to_values = self._pack(of_values.contiguous())
        self._weight = None

    def weights(self, prefix: str) -> Weights:
        if self._weight is None:
            raise RuntimeError("the weight is packed: its rows are no longer in one tensor")
        yield f"{prefix}{self.name}.weight", Weight(self._weight, self, part=self._part)


class LatentAttention:
    """Causal attention over latent vectors, with rotary positions in a part of the heads. A layer
    without rotary positions has that part too, as it is.
    """

    sliding_window = 0
    has_values = False  # beside the keys, in the cache
    num_kv_heads = 1

    def __init__(
        self, make: LayerFactory, config: DecoderConfig, layer: int, ropes: list[Rope | None]
    ):
        """`layer` is the index in the stack, and `ropes` come from make.ropes."""
        assert config.latent is not None
        rope, bias, size = ropes[layer], config.attention_bias, config.hidden_size
        self.config, self.ops = config.latent, make.ops
        self.rope = None if rope is None else rope.key
        own, total = config.latent, config.num_attention_heads
        self.num_heads = make.share(total, "num_attention_heads")
        self.head_dim = own.row
        self.rotate = make.ops.rotary_embedding
        if own.is_interleaved:
            self.rotate = make.ops.rotary_embedding_interleaved
        norms = replace(config, rms_norm_eps=NORM_EPS)
        # every rank makes the latent vectors, and has some heads
        latents = {"kv_a_proj_with_mqa": own.row}
        if own.query_rank:
            latents = {"q_a_proj": own.query_rank, **latents}
        self.a_proj = make.linear(size, latents, bias, is_divided=False)
        self.kv_a_norm = make.norm("kv_a_layernorm", own.rank, norms)
        queries, unit = total * own.query_dim, own.query_dim
        self.q_a_norm = None
        if own.query_rank:
            self.q_a_norm = make.norm("q_a_layernorm", own.query_rank, norms)
            self.q_proj = make.linear(own.query_rank, {"q_b_proj": queries}, unit=unit)
        else:
            self.q_proj = make.linear(size, {"q_proj": queries}, unit=unit)
        self.heads = HeadProjections("kv_b_proj", make, config)
        self.o_proj = make.row_linear("o_proj", total * own.value_dim, size, bias)
        self.scale = config.attention_scale
        # [num_blocks, block_size, 1, rank + rotary_dim], set by bind_cache
        self.key_cache: torch.Tensor | None = None
        self.value_cache: torch.Tensor | None = None
        self.kv_cache_group = 0  # the group of its block table

    def bind_cache(self, key: torch.Tensor | None, value: torch.Tensor | None, group: int) -> None:
        """Makes `key` its part of the KV cache, with the block table of this group of layers. None
        takes the cache away. `value` is None.
        """
        self.key_cache, self.value_cache, self.kv_cache_group = key, value, group

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size], positions [T] i64 -> [T, hidden_size].

        Writes the latent vectors and rotated keys of the T tokens to the cache.
        """
        own, ops, num_tokens = self.config, self.ops, len(x)
        if metadata.groups:
            metadata = metadata.groups[self.kv_cache_group]
        latents = self.a_proj(x)
        latent, key = latents[:, -own.row :].split((own.rank, own.rotary_dim), dim=1)
        if self.q_a_norm is not None:
            x = self.q_a_norm(latents[:, : own.query_rank])
        query = self.q_proj(x).view(num_tokens, self.num_heads, own.query_dim)
        query, rotary_query = query.split((own.key_dim, own.rotary_dim), dim=2)
        if self.rope is not None:
            self.rotate(positions, rotary_query, key.unsqueeze(1), self.rope)
        ops.store_latents(self.kv_a_norm(latent), key, self.key_cache, metadata.slot_mapping)
        attended = ops.latent_attention(
            self.heads.to_latent(query), rotary_query, self.key_cache, metadata, self.scale
        )
        values = self.heads.to_values(attended)
        return self.o_proj(values.reshape(num_tokens, self.num_heads * own.value_dim))

    def weights(self, prefix: str) -> Weights:
        for layer in (self.q_a_norm, self.kv_a_norm, self.a_proj, self.q_proj, self.o_proj):
            if layer is not None:
                yield from layer.weights(prefix)
        yield from self.heads.weights(prefix)
