"""Heads that draft, in plain torch: what tests/bundled_model/train_heads.py trains, and the oracle
of Quire's (executor/models/draft_heads.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

MIMO = "model.mtp_layers.0."
DRAFTERS = Path(__file__).with_name("drafters")


def trained(method: str) -> str:
    """The directory of what drafts for the bundled model by this method."""
    return str(DRAFTERS / method)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """Causal, grouped, rotary; `inputs`: the width of what it reads."""

    def __init__(self, config: dict[str, Any], inputs: int, bias: bool):
        super().__init__()
        self.num_heads, self.num_kv_heads = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
        )
        size = config["hidden_size"]
        self.head_dim = size // self.num_heads
        self.q_proj = nn.Linear(inputs, size, bias=bias)
        self.k_proj = nn.Linear(inputs, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(size, size, bias=False)
        halves = torch.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = config["rope_theta"] ** -halves.double()

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., heads, T, head_dim]"""
        angles = positions[:, None].double() * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [rows, T, inputs], positions [T] -> [rows, T, hidden_size]"""
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self._rotated(query, positions), self._rotated(key, positions)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MTPHead(nn.Module):
    """Multi-token prediction with MiMo's names; the output head is the model's."""

    def __init__(self, config: dict[str, Any], embedding: Tensor):
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config, self.embedding = config, embedding
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            Norm(size, eps) for _ in range(3)
        )
        self.input_layernorm, self.post_attention_layernorm = (Norm(size, eps) for _ in range(2))
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.self_attn = Attention(config, size, bias=True)
        self.mlp = MLP(config)

    def first_state(self, layer_inputs: list[Tensor], hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, tokens: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [rows, T], each the one after its position; state [rows, T, size] -> logits and
        next state
        """
        token = self.token_layernorm(self.embedding[tokens])
        x = self.input_proj(torch.cat([self.hidden_layernorm(state), token], -1))
        x = x + self.self_attn(self.input_layernorm(x), positions)
        x = x + self.mlp(self.post_attention_layernorm(x))
        x = self.final_layernorm(x)
        return x @ self.embedding.T, x

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {MIMO + name: value for name, value in self.state_dict().items()}
        return tensors, self.config | {"num_nextn_predict_layers": 1}


class Eagle3Head(nn.Module):
    """EAGLE-3 with the names of its authors. known [N]: the tokens it can draft, ascending."""

    def __init__(self, config: dict[str, Any], embedding: Tensor, known: Tensor, layers: list[int]):
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config, self.embedding, self.known, self.layers = config, embedding, known, layers
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": Attention(config, 2 * size, bias=False),
                "mlp": MLP(config),
                "hidden_norm": Norm(size, eps),
                "input_layernorm": Norm(size, eps),
                "post_attention_layernorm": Norm(size, eps),
            }
        )
        self.norm = Norm(size, eps)
        self.lm_head = nn.Linear(size, len(known), bias=False)

    def first_state(self, layer_inputs: list[Tensor], hidden: Tensor) -> Tensor:
        """layer_inputs: [rows, T, size] of each layer of the model"""
        return self.fc(torch.cat([layer_inputs[layer] for layer in self.layers], -1))

    def forward(self, tokens: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As MTPHead's, with logits of all tokens; -1e30 of those that it does not know."""
        layer = self.midlayer
        token = layer["input_layernorm"](self.embedding[tokens])
        both = torch.cat([token, layer["hidden_norm"](state)], -1)
        x = state + layer["self_attn"](both, positions)
        x = x + layer["mlp"](layer["post_attention_layernorm"](x))
        of_known = self.lm_head(self.norm(x))
        logits = of_known.new_full((*of_known.shape[:-1], len(self.embedding)), -1e30)
        return logits.index_copy(-1, self.known, of_known), x

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        is_known = torch.zeros(len(self.embedding), dtype=torch.bool)
        is_known[self.known] = True
        tensors = dict(self.state_dict())
        tensors |= {"d2t": self.known - torch.arange(len(self.known)), "t2d": is_known}
        return tensors, self.config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.known),
            "eagle_aux_hidden_state_layer_ids": self.layers,
            "tie_word_embeddings": False,
        }


def save(head: MTPHead | Eagle3Head, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    write(*head.stored(), directory, dtype)


def write(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for name, value in tensors.items()
    }
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def random_head(
    kind: str, config: dict[str, Any], embedding: Tensor, layers: list[int], num_known: int = 900
) -> MTPHead | Eagle3Head:
    """A head that knows nothing, for tests."""
    torch.manual_seed(5)
    head: MTPHead | Eagle3Head
    if kind == "mtp":
        head = MTPHead(config, embedding)
    else:
        known = torch.randperm(len(embedding))[:num_known].sort().values
        head = Eagle3Head(config | {"intermediate_size": 96}, embedding, known, layers)
    for parameter in head.parameters():  # also biases and norms
        nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else 0.08)
    return head
