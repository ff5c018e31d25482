"""Heads that draft. Each has a decoder layer and reads hidden states of the model that verifies.

Must not know: files, requests, how drafts are verified.

Position i of a head reads the token after position i and the hidden state of position i, and gives
the logits of the token after that. A further pass reads the head's own state, so a head overwrites
the state that it has read.

EAGLE-3 (Li et al. 2025) reads three layers of the model (Eagle3Taps), and in further passes its own
residual stream. Multi-token prediction (DeepSeek-V3, 2024) reads the last hidden states.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ipc.models.decoder_config import DecoderConfig
from ...kernels.ops import AttentionMetadata
from ..model import Model
from ..weights.packed_rows import PackedRows, copy_weights
from ..weights.table import Weight
from .blocks import Attention, GatedMLP
from .decoder import Decoder, DecoderLayer
from .layers import LayerFactory, Weights


class Eagle3Taps:
    """Adds up what EAGLE-3's fc makes of the inputs of three layers: fc(concat(a, b, c)) is the sum
    of its three parts. The caller zeroes `state` [tokens, hidden_size] before a pass of the model.
    """

    def __init__(self, make: LayerFactory, config: DecoderConfig, layers: list[int], rows: int):
        self.ops, size = make.ops, config.hidden_size
        self.parts = {layer: make.linear(size, {f"fc.{layer}": size}) for layer in layers}
        self.state = make.parameter(rows, size)
        self.state.zero_()

    def __call__(self, layer: int, residual: torch.Tensor) -> None:
        """residual [T, hidden_size]: the input of a layer of the model."""
        if (part := self.parts.get(layer)) is not None:
            self.ops.add(part(residual), self.state[: len(residual)])

    def weights(self) -> Weights:
        for part in self.parts.values():
            yield from part.weights("")


class DraftHead(Model):
    """The base of both kinds. A pass reads `state` [tokens, hidden_size] and then leaves there what
    the next pass reads. Embedding and output head may be the model's.
    """

    def __init__(self, make: LayerFactory, config: DecoderConfig, rows: int):
        self.config, self.ops = config, make.ops
        self.has_head = True
        self.state = make.parameter(rows, config.hidden_size)
        self.state.zero_()
        self.embed_tokens: Any = None
        self.lm_head: Any = None

    def share(self, model: Model) -> None:
        """Uses the embedding of a Decoder, and its output head unless the head has one."""
        assert isinstance(model, Decoder)
        self.embed_tokens = model.embed_tokens
        self.lm_head, self.images = model.lm_head, model.images
        model.use_taps(self.taps)

    def embed(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """token_ids [T] -> their embedding [T, hidden_size], or rows of images in its place."""
        embedded = self.embed_tokens(token_ids)
        if self.images is not None:
            self.images.begin(embedded, metadata)
        return embedded

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] f32"""
        return self.lm_head.logits(hidden)

    def attention_layers(self) -> list[Any]:
        raise NotImplementedError  # each kind has its own


