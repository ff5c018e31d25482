"""The stack that decoder-only models share: embedding, layers of attention and MLP with norms
before or after them, a final norm, a head.

Must not know: which architectures there are, files, requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ...ipc.models.architectures import (
    PLAIN_NAMES,
    PRE_NORMS,
    Architecture,
    LayerNorms,
    TensorNames,
)
from ...ipc.models.decoder_config import DecoderConfig
from ...kernels.ops import AttentionMetadata
from ..model import Model, RoutedTokens, StateLayer
from ..pooling.heads import PoolingHead, TokenScore, make_head
from .blocks import Attention, attention_for, mlp_for
from .experts import MixtureOfExperts
from .gemma import (
    DenseBesideExperts,
    LayerInputBlock,
    LayerInputs,
    LayerScalar,
    ReceivedInputs,
    ScaledExperts,
    SharedAttention,
    SparseMLP,
    make_layer_inputs,
)
from .latent import LatentAttention
from .layers import Embedding, LayerFactory, Linear, RMSNorm, Weights
from .linear import GatheredHead
from .sections import FirstSection, LastSection

if TYPE_CHECKING:
    from .recurrent import Mixer

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class MLP(Protocol):
    """The block that follows attention in a layer."""

    name: str  # of the layer's part that has its tensors

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...  # [T, hidden_size], as the result

    def weights(self, prefix: str) -> Weights: ...


class ResidualBlock(NamedTuple):
    """Reads the residual stream through the norm `before`. Its result goes through the norm `after`
    and is added to the stream. It may lack these norms.
    """

    block: Any  # called with x, positions and metadata if it is a mixer of tokens, else with x
    is_mixer: bool
    before: RMSNorm | None
    after: RMSNorm | None
    scalar: LayerScalar | None = None  # multiplies the stream once the result is added

    def compute(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size], normed -> [T, hidden_size], what `block` returns."""
        return self.block(x, positions, metadata) if self.is_mixer else self.block(x)


class BothMixers:
    """The sum of attention and of a recurrent mixer that read the same input."""

    def __init__(self, self_attn: Attention, mixer: Mixer, ops: Any, attention_scale: float = 1.0):
        """attention_scale: a factor of what attention returns."""
        self.self_attn, self.mixer, self.ops = self_attn, mixer, ops
        self._attention_scale = attention_scale

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size], positions [T] i64 -> [T, hidden_size]"""
        total = self.self_attn(x, positions, metadata)
        if self._attention_scale != 1.0:
            self.ops.scale(total, self._attention_scale)
        self.ops.add(self.mixer(x, positions, metadata), total)
        return total


class DecoderLayer:
    """A list of residual blocks: attention, a recurrent mixer, or both side by side; an MLP; and a
    block that reads an input of the layer's own. A layer may lack some of these. In the end it may
    multiply the residual stream by a scalar.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        self_attn: Attention | None,
        mlp: MLP | None,
        norms: LayerNorms,
        mixer: Mixer | None = None,
        names: TensorNames = PLAIN_NAMES,
        inputs: LayerInputBlock | None = None,
        scalar: LayerScalar | None = None,
    ):
        self.self_attn, self.mixer, self.mlp = self_attn, mixer, mlp
        self.inputs, self.scalar = inputs, scalar
        both: Any = self_attn if mixer is None else mixer
        if self_attn is not None and mixer is not None:
            both = BothMixers(self_attn, mixer, make.ops, config.attention_out_scale)
        before_mixer, after_mixer, before_mlp, after_mlp = norms
        kinds = (
            (both, True, before_mixer, after_mixer),
            (mlp, False, before_mlp, after_mlp),
            (inputs, False, None, "post_per_layer_input_norm"),
        )

        def norm(name: str | None) -> RMSNorm | None:
            return None if name is None else make.norm(name, config.hidden_size, config)

        self.blocks = [
            ResidualBlock(block, is_mixer, norm(before), norm(after))
            for block, is_mixer, before, after in kinds
            if block is not None
        ]
        self.blocks[-1] = self.blocks[-1]._replace(scalar=scalar)
        # here they can be found by those that trace the model
        norms_of_blocks = [one for block in self.blocks for one in (block.before, block.after)]
        self.norms = [one for one in norms_of_blocks if one is not None]
        self._names = names

    def weights(self, prefix: str) -> Weights:
        if self.self_attn is not None:
            yield from self.self_attn.weights(f"{prefix}{self._names.attention}.")
        if self.mixer is not None:
            yield from self.mixer.weights(f"{prefix}{self._names.mixer}.")
        if self.mlp is not None:
            yield from self.mlp.weights(f"{prefix}{self.mlp.name}." if self.mlp.name else prefix)
        for part in (*self.norms, self.inputs, self.scalar):
            if part is not None:
                yield from part.weights(prefix)


