"""The parts of a decoder layer that only Gemma 3n and Gemma 4 have: attention that reads the keys
and values of another layer, inputs of layers from a table of their own; and Gemma 4 alone, experts
beside a dense MLP and a factor of the residual stream.

Must not know: architectures, files, requests, how a layer with weights is made.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch

from ...ipc.models.architectures import PLAIN_NAMES, TensorNames
from ...ipc.models.decoder_config import DecoderConfig, PerLayerInputs
from ...kernels.ops import AttentionMetadata
from ..weights.table import Weight
from .blocks import Attention, GatedMLP, later_tokens
from .experts import MixtureOfExperts
from .layers import Embedding, LayerFactory, RMSNorm, Rope, Weights


class SharedAttention:
    """Attention whose keys and values are those of an earlier layer, the owner. It has queries and
    an output projection of its own, and no part of the KV cache.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        layer: int,
        ropes: list[Rope | None],
        owner: Attention,
        q_bias: bool,
        o_bias: bool,
        names: TensorNames = PLAIN_NAMES,
    ):
        """`layer` is the index in the stack, and `ropes` come from make.ropes."""
        self.owner, self.ops = owner, make.ops
        self.num_heads, self.head_dim = owner.num_heads, owner.head_dim
        rows = config.num_attention_heads * self.head_dim
        self.q_proj = make.linear(config.hidden_size, {"q_proj": rows}, q_bias, unit=self.head_dim)
        self.o_proj = make.row_linear(names.o_proj, rows, config.hidden_size, o_bias)
        self.q_norm = make.norm(names.q_norm, self.head_dim, config)
        self.rope, self.scale = ropes[layer], config.attention_scale
        self.sliding_window = config.sliding_windows[layer]
        self._sees_later = make.sees_later(self.sliding_window)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size], positions [T] i64 -> [T, hidden_size].

        The owner has written the keys and values of the T tokens to its cache.
        """
        owner = self.owner
        query = self.q_norm(self.q_proj(x).view(len(x), self.num_heads, self.head_dim))
        if self.rope is not None:
            self.ops.rotary_embedding(positions, query, query[:, :0], self.rope.query)
        later = later_tokens(self._sees_later, metadata.images)
        if metadata.groups:
            metadata = metadata.groups[owner.kv_cache_group]
        caches, options = (owner.key_cache, owner.value_cache), (self.scale, self.sliding_window)
        attended = self.ops.paged_attention(query, *caches, metadata, *options, **later)
        return self.o_proj(attended.view(len(x), self.num_heads * self.head_dim))

    def weights(self, prefix: str) -> Weights:
        for layer in (self.q_proj, self.o_proj, self.q_norm):
            yield from layer.weights(prefix)


class SparseMLP(GatedMLP):
    """A gated MLP whose gate keeps its largest numbers: a part of them that the configuration says,
    if they are normally distributed. The numbers of all ranks count, so each rank gets them.
    """

    def __init__(
        self, make: LayerFactory, config: DecoderConfig, layer: int, *args: Any, **kw: Any
    ):
        """See GatedMLP."""
        super().__init__(make, config, layer, *args, **kw)
        deviations = NormalDist().inv_cdf(config.layer(layer).sparsity)
        # transformers multiplies by a number of the model's dtype
        self._deviations = torch.tensor(deviations, dtype=make.dtype).item()
        self.gaussian_top_k = make.ops.gaussian_top_k
        self._gather = make.gather if make.is_divided else None
        self._rank, self._multiply = make.group.rank, make.ops.multiply
        self._activation = getattr(make.ops, config.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        gate_up = self.gate_up_proj(x)
        if self._gather is not None:
            return self._of_all_ranks(gate_up, self._gather)
        self.gaussian_top_k(gate_up[:, : gate_up.shape[1] // 2], self._deviations)
        return self.down_proj(self.activate(gate_up))

    def _of_all_ranks(
        self, gate_up: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """gate_up [T, 2 * this rank's size] -> [T, hidden_size]"""
        gate, up = gate_up.chunk(2, dim=1)
        of_all, size = gather(gate), gate.shape[1]
        self.gaussian_top_k(of_all, self._deviations)
        gate = self._activation(of_all[:, self._rank * size : (self._rank + 1) * size])
        # a head of all features: [T, 1, size]
        product = self._multiply(up.unsqueeze(1), gate.unsqueeze(1), "none")
        return self.down_proj(product.view(len(gate), size))


class LayerScalar:
    """A number by which a layer multiplies the residual stream."""

    saved_bytes = 0

    def __init__(self, make: LayerFactory):
        self._weight = make.parameter(1)
        self.value = 1.0  # the weight's, on the host

    def fill(self, tensor: torch.Tensor, values: Any) -> None:
        self._weight.copy_(values)
        self.value = self._weight.item()

    def weights(self, prefix: str) -> Weights:
        yield f"{prefix}layer_scalar", Weight(self._weight, self)


class LayerInputs:
    """What each layer gets of a step's tokens beside the residual stream: a part of a table's row
    plus a part of a projection of the embedding.
    """

    NAMES = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"

    def __init__(self, make: LayerFactory, config: DecoderConfig, sizes: PerLayerInputs):
        self.size, self.ops = sizes.size, make.ops
        self.num_layers = config.num_hidden_layers
        width = self.num_layers * self.size
        is_part = sizes.vocab_size < config.vocab_size  # other tokens have the row of token 0
        table, projection, norm = self.NAMES
        self.table: Embedding = make.table(table, sizes.vocab_size, width, is_part)
        self.projection = make.whole_linear(projection, config.hidden_size, width)
        self.norm: RMSNorm = make.norm(norm, self.size, config)
        # transformers multiplies by a number of the model's dtype
        self._table_scale = torch.tensor(self.size**0.5, dtype=make.dtype).item()
        self._projection_scale = config.hidden_size**-0.5
        self._of_layers = torch.empty(0)
        # [tokens, layers * size] of a step, if there are stages: what the next one gets
        self.state = torch.empty(0, width)
        self._dtype, self._device = make.dtype, make.device

    def reserve(self, num_tokens: int) -> None:
        """Allocates room for steps of at most `num_tokens`, whose inputs the next stage gets. The
        caller zeroes it before each step.
        """
        shape = num_tokens, self.num_layers * self.size
        self.state = torch.zeros(shape, dtype=self._dtype, device=self._device)

    def begin(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> None:
        """Computes the inputs of a step: token_ids [T], embedded [T, hidden_size]."""
        ops, rows = self.ops, self.table(token_ids)
        ops.scale(rows, self._table_scale)
        projected = self.projection(embedded)
        ops.scale(projected, self._projection_scale)
        shape = len(projected), self.num_layers, self.size
        total = self.norm(projected.view(shape)).view(len(projected), -1)
        ops.add(rows, total)
        ops.scale(total, 2**-0.5)
        self._of_layers = total.view(shape)
        if len(self.state):  # a program has its own memory
            ops.add(total, self.state[: len(total)])

    def of(self, layer: int, num_tokens: int) -> torch.Tensor:
        """[num_tokens, 1, size]: the input of a layer in the step that has begun."""
        return self._of_layers[:num_tokens, layer : layer + 1]

    def after(self, layer: int, num_tokens: int) -> torch.Tensor:
        """[num_tokens, layers * size]: the inputs of this layer and all that follow."""
        return self.state[:num_tokens, layer * self.size :]

    def weights(self, prefix: str) -> Weights:
        for part in (self.table, self.projection, self.norm):
            yield from part.weights(prefix)


class ReceivedInputs:
    """The inputs of the layers of a stage after the first one, which come from the stage before."""

    def __init__(
        self, make: LayerFactory, first: int, config: DecoderConfig, sizes: PerLayerInputs
    ):
        """first: this stage's first layer."""
        self.size, self._first = sizes.size, first
        self._num_layers = config.num_hidden_layers - first
        self._dtype, self._device = make.dtype, make.device
        self.state = torch.empty(0, self._num_layers * self.size)  # [tokens, layers * size]

    def reserve(self, num_tokens: int) -> None:
        """Allocates room for steps of at most `num_tokens`."""
        shape = num_tokens, self._num_layers * self.size
        self.state = torch.zeros(shape, dtype=self._dtype, device=self._device)

    def of(self, layer: int, num_tokens: int) -> torch.Tensor:
        """[num_tokens, 1, size]: the input of a layer in the step that has begun."""
        begin = (layer - self._first) * self.size
        return self.state[:num_tokens, begin : begin + self.size].unsqueeze(1)

    def after(self, layer: int, num_tokens: int) -> torch.Tensor:
        """[num_tokens, layers * size]: the inputs of this layer and all that follow."""
        return self.state[:num_tokens, (layer - self._first) * self.size :]


def make_layer_inputs(
    make: LayerFactory, config: DecoderConfig, first: int
) -> LayerInputs | ReceivedInputs | None:
    """The inputs of the layers of a stage that begins with layer `first`; None: they have none."""
    if (sizes := config.per_layer_inputs) is None:
        return None
    if make.group.stages.is_first:
        return LayerInputs(make, config, sizes)
    return ReceivedInputs(make, first, config, sizes)


class LayerInputBlock:
    """projection(activation(gate(x)) * the layer's input)"""

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        layer: int,
        inputs: LayerInputs | ReceivedInputs,
    ):
        self._layer, self._inputs, self.ops = layer, inputs, make.ops
        size, hidden_size = inputs.size, config.hidden_size
        self.gate = make.whole_linear("per_layer_input_gate", hidden_size, size)
        self.projection = make.whole_linear("per_layer_projection", size, hidden_size)
        self.activate = getattr(make.ops, config.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        gate = self.activate(self.gate(x))
        given = self._inputs.of(self._layer, len(x))
        return self.projection(self.ops.multiply(given, gate.view(given.shape), "none").flatten(1))

    def weights(self, prefix: str) -> Weights:
        yield from self.gate.weights(prefix)
        yield from self.projection.weights(prefix)


class ScaledExperts(MixtureOfExperts):
    """A mixture of experts that reads the residual stream itself. Its router has a norm of its own
    with a weight for each feature, and each expert has a factor of its weight in the sum.
    """

    def __init__(self, make: LayerFactory, config: DecoderConfig, layer: int):
        super().__init__(make, config, layer)
        self.before = make.norm("pre_feedforward_layernorm_2", config.hidden_size, config)
        scales = make.parameter(config.hidden_size, dtype=torch.float32)
        self.router_norm = RMSNorm("router.scale", scales, config.rms_norm_eps, make.ops)
        self._router_scale = config.hidden_size**-0.5
        self._expert_scales = make.parameter(self.config.count, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        normed = self.router_norm(x)
        self.ops.scale(normed, self._router_scale)
        ids, weights = self.route(normed)
        self.ops.scale_by_expert(weights, ids, self._expert_scales)
        return self.mix(self.before(x), ids, weights)

    def weights(self, prefix: str) -> Weights:
        yield from super().weights(prefix)
        yield from self.before.weights(prefix)
        yield f"{prefix}router.scale", self.router_norm.weight
        yield f"{prefix}router.per_expert_scale", self._expert_scales


class DenseBesideExperts:
    """The sum of a gated MLP and of a mixture of experts, each between norms of its own, which both
    read the residual stream.
    """

    name = ""  # its parts stand in the layer itself

    def __init__(self, make: LayerFactory, config: DecoderConfig, dense: GatedMLP, experts: Any):
        size, self.ops = config.hidden_size, make.ops
        self.dense, self.experts = dense, experts
        self.routed = experts.routed
        self.before_dense = make.norm("pre_feedforward_layernorm", size, config)
        self.after_dense = make.norm("post_feedforward_layernorm_1", size, config)
        self.after_experts = make.norm("post_feedforward_layernorm_2", size, config)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        total = self.after_dense(self.dense(self.before_dense(x)))
        self.ops.add(self.after_experts(self.experts(x)), total)
        return total

    def weights(self, prefix: str) -> Weights:
        yield from self.dense.weights(f"{prefix}{self.dense.name}.")
        yield from self.experts.weights(prefix)
        for norm in (self.before_dense, self.after_dense, self.after_experts):
            yield from norm.weights(prefix)