class Eagle3Attention(Attention):
    """Attention whose input is the concatenation of a token's embedding and a hidden state, both
    normed. It is computed as the sum of two products.
    """

    def __init__(self, make: LayerFactory, config: DecoderConfig, *args: Any):
        super().__init__(make, config, 0, *args)
        self.hidden_qkv_proj = make.linear(config.hidden_size, dict(self.qkv_proj.shards))

    def attend_to(
        self,
        token: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """token and hidden [T, hidden_size] -> [T, hidden_size]."""
        qkv = self.qkv_proj(token)
        self.ops.add(self.hidden_qkv_proj(hidden), qkv)
        return self.attend(qkv, positions, metadata)


class Eagle3Head(DraftHead):
    """The head of EAGLE-3. `tap_layers` are layers of the model. `known` [D] i32, ascending, are
    the tokens that the output head has a row for; None: all. Other tokens are never drafted.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        tap_layers: list[int],
        rows: int,
        max_model_len: int,
        qkv_bias: bool,
        known: torch.Tensor | None,
    ):
        super().__init__(make, config, rows)
        size, ropes = config.hidden_size, make.ropes(config, max_model_len)
        self.known = None if known is None else known.to(make.device)
        self.head_operations = () if known is None else ("spread_logits",)
        self.taps = Eagle3Taps(make, config, tap_layers, rows)
        self.self_attn = Eagle3Attention(make, config, ropes, qkv_bias, False, False)
        self.mlp = GatedMLP(make, config, 0, bias=False)
        self.token_norm = make.norm("input_layernorm", size, config)
        self.hidden_norm = make.norm("hidden_norm", size, config)
        self.before_mlp = make.norm("post_attention_layernorm", size, config)
        self.norm = make.norm("norm", size, config)
        num_known = config.vocab_size if known is None else len(known)
        self.own_head = make.linear(size, {"lm_head": num_known})

    def share(self, model: Model) -> None:
        super().share(model)
        self.lm_head = self.own_head

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] f32"""
        logits = super().compute_logits(hidden)
        if self.known is None:
            return logits
        return self.ops.spread_logits(logits, self.known, self.config.vocab_size)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [T], positions [T] -> [T, hidden_size], normed"""
        residual = self.state[: len(token_ids)]
        token = self.token_norm(self.embed(token_ids, metadata))
        hidden = self.hidden_norm(residual)
        x = self.self_attn.attend_to(token, hidden, positions, metadata)
        self.before_mlp.add(x, residual)
        x = self.mlp(x)
        self.norm.add(x, residual)
        return x

    def attention_layers(self) -> list[Any]:
        return [self.self_attn]

    def weights(self) -> Weights:
        """`#token` and `#hidden`: the columns of a weight that multiply these."""
        assert isinstance(self.taps, Eagle3Taps)
        yield from self.taps.weights()
        for part, linear in (
            ("token", self.self_attn.qkv_proj),
            ("hidden", self.self_attn.hidden_qkv_proj),
        ):
            for name, tensor in linear.weights("midlayer.self_attn."):
                yield name if name.endswith(".bias") else f"{name}#{part}", tensor
        yield from self.self_attn.o_proj.weights("midlayer.self_attn.")
        yield from self.mlp.weights("midlayer.mlp.")
        for norm in (self.token_norm, self.hidden_norm, self.before_mlp):
            yield from norm.weights("midlayer.")
        yield from self.norm.weights("")
        yield from self.own_head.weights("")


class JoinedLinear:
    """A linear layer of the concatenation of a token's embedding and a hidden state. It is computed
    as the sum of two products.
    """

    def __init__(self, name: str, make: LayerFactory, size: int, is_hidden_first: bool):
        """size: hidden_size. is_hidden_first: in the concatenation."""
        self.name, self.ops, self._is_hidden_first = name, make.ops, is_hidden_first
        self.of_token, self.of_hidden = (make.linear(size, {name: size}) for _ in range(2))
        self._weight: torch.Tensor | None = make.parameter(size, 2 * size)
        self.saved_bytes = self._weight.nbytes  # once it is filled

    def __call__(self, token: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """token and hidden [T, hidden_size] -> [T, hidden_size]"""
        joined = self.of_hidden(hidden)
        self.ops.add(self.of_token(token), joined)
        return joined

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
        """Fills both parts from the weight [hidden_size, 2 * hidden_size]; see
        LayerFactory.fill. Blocks are unpacked.
        """
        copy_weights(tensor, values)
        whole = torch.Tensor.as_subclass(tensor, torch.Tensor)
        parts = [self.of_token, self.of_hidden]
        for part, columns in zip(parts[:: -1 if self._is_hidden_first else 1], whole.chunk(2, 1)):
            ((_, own),) = part.weights("")
            assert isinstance(own, Weight)
            part.fill(own, columns.contiguous())
        self._weight = None

    def weights(self, prefix: str) -> Weights:
        if self._weight is None:
            raise RuntimeError("the weight is packed: its columns are no longer in one tensor")
        yield f"{prefix}{self.name}.weight", Weight(self._weight, self)


class MTPHead(DraftHead):
    """Multi-token prediction: layers of the model's kind, of which the first one reads a projection
    of a token's embedding and a hidden state.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        rows: int,
        layers: list[DecoderLayer],
        is_hidden_first: bool,
    ):
        """`config` is that of a stack with `layers` alone, which have norms before their blocks.
        is_hidden_first: see JoinedLinear.
        """
        super().__init__(make, config, rows)
        size = config.hidden_size
        self.fc = JoinedLinear("fc", make, size, is_hidden_first)
        self.token_norm = make.norm("token_norm", size, config)
        self.hidden_norm = make.norm("hidden_norm", size, config)
        self.layers = layers
        self.norm = make.norm("norm", size, config)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [T], positions [T] -> [T, hidden_size], normed"""
        state = self.state[: len(token_ids)]
        blocks = [block for layer in self.layers for block in layer.blocks]
        first, *following = [block.before for block in blocks]
        hidden = self.hidden_norm(state)
        residual = self.fc(self.token_norm(self.embed(token_ids, metadata)), hidden)
        assert first is not None
        x = first(residual)
        for block, norm in zip(blocks, [*following, self.norm]):
            assert norm is not None
            x = block.compute(x, positions, metadata)
            norm.add(x, residual)
        self.ops.scale(state, 0.0)
        self.ops.add(x, state)
        return x

    def attention_layers(self) -> list[Any]:
        return [layer.self_attn for layer in self.layers if layer.self_attn is not None]

    def weights(self) -> Weights:
        """Names as in ipc/models/draft_heads.py."""
        yield from self.fc.weights("")
        for norm in (self.token_norm, self.hidden_norm, self.norm):
            yield from norm.weights("")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"layers.{index}.")