def make_layer(
    make: LayerFactory,
    config: DecoderConfig,
    index: int,
    make_attention: Callable[[int], Attention],
    make_mlp: Callable[[int], MLP],
    norms: LayerNorms,
    names: TensorNames,
    layer_inputs: LayerInputs | ReceivedInputs | None,
    has_scalar: bool,
) -> DecoderLayer:
    """Makes the blocks that the configuration says a layer has."""
    own, mixer, inputs = config.layer(index), None, None
    attention = make_attention(index) if own.has_attention else None
    if own.mixer is not None:
        from .recurrent import MIXERS  # which also imports what only models with a mixer need

        mixer = MIXERS[type(own.mixer)](make, config.hidden_size, own.mixer)
    mlp = make_mlp(index) if own.has_mlp else None
    if layer_inputs is not None:
        inputs = LayerInputBlock(make, config, index, layer_inputs)
    scalar = LayerScalar(make) if has_scalar else None
    return DecoderLayer(make, config, attention, mlp, norms, mixer, names, inputs, scalar)


class BlocksOfRow:
    """Makes the blocks of an architecture's layers. `config` is what row.parse returns."""

    def __init__(
        self, row: Architecture, config: DecoderConfig, make: LayerFactory, max_model_len: int
    ):
        self._row, self._config, self._make = row, config, make
        self._ropes = make.ropes(config, max_model_len)
        self._named = {} if row.names == PLAIN_NAMES else {"names": row.names}
        self._made: dict[int, Attention] = {}  # by layer
        self.norms = row.norms
        if config.experts is not None and config.experts.names.is_beside_mlp:
            self.norms = (*row.norms[:2], None, row.norms[3])  # the block's parts have norms

    def attention(self, layer: int) -> Any:
        row, config, make = self._row, self._config, self._make
        if config.latent is not None:
            return make.block(LatentAttention, config, layer, self._ropes)
        qkv_bias, o_bias = row.attention_biases(config)
        owner = config.layer(layer).kv_from
        if owner is not None:
            shared = self._ropes, self._made[owner], qkv_bias, o_bias
            return make.block(SharedAttention, config, layer, *shared, **self._named)
        # a plugin's layer need not know the options of other models than its own
        options = {
            name: True
            for name in (
                *("qk_norm_whole", "is_merged", "has_sinks"),
                *("is_interleaved", "value_norm", "norms_rotated"),
            )
            if getattr(row, name)
        }
        own = {"qkv_bias": qkv_bias, "o_bias": o_bias, "qk_norm": row.has_qk_norm(config)}
        kind = attention_for(config)
        made = make.block(kind, config, layer, self._ropes, **own, **options, **self._named)
        self._made[layer] = made
        return made

    def mlp(self, layer: int) -> MLP:
        row, config, make = self._row, self._config, self._make
        experts = config.experts
        if experts is not None and layer in experts.dense_layers:
            experts = None
        if experts is not None and not experts.names.is_beside_mlp:
            of_parts = {"names_of_parts": row.names} if self._named else {}
            return make.block(MixtureOfExperts, config, layer, **of_parts)
        merged = {"is_merged": True} if row.is_merged else {}
        options = {"bias": config.mlp_bias, **merged, **self._named}
        kind = SparseMLP if config.layer(layer).sparsity else mlp_for(config)
        dense = make.block(kind, config, layer, **options)
        if experts is None:
            return dense
        return DenseBesideExperts(make, config, dense, make.block(ScaledExperts, config, layer))


