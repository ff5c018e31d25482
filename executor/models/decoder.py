"""The stack that most decoder-only models share: embedding, pre-norm layers of attention and MLP, a
final norm, a head.

Must not know: the architectures that are built from it, files, requests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...ipc.decoder_config import DecoderConfig
from ...kernels.ops import AttentionMetadata
from .layers import Attention, GatedMLP, LayerFactory, Weights


class DecoderLayer:
    def __init__(
        self, make: LayerFactory, config: DecoderConfig, self_attn: Attention, mlp: GatedMLP
    ):
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = make.rms_norm(
            "input_layernorm", config.hidden_size, config.rms_norm_eps
        )
        self.post_attention_layernorm = make.rms_norm(
            "post_attention_layernorm", config.hidden_size, config.rms_norm_eps
        )

    def weights(self, prefix: str) -> Weights:
        yield from self.self_attn.weights(f"{prefix}self_attn.")
        yield from self.mlp.weights(f"{prefix}mlp.")
        yield from self.input_layernorm.weights(prefix)
        yield from self.post_attention_layernorm.weights(prefix)


class Decoder:
    """A causal language model.

    `make_attention`, a function of the layer's index, and `make_mlp` build the blocks of a layer.
    Architectures differ only in these.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        make_attention: Callable[[int], Attention],
        make_mlp: Callable[[], GatedMLP],
    ):
        self.config = config
        self.embed_tokens = make.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(make, config, make_attention(i), make_mlp())
            for i in range(config.num_hidden_layers)
        ]
        self.norm = make.rms_norm("norm", config.hidden_size, config.rms_norm_eps)
        if config.tie_word_embeddings:
            self.lm_head = make.tied_head("lm_head", self.embed_tokens)
        else:
            self.lm_head = make.head("lm_head", config.hidden_size, config.vocab_size)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [T] i32 or i64, positions [T] i64 -> hidden states [T, hidden_size], normed"""
        residual = self.embed_tokens(token_ids)
        x = self.layers[0].input_layernorm(residual)
        x = self._after_norm(self.layers[0], x, residual, positions, metadata)
        for layer in self.layers[1:]:
            layer.input_layernorm.add(x, residual)
            x = self._after_norm(layer, x, residual, positions, metadata)
        self.norm.add(x, residual)
        return x

    @staticmethod
    def _after_norm(
        layer: DecoderLayer,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ):
        """Runs the rest of a layer on its normalized input.

        Adds to `residual` in place. The caller still adds the result to it.
        """
        x = layer.self_attn(x, positions, metadata)
        layer.post_attention_layernorm.add(x, residual)
        return layer.mlp(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] f32"""
        return self.lm_head.logits(hidden)

    def weights(self) -> Weights:
        """The weight-name table: every name that the checkpoint must have, with the tensor it
        fills.
        """
        yield from self.embed_tokens.weights("model.")
        for i, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{i}.")
        yield from self.norm.weights("model.")
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.weights("")

    def tied_weights(self) -> dict[str, str]:
        """Names that a checkpoint may have in addition, with the names whose tensors they must
        equal.
        """
        return (
            {"lm_head.weight": "model.embed_tokens.weight"}
            if self.config.tie_word_embeddings
            else {}
        )

    def attention_layers(self) -> list[Attention]:
        """The attention layers in order; each owns its key_cache and value_cache."""
        return [layer.self_attn for layer in self.layers]
