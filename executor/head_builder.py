"""Builds heads that draft for a model, after the model.

Must not know: caches, requests, steps, the names in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..ipc.config import EngineConfig, resolved
from ..ipc.errors import InvalidParameterError, ModelLoadError
from ..ipc.models.decoder_config import DecoderConfig
from ..ipc.models.draft_heads import (
    eagle3_config,
    find_heads,
    head_config,
    head_rows,
    scaled_outputs,
    why_no_head,
)
from ..ipc.models.quantization_config import parse_quantization
from .model import Model
from .model_builder import ModelBuilder, select_operations
from .models.decoder import BlocksOfRow, Decoder, make_layer
from .models.draft_heads import DraftHead, Eagle3Head, Eagle3Taps, MTPHead
from .models.layers import LayerFactory
from .weights.draft_heads import HeadWeights, fill_eagle3, load_mtp, read_known_tokens

OPTION = "speculative_config"


class HeadBuilder:
    """Builds heads. `config` is the engine's, with the model_config of the heads. `builder` has
    built `model`, which verifies and whose weights a head shares.
    """

    def __init__(self, config: EngineConfig, method: str, builder: ModelBuilder, model: Model):
        self._config, self._method, self._builder = config, method, builder
        # positions of a head for multi-token prediction have the model's components
        self._images = model.images if method == "mtp" else None
        self.weights_bytes = 0
        target, hf_config = builder.shape, config.model_config.hf_config
        if not isinstance(model, Decoder):
            raise InvalidParameterError(
                OPTION, f"method {method} needs an architecture that Quire has a page for"
            )
        self._layer_range = model.layer_range  # of this stage
        self._row = row = builder.kind.row
        reason = why_no_head(row, target) if method == "mtp" else scaled_outputs(target)
        if reason:
            raise InvalidParameterError(OPTION, f"method {method} is not offered for {reason}")
        self.shape: DecoderConfig = (
            eagle3_config(hf_config)
            if row is None or method == "eagle3"
            else head_config(row, hf_config)
        )
        if self.shape.hidden_size != target.hidden_size:
            raise InvalidParameterError(
                OPTION,
                f"the head's hidden_size must be the model's, {target.hidden_size}, got "
                f"{self.shape.hidden_size}",
            )
        self.ops = select_operations(
            config,
            self.shape,
            builder.dtype,
            builder.kv_cache_dtype,
            builder.device,
            builder.cpu_isa,
        )

    def build(self, report: Callable[[str, float], None]) -> list[DraftHead]:
        """Returns the heads of a chain, which share nothing yet. Raises ModelLoadError,
        InvalidParameterError.
        """
        make = self._make_layers()
        own = self._build_eagle3 if self._method == "eagle3" else self._build_mtp
        heads = own(make, report)
        report("load the head", 1.0)
        self.weights_bytes = make.weights_bytes
        return heads

    def build_taps(self, report: Callable[[str, float], None]) -> Eagle3Taps | None:
        """What a head of EAGLE-3 in the last stage reads of the layers of this one; None of another
        head.
        """
        if self._method != "eagle3":
            return None
        model_config, layers = self._config.model_config, self._tap_layers()
        weights, make = HeadWeights(Path(model_config.model)), self._make_layers()
        num_rows, size = head_rows(self._config.scheduler_config, 1), self.shape.hidden_size
        taps = Eagle3Taps(make, self.shape, self._in_stage(layers), num_rows)
        fill_eagle3(taps.weights(), size, layers, weights, None, make.fill)
        report("load the head", 1.0)
        return taps

    def _make_layers(self) -> LayerFactory:
        builder, quantization = self._builder, self._config.model_config.quantization
        return LayerFactory(
            self.ops, builder.dtype, builder.device, quantization, images=self._images
        )

    def _in_stage(self, layers: list[int]) -> list[int]:
        return [layer for layer in layers if layer in self._layer_range]

    def _build_eagle3(
        self, make: LayerFactory, report: Callable[[str, float], None]
    ) -> list[DraftHead]:
        model_config = self._config.model_config
        weights = HeadWeights(Path(model_config.model))
        bias = "midlayer.self_attn.q_proj.bias" in weights
        tokens = read_known_tokens(weights, model_config.hf_config, self.shape.vocab_size)
        known = None if tokens is None else tokens.sort().values.int()
        layers, size = self._tap_layers(), self.shape.hidden_size
        sizes = head_rows(self._config.scheduler_config, 1), resolved(model_config.max_model_len)
        head = Eagle3Head(make, self.shape, self._in_stage(layers), *sizes, bias, known)
        fill_eagle3(head.weights(), size, layers, weights, tokens, make.fill)
        return [head]

    def _build_mtp(
        self, make: LayerFactory, report: Callable[[str, float], None]
    ) -> list[DraftHead]:
        model_config, scheduling = self._config.model_config, self._config.scheduler_config
        directory, row = Path(model_config.model), self._row
        assert row is not None
        num_layers = self.shape.num_hidden_layers
        most = resolved(scheduling.speculative_config).num_speculative_tokens
        chain = find_heads(directory, self._builder.shape.num_hidden_layers, num_layers, most)
        blocks = BlocksOfRow(row, self.shape, make, resolved(model_config.max_model_len))
        parts = blocks.attention, blocks.mlp, blocks.norms, row.names, None, False
        stored_as = parse_quantization(
            model_config.hf_config, make.multiplies_fp8, make.quantizes_to_fp8
        )
        heads = list[DraftHead]()
        for names in chain:
            layers = [make_layer(make, self.shape, index, *parts) for index in range(num_layers)]
            num_rows = head_rows(scheduling, len(chain))
            head = MTPHead(make, self.shape, num_rows, layers, names.is_hidden_first)
            load_mtp(head, names, directory, report, make.fill, stored_as)
            heads.append(head)
        return heads

    def _tap_layers(self) -> list[int]:
        """The layers of the model whose inputs EAGLE-3 reads: those that its config.json names, or
        else those that its authors chose.
        """
        hf_config = self._config.model_config.hf_config
        count = self._builder.shape.num_hidden_layers
        key = "eagle_aux_hidden_state_layer_ids"
        of_eagle = hf_config.get("eagle_config") or {}
        layers = hf_config.get(key) or of_eagle.get(key) or [2, count // 2, count - 3]
        if (
            len(layers) != 3
            or len(set(layers)) != 3
            or not all(isinstance(layer, int) and 0 <= layer < count for layer in layers)
        ):
            raise ModelLoadError(
                f"config.json: {key} must be three different layers of the model's {count}, got "
                f"{layers}"
            )
        return layers
