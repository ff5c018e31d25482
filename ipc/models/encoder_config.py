"""Parses the config.json of a text encoder into one checked form.

Must not know: tensors, layers, how any of it is computed, which architectures there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ModelLoadError
from .config_values import integer, malformed
from .decoder_config import LayerConfig, most_of
from .forms import Head
from .quantization_config import parse_quantization

# hidden_act -> the operation of kernels/ops.py
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
    "swish": "silu",
}
# Keys that would change the mathematics, with the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "sinusoidal_pos_embds": (False,),
    "is_causal": (False,),
    "prenorm": (False,),
    "use_rms_norm": (False,),
    "parallel_block": (False,),
    "causal": (False,),
    "num_experts": (0, 1),
    "moe_every_n_layers": (0, -1),
    "embedding_size": (),
}


class EncoderConfig(msgspec.Struct, frozen=True):
    """Sizes are counts of features, heads, layers or tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    max_position_embeddings: int  # of a text, without the rows that position_offset skips
    layer_norm_eps: float
    activation: str  # an operation of kernels/ops.py, or the first part of one with _and_mul
    type_vocab_size: int = 0  # 0: tokens have no types
    has_pair_types: bool = False  # the second text of a pair has the type 1, not 0
    position_offset: int = 0  # the row of the first token in the table of positions
    # parameters of each layer's rotary embedding, None: it does not rotate
    ropes: tuple[dict[str, Any] | None, ...] = ()
    # of each layer: how far from itself a token sees, in both directions; 0: everything
    windows: tuple[int, ...] = ()
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    relative_buckets: int = 0  # rows of a table of attention's biases; 0: there is none
    head: Head = ()
    base_prefix: str = ""  # of the base model's tensors; a checkpoint of it alone may lack it

    is_bidirectional = True
    has_lm_head = False
    experts = None
    fp32_norms = False

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Empty: there is no KV cache."""
        return ()

    @property
    def cache_windows(self) -> tuple[int, ...]:
        """Empty, as cache_layers."""
        return ()

    def attention_shapes(self, layer: LayerConfig) -> list[tuple[int, int]]:
        """(rows, columns) of the linear layers of attention, as they are merged."""
        return [(3 * self.hidden_size, self.hidden_size), (self.hidden_size, self.hidden_size)]

    def layer(self, index: int) -> LayerConfig:
        """All layers are alike."""
        return LayerConfig(head_dim=self.head_dim, num_kv_heads=self.num_key_value_heads)

    def rotary_head_dim(self, index: int) -> int:
        return self.head_dim

    def state_bytes(self, itemsize: int) -> int:
        """There are no states of requests."""
        return 0

    def rope_of(self, layer: int) -> dict[str, Any] | None:
        return self.ropes[layer]


class Keys:
    """Reads config.json under the names that a family has: `renamed` has ours -> its."""

    def __init__(self, hf_config: Mapping[str, Any], renamed: Mapping[str, str]):
        self.hf_config = hf_config
        self._renamed = renamed
        parse_quantization(dict(hf_config))  # refuses what is unsupported
        for key, neutral in _NEUTRAL.items():
            value = hf_config.get(key)
            if value is None or value in neutral:
                continue
            if key == "embedding_size" and value == hf_config.get("hidden_size"):
                continue
            raise ModelLoadError(
                f"config.json: {key}={value!r:.100} is not supported; supported: "
                f"{', '.join(map(repr, neutral)) or 'none'}"
            )

    def _key(self, name: str) -> str:
        return self._renamed.get(name, name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.hf_config.get(self._key(name))
        value = self.hf_config.get(name) if value is None else value
        return default if value is None else value

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        return integer(self._key(name), self.get(name, default), most_of(name), least)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or not least <= value <= most:
            raise malformed(self._key(name), f"a number from {least} to {most}", value)
        return value

    def switch(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise malformed(self._key(name), "true or false", value)
        return value

    def activation(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if value not in ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: {self._key(name)}={value!r:.100} is not supported; supported: "
                f"{', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]

    def basic(self, eps: float) -> dict[str, Any]:
        """The fields of an EncoderConfig that all families have."""
        hidden_size, num_heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden_size % num_heads:
            raise ModelLoadError(
                f"config.json: hidden_size={hidden_size} is not a multiple of "
                f"num_attention_heads={num_heads}"
            )
        return {
            "vocab_size": self.size("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": self.size("intermediate_size", 4 * hidden_size),
            "num_hidden_layers": self.size("num_hidden_layers"),
            "num_attention_heads": num_heads,
            "head_dim": hidden_size // num_heads,
            "layer_norm_eps": self.number("layer_norm_eps", eps, 0, 1),
        }
