"""The stack that decoder-only models share: embedding, layers of attention and MLP with norms
before or after them, a final norm, a head.

Must not know: which architectures there are, files, requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...ipc.models.architectures import PRE_NORMS, Architecture, LayerNorms
from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.ranks import head_in_layers
from ...kernels.ops import AttentionMetadata
from ..model import Model, RoutedTokens
from ..pooling.heads import PoolingHead, TokenScore, make_head
from .blocks import Attention, GatedMLP, attention_for
from .experts import MixtureOfExperts
from .layers import Embedding, LayerFactory, Linear, RMSNorm, Weights
from .linear import GatheredHead

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class MLP(Protocol):
    """The block that follows attention in a layer."""

    name: str  # of the layer's part that has its tensors

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...  # [T, hidden_size], as the result

    def weights(self, prefix: str) -> Weights: ...


class DecoderLayer:
    """Attention and MLP. Each reads the residual stream through its norm `before`. Its result goes
    through its norm `after` and is added to the stream. A layer may lack some of these norms.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        self_attn: Attention,
        mlp: MLP,
        norms: LayerNorms,
    ):
        self.self_attn = self_attn
        self.mlp = mlp
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else make.norm(name, config.hidden_size, config) for name in norms
        )

    def weights(self, prefix: str) -> Weights:
        yield from self.self_attn.weights(f"{prefix}self_attn.")
        yield from self.mlp.weights(f"{prefix}{self.mlp.name}.")
        for norm in (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp):
            if norm is not None:
                yield from norm.weights(prefix)


