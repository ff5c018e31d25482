"""Decoders whose residual stream is several streams side by side (Gemma 3n): a layer predicts what
becomes of all of them, computes with one, and corrects the others by what it has found.

Must not know: architectures, files, requests.

    begin ─▶ streams [T, S, H] ─▶ layer ─▶ … ─▶ layer ─▶ merge ─▶ norm ─▶ head

    layer   predict ─▶ active stream ─▶ attention beside Laurel, MLP ─▶ correct ─▶ layer's input
            added to all streams but the first

Between sections of the model (sections.py) the streams of a token are one row [S * H].
"""

from __future__ import annotations

from typing import Any

import torch

from ...ipc.models.decoder_config import AltUp, DecoderConfig
from ...kernels.ops import AttentionMetadata
from .decoder import Decoder, DecoderLayer
from .layers import LayerFactory, Linear, Weights


class Laurel:
    """norm(right(left(x))) + x, of a low rank (Menghani et al. 2024)."""

    def __init__(self, make: LayerFactory, config: DecoderConfig, rank: int):
        hidden_size, self.ops = config.hidden_size, make.ops
        self.left = make.whole_linear("linear_left", hidden_size, rank)
        self.right = make.whole_linear("linear_right", rank, hidden_size)
        self.norm = make.norm("post_laurel_norm", hidden_size, config)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        total = self.norm(self.right(self.left(x)))
        self.ops.add(x, total)
        return total

    def weights(self, prefix: str) -> Weights:
        for part in (self.left, self.right, self.norm):
            yield from part.weights(prefix)


