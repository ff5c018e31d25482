"""Tiny checkpoints with heads for multi-token prediction, and those heads in torch.

The heads' layers are the last ones of a model in transformers' code that has more layers than the
checkpoint says.
"""

from __future__ import annotations

import json
import re
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from quire.tests.tiny_models import make_tiny_config, randomize, save_tiny_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NEMOTRON = "nemotron_h"
INDEXED = ("deepseek_v32", "glm_moe_dsa")
_FILE, _CONFIG = "model.safetensors", "config.json"
# what writes to the residual stream
_OUTPUTS = re.compile(r"\.(o_proj|out_proj|down_proj)\.weight$")


def save_with_head(
    directory: Path,
    kind: str,
    dtype: str = "float32",
    *,
    is_right: bool = False,
    num_heads: int = 1,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint of `kind`; `overrides` are keys of config.json. Several heads form a
    chain.

    is_right: layers change the residual stream so little that the next token mostly follows from
    the last one alone, and the head says which it is.
    """
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    config, larger = (make_tiny_config(kind, **overrides) for _ in range(2))
    count, size = config.num_hidden_layers, config.hidden_size
    _add_layers(larger, num_heads)
    model = AutoModelForCausalLM.from_config(larger)
    randomize(model, 0)
    model.save_pretrained(directory)
    save_tiny_tokenizer(directory)
    stored = json.loads((directory / _CONFIG).read_text())
    for key in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types"):
        if isinstance(stored.get(key), list):
            stored[key] = stored[key][:count]
    further = "mtp_num_hidden_layers" if kind in QWEN else "num_nextn_predict_layers"
    stored |= {"num_hidden_layers": count, further: num_heads, "dtype": dtype}
    (directory / _CONFIG).write_text(json.dumps(stored))
    tensors = load_file(directory / _FILE)
    generator = torch.Generator().manual_seed(1)
    for depth in range(1 if kind in QWEN else num_heads):
        shapes = {"fc": (size, 2 * size)} | dict.fromkeys(_NORMS, (size,))
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            own = 1 + 0.2 * noise if len(shape) == 1 else noise * (1.6 / shape[1] ** 0.5)
            tensors[f"{depth}.{name}"] = own
    names = _names(kind, count, num_heads)
    if is_right:
        of_layers = tuple(name for name in names if name.endswith("."))
        _make_right(tensors, of_layers, offset=float(kind in QWEN))
    tensors = {_renamed(name, names): t.to(getattr(torch, dtype)) for name, t in tensors.items()}
    save_file(tensors, directory / _FILE, metadata={"format": "pt"})
    return directory


def _add_layers(config: Any, num_heads: int) -> None:
    """Adds the layers of the heads to those of the model."""
    kind = config.model_type
    if kind == NEMOTRON:
        config.layer_types = [*config.layer_types, *["full_attention", "moe"] * num_heads]
        return
    attention = "full_attention" if kind in QWEN else "indexed_attention"
    own = {"layer_types": attention, "mlp_layer_types": "sparse", "indexer_types": "full"}
    listed = {key: getattr(config, key, None) for key in own}
    config.num_hidden_layers += num_heads
    for key, kinds in listed.items():
        if isinstance(kinds, list):
            setattr(config, key, [*kinds, *[own[key]] * num_heads])


_FINAL_NORMS = "model.norm.weight", "backbone.norm_f.weight"
_NORMS = ("token_norm", "hidden_norm", "head_norm")


def _names(kind: str, count: int, num_heads: int) -> dict[str, str]:
    """What stands in front in the checkpoint, for the beginnings of names. A number in front of a
    name is the head's.
    """
    names: dict[str, str] = {}
    for depth in range(num_heads):
        layers = [f"model.layers.{count + depth}."]
        if kind in QWEN:
            own = "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
            own, to = own if depth == 0 else (), [f"mtp.layers.{depth}."]
        elif kind == NEMOTRON:
            indices = 2 * depth, 2 * depth + 1
            layers = [f"backbone.layers.{count + index}." for index in indices]
            to = [f"mtp.layers.{index}." for index in indices]
            first = (to[0] + name for name in ("eh_proj", "enorm", "hnorm"))
            own = *first, to[1] + "final_layernorm"
        else:
            to = layers
            own = tuple(to[0] + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
        names |= {f"{depth}.{name}": f"{new}.weight" for name, new in zip(("fc", *_NORMS), own)}
        names |= dict(zip(layers, to))
    return names


def _renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        if name == old or (old.endswith(".") and name.startswith(old)):
            return new + name.removeprefix(old)
    return name


def _make_right(tensors: dict[str, Tensor], layers: tuple[str, ...], offset: float) -> None:
    """layers: the beginnings of names of the head's. offset: what the model adds to weights of
    norms.
    """
    [norm] = (tensors[name] for name in _FINAL_NORMS if name in tensors)
    size = len(norm)
    for name, tensor in tensors.items():
        if _OUTPUTS.search(name):
            tensors[name] = tensor * (0.01 if name.startswith(layers) else 0.02)
    for name in [name for name in tensors if name.endswith(".fc")]:
        depth = name.removesuffix("fc")
        tensors[name] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
        tensors[f"{depth}token_norm"] = torch.full((size,), 1 - offset)
        tensors[f"{depth}head_norm"] = norm.clone()


class TorchHead:
    """The heads of a checkpoint of save_with_head, in fp32, and the model that they draft for."""

    def __init__(self, directory: Path):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.config = config = AutoConfig.from_pretrained(directory)
        self.kind, count = config.model_type, config.num_hidden_layers
        own = json.loads((directory / _CONFIG).read_text())
        further = "mtp_num_hidden_layers" if self.kind in QWEN else "num_nextn_predict_layers"
        self.num_heads = own[further]
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        stored, names = load_file(directory / _FILE), _names(self.kind, count, self.num_heads)
        back = {new: old for old, new in names.items()}
        self.tensors = {_renamed(name, back): t.float() for name, t in stored.items()}
        self.offset = float(self.kind in QWEN)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[name] + self.offset
        eps = self.config.layer_norm_epsilon if self.kind == NEMOTRON else self.config.rms_norm_eps
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    @torch.no_grad()
    def hidden(self, token_ids: list[int]) -> Tensor:
        """[T, hidden_size]: the states of the model after its last norm."""
        return self.model.model(torch.tensor([token_ids])).last_hidden_state[0]

    def embed(self, token_ids: list[int]) -> Tensor:
        """[T, hidden_size]"""
        return self.model.get_input_embeddings()(torch.tensor(token_ids))

    @torch.no_grad()
    def logits(self, depth: int, token_ids: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [T]: those that the head at this depth reads; state [T, hidden_size] -> logits
        [T, vocab_size] and the next state.
        """
        own = 0 if self.kind in QWEN else depth
        token = self._norm(self.embed(token_ids), f"{own}.token_norm")
        joined = torch.cat([token, self._norm(state, f"{own}.hidden_norm")], 1)
        x = joined @ self.tensors[f"{own}.fc"].T
        x = self._qwen_layer(x, depth) if self.kind in QWEN else self._layers(x, depth)
        x = self._norm(x, f"{own}.head_norm")
        return x @ self.tensors["lm_head.weight"].T, x

    def drafts(self, token_ids: list[int], count: int) -> tuple[list[int], Tensor]:
        """What the heads draft behind token_ids, by the largest logits, and the first logits."""
        state, tokens = self.hidden(token_ids)[:-1], token_ids[1:]
        first, drafts = torch.empty(0), list[int]()
        for index in range(count):
            logits, states = self.logits(min(index, self.num_heads - 1), tokens, state)
            first = first if drafts else logits[-1]
            drafts.append(int(logits[-1].argmax()))
            if index + 1 < self.num_heads:  # the next head: one token later, the same positions
                tokens, state = [*tokens[1:], drafts[-1]], states
            else:
                tokens, state = [*tokens, drafts[-1]], torch.cat([state, states[-1:]])
        return drafts, first

    def _of_layer(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def _qwen_layer(self, x: Tensor, depth: int) -> Tensor:
        """Gated attention, then an MLP or experts."""
        self.prefix = f"model.layers.{self.config.num_hidden_layers + depth}."
        config, num_tokens = self.config, len(x)
        heads, size = config.num_attention_heads, config.head_dim
        normed = self._norm(x, f"{self.prefix}input_layernorm.weight")
        both = (normed @ self._of_layer("self_attn.q_proj").T).view(num_tokens, heads, 2 * size)
        query, gate = both.split(size, -1)
        key, value = (
            (normed @ self._of_layer(f"self_attn.{name}").T).view(num_tokens, -1, size)
            for name in ("k_proj", "v_proj")
        )
        query = self._rotated(self._norm(query, f"{self.prefix}self_attn.q_norm.weight"))
        key = self._rotated(self._norm(key, f"{self.prefix}self_attn.k_norm.weight"))
        groups = heads // config.num_key_value_heads
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        scores = torch.einsum("thd,shd->hts", query, key) * size**-0.5
        is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        attended = torch.einsum("hts,shd->thd", weights, value) * gate.sigmoid()
        x = x + attended.flatten(1) @ self._of_layer("self_attn.o_proj").T
        normed = self._norm(x, f"{self.prefix}post_attention_layernorm.weight")
        return x + self._mlp(normed)

    def _rotated(self, x: Tensor) -> Tensor:
        """x [T, heads, head_dim]: the first quarter of a head rotates, its halves as pairs."""
        count = int(x.shape[-1] * 0.25)
        frequencies = 10_000.0 ** (-torch.arange(0, count, 2, dtype=torch.float64) / count)
        angles = (torch.arange(len(x))[:, None] * frequencies)[:, None]
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second, rest = x.split([count // 2, count // 2, x.shape[-1] - count], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _mlp(self, x: Tensor) -> Tensor:
        if not hasattr(self.config, "num_experts"):
            return self._gated(x, "mlp")
        chances = (x @ self._of_layer("mlp.gate").T).softmax(-1)
        best, chosen = chances.topk(self.config.num_experts_per_tok, -1)
        weights = torch.zeros_like(chances).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        total = (x @ self._of_layer("mlp.shared_expert_gate").T).sigmoid()
        total = total * self._gated(x, "mlp.shared_expert")
        for expert in range(self.config.num_experts):
            total = total + weights[:, [expert]] * self._gated(x, f"mlp.experts.{expert}")
        return total

    def _gated(self, x: Tensor, block: str) -> Tensor:
        gate, up = (x @ self._of_layer(f"{block}.{name}").T for name in ("gate_proj", "up_proj"))
        return (F.silu(gate) * up) @ self._of_layer(f"{block}.down_proj").T

    def _layers(self, x: Tensor, depth: int) -> Tensor:
        """Those of transformers' code."""
        model, positions = self._larger.model, torch.arange(len(x))[None]
        x, own, mask = x[None], model.layers[self.config.num_hidden_layers :], None
        if self.kind in INDEXED:
            mask = torch.ones(1, 1, len(positions[0]), len(positions[0])).tril() > 0
        size = len(own) // self.num_heads
        for layer in own[depth * size : (depth + 1) * size]:
            if self.kind == NEMOTRON:
                x = layer(x, position_ids=positions)
                continue
            angles = model.rotary_emb(x, positions)
            x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
            x = x[0] if isinstance(x, tuple) else x  # GLM-5's returns what its indexer chooses
        return x[0]

    @cached_property
    def _larger(self) -> Any:
        """The model with the layers of the head."""
        from transformers import AutoModelForCausalLM

        config = type(self.config).from_dict(self.config.to_dict())
        _add_layers(config, self.num_heads)
        with tempfile.TemporaryDirectory() as directory:
            config.save_pretrained(directory)
            own = {n: t.contiguous() for n, t in self.tensors.items() if not n[0].isdigit()}
            save_file(own, Path(directory) / _FILE, metadata={"format": "pt"})
            return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
