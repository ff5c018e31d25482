"""A causal language model in transformers' code on Quire's layers and paged attention.

Must not know: files, requests.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, initialization
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from ....ipc.errors import InvalidParameterError, ModelLoadError
from ....ipc.models.fallback_architectures import FallbackConfig, parse_fallback_config
from ....kernels.ops import AttentionMetadata
from ...model import Model
from ...weights.converted import Conversion
from ..layers import LayerFactory, Weights
from .attention import NAME, PagedAttention, during, exploring
from .faster import replace_faster
from .modules import replace_modules
from .names import plan_conversions

logger = logging.getLogger(__name__)

EXPLORED = 7  # tokens; a number that sizes of models do not have


class _WithoutData(TorchFunctionMode):
    """A context in which tensors of torch.empty have no memory: parameters get theirs from the
    factory. Buffers are computed as usual.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class _Hidden:
    """The base model's results. It has the hidden states; all other results are None."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Takes the base model's place, and returns hidden states that it is given."""

    hidden: torch.Tensor

    def give(self, hidden: torch.Tensor) -> None:
        """Sets the hidden states, [1, T, hidden_size]."""
        self.hidden = hidden

    def __call__(self, *_: Any, **__: Any) -> _Hidden:
        return _Hidden(self.hidden)

    def __getattr__(self, name: str) -> Any:
        return self  # OPT calls model.decoder


class TransformersModel(Model):
    """Its layers are those of transformers, with Quire's linear layers and attention."""

    IS_FALLBACK = True
    UNRECORDABLE = "its code is that of transformers"
    parse_config = staticmethod(parse_fallback_config)

    def __init__(self, config: FallbackConfig, make: LayerFactory, max_model_len: int):
        self.config, self.ops, self._device = config, make.ops, make.device
        self.has_head = True
        hf_config = {k: v for k, v in config.hf_config.items() if k != "quantization_config"}
        hf = AutoConfig.for_model(hf_config.pop("model_type"), **hf_config)
        check_rope(hf, max_model_len)
        self._model = model = build(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)], hf, make.dtype)
        self._transposed = {
            f"{name}.weight" for name, module in model.named_modules() if type(module) is Conv1D
        }
        # whether the weights of transformers' experts are [experts, inputs, outputs]
        self.has_transposed_experts = any(
            getattr(module, "is_transposed", False) for module in model.modules()
        )
        head = model.get_output_embeddings()
        head_name = next(name for name, module in model.named_modules() if module is head)
        self._tied = {
            name: original
            for name, original in model.all_tied_weights_keys.items()
            if name == f"{head_name}.weight"
        }
        self.head_name = head_name
        self._table = replace_modules(model, make, self._tied, head_name)
        self.torch_products = [
            name for name, parameter in model.named_parameters() if parameter.dim() > 1
        ]
        self._replaced = replace_faster(model, make)
        if on_meta := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
            raise ModelLoadError(f"transformers leaves {on_meta[0]} without values")
        model.eval()
        prefix = model.base_model_prefix
        self._base = getattr(model, prefix)
        self._given = _Given()
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, prefix: self._given}
        for module in model.modules():
            # the lookup then avoids nn.Module.__getattr__, which is Python
            module.__dict__.update(module._modules)
        self._layers: list[PagedAttention] | None = None
        logger.info("%s runs in transformers' code: Quire has no row for it", type(model).__name__)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [T] i32 or i64, positions [T] i64 -> hidden states [T, hidden_size], normed"""
        with during(metadata):
            return self._hidden(token_ids, positions)

    def _hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._base(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] f32"""
        self._given.give(hidden[None])
        # these are token ids, of which the code can read only the shape
        token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return self._head(input_ids=token_ids, use_cache=False).logits[0].float()

    def weights(self) -> Weights:
        """The tensors to fill, under transformers' names."""
        yield from self._table.items()

    def tied_weights(self) -> dict[str, str]:
        return dict(self._tied)

    def plan_conversions(self, stored: list[str]) -> list[Conversion]:
        conversions = plan_conversions(self._model, self._table, self._tied, stored)
        for conversion in conversions:
            if conversion.target in self._transposed:
                conversion.convert, conversion.is_plain = _transposed(conversion.convert), False
        return conversions

    @torch.inference_mode()
    def attention_layers(self) -> list[PagedAttention]:
        """The attention layers in call order. Each owns its key_cache and value_cache.

        Call it when all weights are there: the first call runs the model to find the layers.
        """
        if self._layers is None:
            self.explore()
        assert self._layers is not None
        return self._layers

    @torch.inference_mode()
    def explore(self) -> int:
        """Finds the attention layers by a pass without a cache. Returns the pass's token count."""
        for module in self._replaced:
            module.prepare()
        with exploring(self.ops) as found:
            positions = torch.arange(EXPLORED, device=self._device)
            self._hidden(positions.int(), positions)
        self._check([layer for _, layer in found])
        for module, layer in found:
            module.__dict__["quire_attention"] = layer
        self._layers = [layer for _, layer in found]
        return EXPLORED

    def _check(self, layers: list[PagedAttention]) -> None:
        """Checks the layers against what config.json says, from which memory is planned."""
        config = self.config
        expected = [(config.num_key_value_heads, config.head_dim)] * config.num_hidden_layers
        found = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
        if found != expected:
            raise ModelLoadError(
                f"{type(self._model).__name__} has attention layers with heads and sizes of heads "
                f"{found}, config.json says {expected}, which is not supported"
            )


def check_rope(hf_config: Any, max_model_len: int) -> None:
    """Refuses lengths for which transformers' LongRoPE takes other angles as soon as a batch has a
    long sequence: keys in the cache would be wrong.

    Raises InvalidParameterError, naming max_model_len.
    """
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if not isinstance(parameters, dict) or parameters.get("rope_type") != "longrope":
            continue
        length = parameters.get("original_max_position_embeddings") or getattr(
            hf_config, "original_max_position_embeddings", hf_config.max_position_embeddings
        )
        if max_model_len > length:
            raise InvalidParameterError(
                "max_model_len",
                f"must be at most {length}, the original length of longrope, for a model that runs "
                f"in transformers' code, got {max_model_len}",
            )


def _divided_frequencies(config: Any, device: Any = None, **_: Any) -> tuple[torch.Tensor, float]:
    """The frequencies of rope_type "factors", which only GGUF files have. Each has a divisor."""
    rope = config.rope_parameters
    factors = torch.tensor(rope["factors"], device=device)
    exponents = torch.arange(0, len(factors), device=device) / len(factors)
    return 1.0 / (rope["rope_theta"] ** exponents) / factors, 1.0


ROPE_INIT_FUNCTIONS["factors"] = _divided_frequencies


def _transposed(convert: Any) -> Any:
    return lambda values: {name: value.T for name, value in convert(values).items()}


def build(kind: Any, hf_config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """Builds a model of transformers whose parameters have no memory."""
    with initialization.no_init_weights(), _WithoutData():
        return kind._from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=NAME,
            experts_implementation="eager",
            **options,
        )