class Decoder(Model):
    """A causal language model.

    `make_attention` and `make_mlp`, functions of the layer's index, build these blocks of the
    layers that have them (DecoderConfig.layer).
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        make_attention: Callable[[int], Attention],
        make_mlp: Callable[[int], MLP],
        norms: LayerNorms = PRE_NORMS,
        embedding_scale: float | None = None,
        names: TensorNames = PLAIN_NAMES,
        has_layer_scalars: bool = False,
    ):
        """embedding_scale: the default is the config's."""
        self.config, self.names = config, names
        self.ops, self.images = make.ops, make.images
        self.embedding_scale = (
            config.embedding_scale if embedding_scale is None else embedding_scale
        )
        self.dtype, self.stages = make.dtype, make.group.stages
        self.stream_size = config.hidden_size  # of a token's residual stream
        is_tied = config.has_lm_head and config.tie_word_embeddings
        reads_table = config.tie_word_embeddings and bool(config.score_tokens)
        reads_table |= is_tied or make.has_draft_head
        self.embed_tokens: Embedding | None = None
        if self.stages.is_first or (self.stages.is_last and reads_table):
            head = "lm_head" if is_tied and (self.stages.is_last or make.quantizes_heads) else None
            self.embed_tokens = make.embedding(
                names.embedding, config.vocab_size, config.hidden_size, head
            )
        # the experts of each layer that other engines have
        self.other_experts: set[int] = set()
        if config.experts is not None:
            own, count = make.own_experts(config.experts.count), config.experts.count
            self.other_experts = set(range(count)).difference(own)
        readers = 0 if make.images is None else make.images.vision.num_vectors - 1
        self.layer_range = self.stages.layers_of(config, readers)
        self.layer_inputs = make_layer_inputs(make, config, self.layer_range.start)
        parts = make_attention, make_mlp, norms, names, self.layer_inputs, has_layer_scalars
        self.layers = [make_layer(make, config, index, *parts) for index in self.layer_range]
        # the residual stream of a stage after the first one, [tokens, stream_size]
        self.state, self.device = torch.empty(0), make.device
        self.norm: RMSNorm | None = None
        if self.stages.is_last:
            self.norm = make.norm(names.final_norm, config.hidden_size, config)
        # by layer and block: the norm before what follows
        befores = [block.before for layer in self.layers for block in layer.blocks]
        following = iter([*befores[1:], self.norm])
        self._following = [[next(following) for _ in layer.blocks] for layer in self.layers]
        self.has_head = config.has_lm_head and self.stages.is_last
        self.head: PoolingHead = make_head(make, config.head)
        self.lm_head: Linear | GatheredHead | None = None
        if config.score_tokens and self.stages.is_last:
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
        blocks = BlocksOfRow(row, config, make, max_model_len)
        scale = config.embedding_scale
        if row.scaled_embedding:  # transformers multiplies by a number of the model's dtype
            scale = torch.tensor(scale, dtype=make.dtype).item()
        parts = blocks.attention, blocks.mlp, blocks.norms, scale, row.names, row.has_layer_scalars
        return cls(make, config, *parts)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [T] i32 or i64, positions [T] i64 -> hidden states [T, hidden_size], normed.

        A stage before the last one returns what send_stream takes. Call receive_stream first.
        """
        if self.stages.is_first:
            residual = self.begin(token_ids, metadata)
        else:
            residual = self.state[: len(token_ids)]
        return self.compute_layers(0, len(self.layers), residual, positions, metadata)

    def begin(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """token_ids [T] -> the residual stream before the first layer [T, stream_size]. Computes
        the inputs of layers.
        """
        return self.embed(token_ids, metadata)

    def embed(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """token_ids [T] -> their embedding [T, hidden_size]. Computes the inputs of layers."""
        assert self.embed_tokens is not None
        residual = self.embed_tokens(token_ids)
        if self.embedding_scale != 1.0:
            self.ops.scale(residual, self.embedding_scale)
        if self.images is not None:
            self.images.begin(residual, metadata)
        if isinstance(self.layer_inputs, LayerInputs):
            self.layer_inputs.begin(token_ids, residual)
        return residual

    def compute_layers(
        self,
        first: int,
        end: int,
        residual: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Adds the results of layers [first, end), counted from this stage's first one, to the
        residual stream [T, hidden_size] in place. Returns the stream or, after the last layer, the
        hidden states, normed.
        """
        norm = self.layers[first].blocks[0].before
        x = block = residual if norm is None else norm(residual)
        for i in range(first, end):
            layer, following = self.layers[i], self._following[i]
            if i == end - 1 < len(self.layers) - 1:
                following = [*following[:-1], None]  # what follows is not computed
            index = self.layer_range[i]
            if changes := self.images is not None and self.images.changes_stream_after(index):
                *following, norm = following
                following = [*following, None]
            if self.taps is not None:
                self.taps(self.layer_range[i], residual)
            for part, before in zip(layer.blocks, following):
                x = block = part.compute(x, positions, metadata)
                check_block(part.block, x, residual)
                x = self._add(x, residual, part, before)
            if changes:
                x = self._with_rows(index, residual, norm, metadata)
        if not (self.stages.is_first or self.stages.is_last):
            return block  # the stream is in `state`; a program's result is that of a kernel
        return x

    def _with_rows(
        self, layer: int, residual: torch.Tensor, norm: RMSNorm | None, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Adds rows of images to the stream after a layer, and returns the input of the next block,
        after its norm.
        """
        assert self.images is not None
        self.images.after_layer(layer, residual, metadata)
        return residual if norm is None else norm(residual)

    def sections(self, num_rows: int) -> tuple[Model, Model] | None:
        """See Model."""
        first, end = self.config.first_sharing, len(self.layers)
        if self.stages.count > 1 or first == end:
            return None
        return FirstSection(self, 0, first), LastSection(self, first, end, num_rows)

    def reserve_stream(self, num_tokens: int) -> None:
        """Allocates the residual stream of steps of at most `num_tokens`. Call it before a step is
        recorded: a program holds the address.
        """
        if self.layer_inputs is not None:
            self.layer_inputs.reserve(num_tokens)
        if not self.stages.is_first:
            shape = num_tokens, self.stream_size
            self.state = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def pass_state(self) -> list[torch.Tensor]:
        """See Model."""
        inputs = [] if self.layer_inputs is None else [self.layer_inputs.state]
        return super().pass_state() + inputs

    def receive_stream(self, num_tokens: int) -> None:
        """Waits for the residual stream [num_tokens, stream_size] of the stage before, the inputs
        of later layers, and what its taps have added up.
        """
        inputs = self.layer_inputs
        if self.stages.is_first and inputs is not None:
            if len(inputs.state) < num_tokens:  # the cache is not yet sized
                self.reserve_stream(num_tokens)
            inputs.state[:num_tokens].zero_()
        if not self.stages.is_first:
            if len(self.state) < num_tokens:
                self.reserve_stream(num_tokens)
            parts = [self.state]
            if inputs is not None:
                parts.append(inputs.state)
            if self.taps is not None:
                parts.append(self.taps.state)
            sizes = [part.shape[1] for part in parts]
            received = self.stages.receive(num_tokens, sum(sizes), self.dtype)
            for part, values in zip(parts, received.split(sizes, dim=1)):
                part[:num_tokens].copy_(values)

    def send_stream(self, hidden: torch.Tensor) -> None:
        """Sends the residual stream to the next stage. hidden: what this stage's call returned."""
        if not self.stages.is_last:
            num_tokens = len(hidden)
            parts = [self.stream_after(hidden)]
            if self.layer_inputs is not None:
                parts.append(self.layer_inputs.after(self.layer_range.stop, num_tokens))
            if self.taps is not None:
                parts.append(self.taps.state[:num_tokens])
            self.stages.send(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def stream_after(self, hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream [T, stream_size] after this stage, whose call has returned
        `hidden`.
        """
        return hidden if self.stages.is_first else self.state[: len(hidden)]

    def _add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        block: ResidualBlock,
        before: RMSNorm | None,
    ) -> torch.Tensor:
        """Adds a block's result `x` to `residual` in place and returns the input of the next block,
        after its norm `before`.
        """
        if block.after is not None:
            x = block.after(x)
        if self.config.residual_scale != 1.0:
            self.ops.scale(x, self.config.residual_scale)
        if before is not None and block.scalar is None:
            before.add(x, residual)
            return x
        self.ops.add(x, residual)
        if block.scalar is not None:
            self.ops.scale(residual, block.scalar.value)
        return residual if before is None else before(residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] f32"""
        assert self.lm_head is not None
        logits = self.lm_head.logits(hidden)
        if self.config.logits_scale != 1.0:
            self.ops.scale(logits, self.config.logits_scale)
        if self.config.logits_cap:
            self.ops.soft_cap(logits, self.config.logits_cap)
        return logits

    def weights(self) -> Weights:
        """The weight-name table: every name that the checkpoint must have, with the tensor that it
        fills.
        """
        prefix, base = self.config.name_prefix, self.config.base_prefix
        if self.embed_tokens is not None:
            yield from self.embed_tokens.weights(base)
        if isinstance(self.layer_inputs, LayerInputs):
            yield from self.layer_inputs.weights(base)
        for i, layer in zip(self.layer_range, self.layers):
            yield from layer.weights(f"{base}layers.{i}.")
        if self.norm is not None:
            yield from self.norm.weights(base)
        if self.lm_head is not None and not self.config.tie_word_embeddings:
            yield from self.lm_head.weights(prefix)
        yield from self.head.weights(prefix)
        if self.encoder is not None:
            yield from self.encoder.weights()

    def tied_weights(self) -> dict[str, str]:
        """Names that a checkpoint may have in addition, with the names whose tensors they must
        equal.
        """
        head = f"{self.config.name_prefix}lm_head.weight"
        table = f"{self.config.base_prefix}{self.names.embedding}.weight"
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
        base, names = self.config.base_prefix, self.names
        if not name.startswith(f"{base}layers."):
            others = LayerInputs.NAMES if isinstance(self.layer_inputs, ReceivedInputs) else ()
            layers = (f"{base}{one}" for one in (names.embedding, names.final_norm, *others))
            heads = "lm_head", f"{self.config.name_prefix}lm_head"  # see StoredNames
            # a quantized weight is several tensors
            return name.rpartition(".")[0] in (*layers, *heads)
        layer = name.removeprefix(f"{base}layers.").partition(".")[0]
        is_layer = layer.isdecimal() and int(layer) < self.config.num_hidden_layers
        return is_layer and int(layer) not in self.layer_range

    def routed_tokens(self) -> dict[int, RoutedTokens]:
        """The counts by layer. A plugin's block may have no experts, and no attribute for them."""
        blocks = [getattr(layer.mlp, "routed", None) for layer in self.layers]
        return {i: routed for i, routed in zip(self.layer_range, blocks) if routed is not None}

    def attention_layers(self) -> list[Attention]:
        """The attention layers that own a key_cache and a value_cache, in order. The list is empty
        for a model whose tokens see the whole text: it has no cache.
        """
        owners = self.config.cache_layers
        found = [layer.self_attn for i, layer in zip(self.layer_range, self.layers) if i in owners]
        return [one for one in found if one is not None]

    def state_layers(self) -> list[StateLayer]:
        """The recurrent mixers, in order."""
        return [layer.mixer for layer in self.layers if layer.mixer is not None]


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