class Decoder(Model):
    """A causal language model.

    `make_attention` and `make_mlp`, functions of the layer's index, build the blocks of a layer.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        make_attention: Callable[[int], Attention],
        make_mlp: Callable[[int], MLP],
        norms: LayerNorms = PRE_NORMS,
        embedding_scale: float | None = None,
    ):
        """embedding_scale: the default is the config's."""
        self.config = config
        self.ops = make.ops
        self.embedding_scale = config.embedding_scale
        if embedding_scale is not None:
            self.embedding_scale = embedding_scale
        self.dtype, self.stages = make.dtype, make.group.stages
        is_tied = config.has_lm_head and config.tie_word_embeddings
        self.embed_tokens: Embedding | None = None
        if self.stages.is_first or (self.stages.is_last and is_tied):
            head = "lm_head" if self.stages.is_last and is_tied else None
            self.embed_tokens = make.embedding(
                "embed_tokens", config.vocab_size, config.hidden_size, head
            )
        # the experts of each layer that other engines have
        self.other_experts: set[int] = set()
        if config.experts is not None:
            own, count = make.own_experts(config.experts.count), config.experts.count
            self.other_experts = set(range(count)).difference(own)
        # the layers of this stage
        self.layer_range = self.stages.layers_of(config.num_hidden_layers, head_in_layers(config))
        self.layers = [
            DecoderLayer(make, config, make_attention(i), make_mlp(i), norms)
            for i in self.layer_range
        ]
        # the residual stream of a stage after the first one, [tokens, hidden_size]
        self.state, self._device = torch.empty(0), make.device
        self.norm: RMSNorm | None = None
        if self.stages.is_last:
            self.norm = make.norm("norm", config.hidden_size, config)
        self.has_head = config.has_lm_head and self.stages.is_last
        self.head: PoolingHead = make_head(make, config.head)
        self.lm_head: Linear | GatheredHead | None = None
        if config.score_tokens:
            table = self.embed_tokens if config.tie_word_embeddings else None
            self.head = TokenScore(make, config, table)
        elif not self.has_head:
            pass  # the model pools, or the last stage has the head
        elif config.tie_word_embeddings:
            assert self.embed_tokens is not None
            self.lm_head = make.tied_head(self.embed_tokens)
        else:
            self.lm_head = make.head("lm_head", config.hidden_size, config.vocab_size)

    @classmethod
    def of_row(
        cls, row: Architecture, config: DecoderConfig, make: LayerFactory, max_model_len: int
    ) -> Decoder:
        """Makes the model of an architecture. `config` is what row.parse returns."""
        ropes = make.ropes(config, max_model_len)
        qkv_bias, o_bias = row.attention_biases(config)
        biases = {"qkv_bias": qkv_bias, "o_bias": o_bias}
        # a plugin's layer need not know the options of other models than its own
        options = {
            name: True for name in ("qk_norm_whole", "is_merged", "has_sinks") if getattr(row, name)
        }
        merged = {"is_merged": True} if row.is_merged else {}

        def make_attention(layer: int) -> Attention:
            kind = attention_for(config)
            own = {**biases, "qk_norm": row.qk_norm, **options}
            return make.block(kind, config, layer, ropes, **own)

        def make_mlp(layer: int) -> MLP:
            if config.experts is None or layer in config.experts.dense_layers:
                return make.block(GatedMLP, config, layer, bias=config.mlp_bias, **merged)
            return make.block(MixtureOfExperts, config, layer)

        scale = config.embedding_scale
        if row.scaled_embedding:  # transformers multiplies by a number of the model's dtype
            scale = torch.tensor(scale, dtype=make.dtype).item()
        return cls(make, config, make_attention, make_mlp, row.norms, scale)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [T] i32 or i64, positions [T] i64 -> hidden states [T, hidden_size], normed.

        A stage before the last one returns what send_stream takes. Call receive_stream first.
        """
        if self.stages.is_first:
            assert self.embed_tokens is not None
            residual = self.embed_tokens(token_ids)
            if self.embedding_scale != 1.0:
                self.ops.scale(residual, self.embedding_scale)
        else:
            residual = self.state[: len(token_ids)]
        norm = self.layers[0].before_attention
        x = block = residual if norm is None else norm(residual)
        for i, layer in enumerate(self.layers):
            if self.taps is not None:
                self.taps(i, residual)
            x = layer.self_attn(x, positions, metadata)
            check_block(layer.self_attn, x, residual)
            x = self._add(x, residual, layer.after_attention, layer.before_mlp)
            x = block = layer.mlp(x)
            check_block(layer.mlp, x, residual)
            is_last = i + 1 == len(self.layers)
            following = self.norm if is_last else self.layers[i + 1].before_attention
            x = self._add(x, residual, layer.after_mlp, following)
        if not (self.stages.is_first or self.stages.is_last):
            return block  # the stream is in `state`; a program's result is that of a kernel
        return x

    def reserve_stream(self, num_tokens: int) -> None:
        """Allocates the residual stream of steps of at most `num_tokens`. Call it before a step is
        recorded: a program holds the address.
        """
        if not self.stages.is_first:
            shape = num_tokens, self.config.hidden_size
            self.state = torch.zeros(shape, dtype=self.dtype, device=self._device)

    def receive_stream(self, num_tokens: int) -> None:
        """Waits for the residual stream [num_tokens, hidden_size] of the stage before."""
        if not self.stages.is_first:
            if len(self.state) < num_tokens:  # the cache is not yet sized
                self.reserve_stream(num_tokens)
            received = self.stages.receive(num_tokens, self.config.hidden_size, self.dtype)
            self.state[:num_tokens].copy_(received)

    def send_stream(self, hidden: torch.Tensor) -> None:
        """Sends the residual stream to the next stage. hidden: what this stage's call returned."""
        if not self.stages.is_last:
            self.stages.send(hidden if self.stages.is_first else self.state[: len(hidden)])

    def _add(
        self, x: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None, before: RMSNorm | None
    ) -> torch.Tensor:
        """Adds a block's result `x` to `residual` in place and returns the input of the next block.
        `after` and `before` are the norms of the result and of that input.
        """
        if after is not None:
            x = after(x)
        if self.config.residual_scale != 1.0:
            self.ops.scale(x, self.config.residual_scale)
        if before is None:
            self.ops.add(x, residual)
            return residual
        before.add(x, residual)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] f32"""
        assert self.lm_head is not None
        logits = self.lm_head.logits(hidden)
        if self.config.logits_scale != 1.0:
            self.ops.scale(logits, self.config.logits_scale)
        return logits

    def weights(self) -> Weights:
        """The weight-name table: every name that the checkpoint must have, with the tensor that it
        fills.
        """
        prefix = self.config.name_prefix
        if self.embed_tokens is not None:
            yield from self.embed_tokens.weights(f"{prefix}model.")
        for i, layer in zip(self.layer_range, self.layers):
            yield from layer.weights(f"{prefix}model.layers.{i}.")
        if self.norm is not None:
            yield from self.norm.weights(f"{prefix}model.")
        if self.lm_head is not None and not self.config.tie_word_embeddings:
            yield from self.lm_head.weights(prefix)
        yield from self.head.weights(prefix)

    def tied_weights(self) -> dict[str, str]:
        """Names that a checkpoint may have in addition, with the names whose tensors they must
        equal.
        """
        prefix = self.config.name_prefix
        head, table = f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight"
        is_tied = self.has_head and self.config.tie_word_embeddings
        is_tied = is_tied and self.embed_tokens is not None
        return {head: table} if is_tied else {}

    def is_of_another_rank(self, name: str) -> bool:
        """Whether another stage, or another engine, has this tensor of the checkpoint."""
        if self.config.experts is not None and (found := _EXPERT.search(name)) is not None:
            if int(found[1]) in self.other_experts:
                return True
        if self.stages.count == 1:
            return False
        prefix = self.config.name_prefix
        if not name.startswith(f"{prefix}model.layers."):
            others = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
            return name.removeprefix(prefix) in others
        layer = name.removeprefix(f"{prefix}model.layers.").partition(".")[0]
        is_layer = layer.isdecimal() and int(layer) < self.config.num_hidden_layers
        return is_layer and int(layer) not in self.layer_range

    def routed_tokens(self) -> dict[int, RoutedTokens]:
        """The counts by layer. A plugin's block may have no experts, and no attribute for them."""
        blocks = [getattr(layer.mlp, "routed", None) for layer in self.layers]
        return {i: routed for i, routed in zip(self.layer_range, blocks) if routed is not None}

    def attention_layers(self) -> list[Attention]:
        """The attention layers in order; each owns its key_cache and value_cache. The list is empty
        for a model whose tokens see the whole text: it has no cache.
        """
        return [] if self.config.is_bidirectional else [layer.self_attn for layer in self.layers]


def check_block(block: Any, x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raises ValueError unless a block's result can be added to the residual stream: kernels do not
    check sizes, and a plugin's layer may return anything.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        kind = type(block)
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} returns {list(x.shape)} {x.dtype}; a block "
            f"returns what it is called with, here {list(residual.shape)} {residual.dtype}"
        )
