"""Builds a head that drafts for a model, after the model.

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
    find_head,
    head_config,
    scaled_outputs,
    why_no_head,
)
from ..ipc.models.quantization_config import parse_quantization
from .model import Model
from .model_builder import ModelBuilder, select_operations
from .models.decoder import BlocksOfRow, Decoder, make_layer
from .models.draft_heads import DraftHead, Eagle3Head, MTPHead
from .models.layers import LayerFactory
from .weights.draft_heads import HeadWeights, fill_eagle3, load_mtp, read_known_tokens

OPTION = "speculative_config"


class HeadBuilder:
    """Builds a head. `config` is the engine's, with the model_config of the head. `builder` has
    built `model`, which verifies and whose weights a head shares. A pass has at most `rows` tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        method: str,
        builder: ModelBuilder,
        model: Model,
        rows: int,
    ):
        self._config, self._method, self._builder = config, method, builder
        self._rows = rows
        self.weights_bytes = 0
        target, hf_config = builder.shape, config.model_config.hf_config
        if not isinstance(model, Decoder):
            raise InvalidParameterError(
                OPTION, f"method {method} needs an architecture that Quire has a page for"
            )
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

    def build(self, report: Callable[[str, float], None]) -> DraftHead:
        """Returns a head that shares nothing yet. Raises ModelLoadError, InvalidParameterError."""
        model_config, builder = self._config.model_config, self._builder
        directory = Path(model_config.model)
        make = LayerFactory(self.ops, builder.dtype, builder.device, model_config.quantization)
        sizes = self._rows, resolved(model_config.max_model_len)
        head: DraftHead
        if self._method == "eagle3":
            weights = HeadWeights(directory)
            bias = "midlayer.self_attn.q_proj.bias" in weights
            tokens = read_known_tokens(weights, model_config.hf_config, self.shape.vocab_size)
            known = None if tokens is None else tokens.sort().values.int()
            layers, size = self._tap_layers(), self.shape.hidden_size
            head = Eagle3Head(make, self.shape, layers, *sizes, bias, known)
            fill_eagle3(head.weights(), size, layers, weights, tokens, make.fill)
        else:
            assert self._row is not None
            num_layers = self.shape.num_hidden_layers
            names = find_head(directory, builder.shape.num_hidden_layers, num_layers)
            blocks = BlocksOfRow(self._row, self.shape, make, sizes[1])
            parts = blocks.attention, blocks.mlp, blocks.norms, self._row.names, None, False
            layers = [make_layer(make, self.shape, index, *parts) for index in range(num_layers)]
            head = MTPHead(make, self.shape, self._rows, layers, names.is_hidden_first)
            stored_as = parse_quantization(model_config.hf_config)
            load_mtp(head, names, directory, report, make.fill, stored_as)
        report("load the head", 1.0)
        self.weights_bytes = make.weights_bytes
        return head

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