class Prediction:
    """Predicts and corrects the streams of a layer (Baykal et al. 2023)."""

    def __init__(self, make: LayerFactory, config: DecoderConfig, altup: AltUp):
        count, hidden_size = altup.num_streams, config.hidden_size
        self.ops, self._active = make.ops, altup.active
        self.router = make.router("modality_router", hidden_size, count)
        self.router_norm = make.norm("router_norm", hidden_size, config)
        self._router_scale = 1 / hidden_size
        self._predicting = make.parameter(count * count, count, dtype=torch.float32)
        self._correcting = make.parameter(count, count, dtype=torch.float32)
        self._output_scale = make.parameter(hidden_size)
        self._scales_corrected = altup.scales_corrected

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, S, hidden_size] -> the same shape"""
        routed = self._route(streams[:, self._active])
        return self.ops.altup_predict(streams, routed, self._predicting)

    def correct(self, streams: torch.Tensor, activated: torch.Tensor) -> None:
        """In place, streams [T, S, hidden_size]; activated [T, hidden_size] is what the layer has
        made of the active one.
        """
        routed = self._route(activated)
        self.ops.altup_correct(streams, activated, routed, self._correcting, self._active)

    def active(self, streams: torch.Tensor) -> torch.Tensor:
        """The view [T, hidden_size] of the stream that a layer computes with."""
        return streams[:, self._active]

    def corrected(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size]: what the layer's input is mixed with."""
        active = self.active(streams)
        if not self._scales_corrected:
            return active
        scale = self._output_scale.expand(len(active), 1, -1)
        return self.ops.multiply(active[:, None], scale, "none")[:, 0]

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, S] f32"""
        normed = self.router_norm(x)
        self.ops.scale(normed, self._router_scale)
        return self.router.logits(normed)

    def weights(self, prefix: str) -> Weights:
        yield f"{prefix}correct_output_scale", self._output_scale
        yield f"{prefix}correction_coefs.weight", self._correcting
        yield f"{prefix}prediction_coefs.weight", self._predicting
        yield from self.router.weights(prefix)
        yield from self.router_norm.weights(prefix)


class StreamsOfLayer:
    """What a layer has beside the blocks of other decoders, and how it computes with all of it."""

    def __init__(self, make: LayerFactory, config: DecoderConfig, altup: AltUp):
        self.ops = make.ops
        self.prediction = Prediction(make, config, altup)
        self.laurel = Laurel(make, config, altup.laurel_rank)

    def compute(
        self,
        layer: DecoderLayer,
        streams: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """streams [T, S, hidden_size] -> the same shape. The layer has attention, an MLP and an
        input of its own.
        """
        ops, (attention, mlp, inputs) = self.ops, layer.blocks
        streams = self.prediction.predict(streams)
        active = self.prediction.active(streams)
        x = _present(attention.before)(active)
        total = self.laurel(x)
        attended = _present(attention.after)(attention.compute(x, positions, metadata))
        ops.add(active, attended)
        ops.add(attended, total)
        ops.scale(total, 2**-0.5)
        computed = mlp.compute(_present(mlp.before)(total), positions, metadata)
        ops.add(_present(mlp.after)(computed), total)
        self.prediction.correct(streams, total)
        mixed = inputs.compute(self.prediction.corrected(streams), positions, metadata)
        given = _present(inputs.after)(mixed)
        for stream in streams.unbind(1)[1:]:
            ops.add(given, stream)
        return streams

    def weights(self, prefix: str) -> Weights:
        yield from self.prediction.weights(f"{prefix}altup.")
        yield from self.laurel.weights(f"{prefix}laurel.")


class Streams:
    """Makes several streams of one, in the first stage, and one of several, in the last one.
    Projections of a stream get the magnitude of the first one.
    """

    NAMES = "altup_projections", "altup_unembed_projections"  # and the number of a stream

    def __init__(self, make: LayerFactory, config: DecoderConfig, altup: AltUp):
        self.ops, self._count, size = make.ops, altup.num_streams, config.hidden_size
        others, stages = range(altup.num_streams - 1), make.group.stages
        spreading, merging = self.NAMES
        self.projections: Linear | None = None
        if stages.is_first:
            shards = {f"{spreading}.{i}": size for i in others}
            self.projections = make.linear(size, shards, takes_adapters=False, is_divided=False)
        self.back = [
            make.whole_linear(f"{merging}.{i}", size, size) for i in others if stages.is_last
        ]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, S, hidden_size]"""
        assert self.projections is not None
        others = self.projections(x).view(len(x), self._count - 1, -1)
        self.ops.match_magnitude(others, x)
        return self.ops.stack_streams(x, others)

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, S, hidden_size] -> the mean [T, hidden_size]"""
        first, *others = streams.unbind(1)
        total = None
        for projection, stream in zip(self.back, others):
            one = projection(stream)
            self.ops.match_magnitude(one[:, None], first)
            self.ops.add(first if total is None else total, one)
            total = one
        assert total is not None  # there are two streams or more
        self.ops.scale(total, 1 / self._count)
        return total

    def weights(self, prefix: str) -> Weights:
        for part in (self.projections, *self.back):
            if part is not None:
                yield from part.weights(prefix)


class AltUpDecoder(Decoder):
    """A decoder with streams. Its configuration has `altup` and `per_layer_inputs`."""

    def __init__(self, make: LayerFactory, config: DecoderConfig, *parts: Any, **options: Any):
        """See Decoder."""
        super().__init__(make, config, *parts, **options)
        altup = config.altup
        assert altup is not None
        self.stream_size, self._count = altup.num_streams * config.hidden_size, altup.num_streams
        self.streams = Streams(make, config, altup)
        self.streams_of_layers = [StreamsOfLayer(make, config, altup) for _ in self.layers]

    def begin(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """token_ids [T] -> the streams before the first layer [T, stream_size]."""
        return self.streams.spread(self.embed(token_ids, metadata)).flatten(1)

    def compute_layers(
        self,
        first: int,
        end: int,
        residual: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """The streams [T, stream_size] after layers [first, end) or, after the last layer, the
        hidden states [T, hidden_size], normed.
        """
        streams = residual.view(len(residual), self._count, -1)
        for i in range(first, end):
            own = self.streams_of_layers[i]
            if self.taps is not None:
                self.taps(self.layer_range[i], own.prediction.active(streams))
            streams = own.compute(self.layers[i], streams, positions, metadata)
        if end < len(self.layers) or not self.stages.is_last:
            return streams.flatten(1)
        return _present(self.norm)(self.streams.merge(streams))

    def stream_after(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Decoder. A layer returns other streams than it gets."""
        return hidden

    def is_of_another_rank(self, name: str) -> bool:
        """See Decoder."""
        part = name.removeprefix(self.config.base_prefix).partition(".")[0]
        is_elsewhere = self.stages.count > 1 and part in Streams.NAMES
        return is_elsewhere or super().is_of_another_rank(name)

    def weights(self) -> Weights:
        """See Decoder."""
        yield from super().weights()
        base = self.config.base_prefix
        yield from self.streams.weights(base)
        for i, own in zip(self.layer_range, self.streams_of_layers):
            yield from own.weights(f"{base}layers.{i}.")


def _present(norm: Any) -> Any:
    """A norm that this kind of layer always has."""
    assert norm is not None
    return norm
