"""What general.architecture of a GGUF file stands for: the model type, the names of its tensors and
of its metadata, and what the conversion to GGUF does to its weights.

Must not know: files, tensors' values, torch. tests/executor/models/fallback/test_gguf.py compares
the names with those of the gguf package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .encoders import ENCODERS
from .gguf import GGUFTensor
from .gguf_families import (
    deepseek2_config,
    gemma3n_config,
    gemma4_config,
    glm4_moe_config,
    indexed_config,
)
from .gguf_hybrids import (
    OF_GATED_DELTA_NET,
    OF_KIMI,
    OF_MAMBA,
    OF_MAMBA2,
    OF_NEMOTRON,
    falcon_config,
    gated_delta_net_config,
    granite_config,
    kimi_config,
    mamba2_config,
    nemotron_config,
    short_conv_config,
)
from .qwen_families import GATES_APART, INTERLEAVED

# Takes keys out of the metadata, and returns keys of config.json (gguf_families.py,
# gguf_hybrids.py).
Reader = Callable[[dict[str, Any], Mapping[str, GGUFTensor], list[float] | None], dict[str, Any]]

# Maps the parts of tensors' names in a file to those of most models. A name is
# blk.LAYER.PART.weight in a file and model.layers.LAYER.PART.weight in a model.
_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    # of a head for multi-token prediction, under the names of DeepSeek
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_WITHOUT_PRE_NORMS = _POST_NORMS | {"attn_norm": None, "ffn_norm": None}
_WITHOUT_ENDING = ("ssm_a", "ssm_d", "ffn_norm")
_HUNYUAN_LAYER = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_FUSED_UP = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA4_WHOLE = _WHOLE_MODEL | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER_INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N_WHOLE = _GEMMA4_WHOLE | {
    "altup_proj": "model.altup_projections",
    "altup_unembd_proj": "model.altup_unembed_projections",
}
_GEMMA3N_LAYER = (
    _SANDWICH
    | _LAYER_INPUTS
    | {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
)
_GEMMA4_LAYER = (
    _SANDWICH
    | _LAYER_INPUTS
    | {
        "layer_output_scale": "layer_scalar",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps": "experts.gate_up_proj",
        "ffn_gate_exps": "experts.gate_proj",
        "ffn_up_exps": "experts.up_proj",
        "ffn_down_exps": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    }
)

_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT_LAYER = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # these two are parts of kv_b_proj (gguf_weights.py)
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction",
    **_SHARED_EXPERTS,
}
_OF_DEEPSEEK_EXPERTS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_WITHOUT_GROUPS = {
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}

QUERY_GROWTH = "llama_4_scaling_beta"  # a key of rope_scaling
_GRANITE = {
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_EXPERT_SIZE = {"moe_intermediate_size": "ffn_gate_exps.weight"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = _EXPERTS | {"expert_count": "num_local_experts"}


class GGUFArchitecture(msgspec.Struct, frozen=True):
    """An architecture of GGUF files. `names` has the names that differ from most models' (None:
    there is no such tensor). `keys` maps keys of the metadata, without the architecture's name, to
    keys of config.json. `constants` are values of config.json that are known without a key; the
    file's keys take precedence. `presence` maps a key of config.json to the tensor of a layer
    that makes it true. `sizes` maps a key of config.json to the tensor of the first layer
    that has as many rows for each expert.

    `whole` names the tensors beside the layers, and `parts` those within a layer, whose names begin
    with `layer`. `is_encoder`: gguf_config.py reads a text encoder's metadata apart.

    Of each `windows` layers in a row the last has no window, unless the file says otherwise; 0: the
    file says it. `is_permuted`: the conversion interleaves the rows of q and k
    (executor/weights/gguf.py). The conversion adds `norm_offset` to the weights of norms other
    than `mixer_norm`.

    `read` reads what the metadata says in the family's own terms. `shares_keys`: layers that read
    the keys and values of another one may have weights for their own, which nobody needs.
    `unread`: the beginning of the names of a layer's tensors that nobody needs either.
    `others`: architectures and model types whose files have the same name.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str | None] = {}
    keys: Mapping[str, str] = {}
    constants: Mapping[str, Any] = {}
    presence: Mapping[str, str] = {}
    sizes: Mapping[str, str] = {}
    windows: int = 0
    is_permuted: bool = False
    norm_offset: float = 0.0
    mixer_norm: str | None = None
    whole: Mapping[str, str] = msgspec.field(default_factory=lambda: _WHOLE_MODEL)
    parts: Mapping[str, str] = msgspec.field(default_factory=lambda: _LAYER)
    layer: str = "model.layers.{}."
    is_encoder: bool = False
    read: Reader | None = None
    shares_keys: bool = False
    unread: str | None = None
    others: tuple[tuple[str, str], ...] = ()

    def model_name(self, name: str) -> str | None:
        """Maps blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight, and an unknown name
        to None. What `names` has with the ending "scale" is a weight in the model, as are a few
        tensors of mixers that have no ending.
        """
        stem, _, kind = name.rpartition(".")
        if kind in ("scale", *_WITHOUT_ENDING):
            stem, kind = name, "weight"
        if kind not in ("weight", "bias"):
            return None
        if stem in self.whole:
            return f"{self.names.get(stem, self.whole[stem])}.{kind}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if block != "blk" or not layer.isdecimal() or str(int(layer)) != layer:
            return None
        found = self.names.get(part, self.parts.get(part))
        return None if found is None else f"{self.layer.format(layer)}{found}.{kind}"

    def is_unread(self, name: str) -> bool:
        """Whether a file's tensor is of a layer's part that models lack."""
        return self.unread is not None and name.split(".", 2)[-1].startswith(self.unread)

    def offset_of(self, name: str) -> float:
        """What the conversion adds to a vector, by the model's name of it."""
        is_norm = name.endswith("norm.weight")
        of_mixer = self.mixer_norm is not None and name.endswith(f".{self.mixer_norm}.weight")
        return self.norm_offset if is_norm and not of_mixer else 0.0


def _encoder(architecture: str, **own: Any) -> GGUFArchitecture:
    built = ENCODERS[architecture]
    names, parts = built.names, {}
    for part, name in (
        *zip(("attn_q", "attn_k", "attn_v") if len(names.qkv) == 3 else ("attn_qkv",), names.qkv),
        ("attn_output", names.out),
        ("attn_output_norm", names.attention_norm),
        *zip(("ffn_gate", "ffn_up")[-len(names.up) :], names.up),
        ("ffn_down", names.down),
        ("layer_output_norm", names.mlp_norm),
    ):
        parts[part] = name
    whole = {
        "token_embd": names.words,
        "position_embd": names.positions,
        "token_types": names.types,
        "token_embd_norm": names.embedding_norm,
    }
    return GGUFArchitecture(
        architecture,
        built.model_type,
        whole={part: names.base + name for part, name in whole.items() if name},
        parts=parts,
        layer=names.base + names.layer,
        is_encoder=True,
        **own,
    )


_MIXER_PARTS = {  # of Gated DeltaNet and Mamba 2
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt",
    "ssm_a": "A_log",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_OF_QWEN35: dict[str, Any] = {
    "names": {part: f"linear_attn.{name}" for part, name in _MIXER_PARTS.items()}
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_ba": "linear_attn.in_proj_ba",  # of Qwen3-Next
    },
    "constants": {INTERLEAVED: True},
    "norm_offset": 1.0,
    "mixer_norm": "linear_attn.norm",
    "read": gated_delta_net_config,
}
_OF_QWEN3NEXT: dict[str, Any] = _OF_QWEN35 | {"constants": {GATES_APART: True}}
_OF_DEEPSEEK_KEYS = _OF_DEEPSEEK_EXPERTS | {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "rope.scaling.mscale": "mscale",
}
_OF_INDEXED: dict[str, Any] = {
    "names": _LATENT_LAYER,
    "keys": _OF_DEEPSEEK_KEYS
    | {
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    },
    "constants": _WITHOUT_GROUPS,
    "presence": {"attention_bias": "attn_kv_a_mqa.bias"},
    "read": indexed_config,
    "unread": "indexer.",
}
_KIMI_LAYER = _LATENT_LAYER | {
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt",
    "ssm_norm": "self_attn.o_norm",
}
_LFM_KEYS = {"shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps"}
_OF_LFM: dict[str, Any] = {
    "names": {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.gate_proj",
        "ffn_up_exps": "feed_forward.experts.up_proj",
        "ffn_down_exps": "feed_forward.experts.down_proj",
        "exp_probs_b": "feed_forward.expert",
    },
    # both names of the final norm are in use
    "whole": _WHOLE_MODEL
    | {"output_norm": "model.embedding_norm", "token_embd_norm": "model.embedding_norm"},
    "read": short_conv_config,
}
_MAMBA_PARTS = _MIXER_PARTS | {"ssm_in": "in_proj", "ssm_d": "D"}
_GRANITE_NAMES = {part: f"mamba.{name}" for part, name in _MAMBA_PARTS.items()} | {
    "ffn_gate": "shared_mlp.gate_linear",
    "ffn_up": "shared_mlp.up_linear",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_shexp": "shared_mlp.gate_linear",
    "ffn_up_shexp": "shared_mlp.up_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.gate_linear",
    "ffn_up_exps": "block_sparse_moe.up_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
_BACKBONE: dict[str, Any] = {
    "whole": {
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
    },
    "layer": "backbone.layers.{}.",
    "presence": {"use_conv_bias": "ssm_conv1d.bias"},
}
_MAMBA2_NAMES = {part: f"mixer.{name}" for part, name in _MAMBA_PARTS.items()} | {
    "attn_norm": "norm"
}
_OF_NEMOTRON: dict[str, Any] = _BACKBONE | {
    "names": _MAMBA2_NAMES
    | {
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b": "mixer.gate.e_score_correction",
        "ffn_up_exps": "mixer.experts.up_proj",
        "ffn_down_exps": "mixer.experts.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    "constants": {"hidden_act": "relu2"},
    "is_permuted": True,
    "read": nemotron_config,
}

# "llama" also stands for Mistral, which is the same without a sliding window.
GGUF_ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", presence=_BIASES, is_permuted=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3"),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM", "gemma3_text", _SANDWICH, norm_offset=1.0),
    "gemma3n": GGUFArchitecture(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        _GEMMA3N_LAYER,
        keys={
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
        },
        constants={
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "final_logit_softcapping": None,
        },
        sizes={"laurel_rank": "laurel_l.weight"},
        whole=_GEMMA3N_WHOLE,
        read=gemma3n_config,
        shares_keys=True,
    ),
    "gemma4": GGUFArchitecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        _GEMMA4_LAYER,
        keys={
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        constants={
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
        },
        whole=_GEMMA4_WHOLE,
        read=gemma4_config,
        others=(("Gemma4UnifiedForCausalLM", "gemma4_unified_text"),),
        shares_keys=True,
    ),
    "deepseek2": GGUFArchitecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _LATENT_LAYER,
        keys=_OF_DEEPSEEK_KEYS,
        constants=_WITHOUT_GROUPS,
        presence={"attention_bias": "attn_kv_a_mqa.bias"},
        read=deepseek2_config,
        others=(
            ("DeepseekV2ForCausalLM", "deepseek_v2"),
            ("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
        ),
    ),
    "deepseek32": GGUFArchitecture("DeepseekV32ForCausalLM", "deepseek_v32", **_OF_INDEXED),
    "glm-dsa": GGUFArchitecture("GlmMoeDsaForCausalLM", "glm_moe_dsa", **_OF_INDEXED),
    "kimi-linear": GGUFArchitecture(
        "KimiLinearForCausalLM",
        "kimi_linear",
        _KIMI_LAYER,
        keys=_OF_DEEPSEEK_EXPERTS | OF_KIMI,
        constants=_WITHOUT_GROUPS | {"norm_topk_prob": True},
        read=kimi_config,
    ),
    "glm4moe": GGUFArchitecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        _SHARED_EXPERTS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction",
        },
        keys=_OF_DEEPSEEK_EXPERTS,
        constants=_WITHOUT_GROUPS | {"partial_rotary_factor": 1.0},
        presence=_BIASES | {"use_qk_norm": "attn_q_norm.weight"},
        read=glm4_moe_config,
    ),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", "phi3", _FUSED_UP),
    "smollm3": GGUFArchitecture(
        "SmolLM3ForCausalLM", "smollm3", presence=_BIASES, is_permuted=True
    ),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM", "olmo2", _WITHOUT_PRE_NORMS),
    "bitnet-b1.58": GGUFArchitecture(  # of bitnet.cpp; llama.cpp's bitnet is an older model
        "BitNetForCausalLM",
        "bitnet",
        {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
        constants={"hidden_act": "relu2"},
        presence={"attention_bias": "attn_q.bias"},
    ),
    "granite": GGUFArchitecture(
        "GraniteForCausalLM",
        "granite",
        keys=_GRANITE,
        presence=_BIASES,
        is_permuted=True,
    ),
    "mistral3": GGUFArchitecture(  # Ministral 3 has YaRN, Mistral Small 3.1 has none
        "Ministral3ForCausalLM",
        "ministral3",
        keys={
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
            "attention.temperature_scale": QUERY_GROWTH,
        },
        constants={"rope_scaling": {"rope_type": "default"}},
        is_permuted=True,
    ),
    "qwen2moe": GGUFArchitecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        keys=_EXPERTS,
        constants={"norm_topk_prob": False},
        sizes=_EXPERT_SIZE | {"shared_expert_intermediate_size": "ffn_gate_shexp.weight"},
    ),
    "qwen3moe": GGUFArchitecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        keys=_EXPERTS,
        constants={"norm_topk_prob": True},
        presence=_BIASES,
        sizes=_EXPERT_SIZE,
    ),
    "olmoe": GGUFArchitecture(
        "OlmoeForCausalLM",
        "olmoe",
        keys=_EXPERTS,
        constants={"norm_topk_prob": False},
        presence=_BIASES,
    ),
    "gpt-oss": GGUFArchitecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        keys=_LOCAL_EXPERTS,
        presence={"attention_bias": "attn_q.bias"},
        windows=2,
    ),
    "qwen35": GGUFArchitecture(
        "Qwen3_5ForCausalLM", "qwen3_5_text", keys=OF_GATED_DELTA_NET, **_OF_QWEN35
    ),
    "qwen35moe": GGUFArchitecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        keys=OF_GATED_DELTA_NET | _EXPERTS,
        **_OF_QWEN35,
        sizes=_EXPERT_SIZE | {"shared_expert_intermediate_size": "ffn_gate_shexp.weight"},
    ),
    "qwen3next": GGUFArchitecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        keys=OF_GATED_DELTA_NET | _EXPERTS,
        **_OF_QWEN3NEXT,
        sizes=_EXPERT_SIZE | {"shared_expert_intermediate_size": "ffn_gate_shexp.weight"},
    ),
    "lfm2": GGUFArchitecture(
        "Lfm2ForCausalLM",
        "lfm2",
        keys=_LFM_KEYS,
        constants={"block_auto_adjust_ff_dim": False},
        **_OF_LFM,
    ),
    "lfm2moe": GGUFArchitecture(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        keys=_LFM_KEYS
        | _EXPERTS
        | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        **_OF_LFM,
    ),
    "granitehybrid": GGUFArchitecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _GRANITE_NAMES,
        keys=_GRANITE
        | OF_MAMBA
        | _LOCAL_EXPERTS
        | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
        presence={"attention_bias": "attn_q.bias", "mamba_conv_bias": "ssm_conv1d.bias"},
        is_permuted=True,
        read=granite_config,
    ),
    "falcon-h1": GGUFArchitecture(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {part: f"mamba.{name}" for part, name in _MAMBA_PARTS.items()}
        | {
            "output_norm": "model.final_layernorm",
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        keys=OF_MAMBA,
        constants={"mamba_norm_before_gate": False},
        presence={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_rms_norm": "ssm_norm.weight"},
        read=falcon_config,
    ),
    "nemotron_h": GGUFArchitecture(
        "NemotronHForCausalLM", "nemotron_h", keys=OF_NEMOTRON, **_OF_NEMOTRON
    ),
    "nemotron_h_moe": GGUFArchitecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        keys=OF_NEMOTRON
        | {
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "moe_latent_size": "moe_latent_size",
        },
        **_OF_NEMOTRON,
    ),
    "mamba2": GGUFArchitecture(
        "Mamba2ForCausalLM",
        "mamba2",
        _MAMBA2_NAMES,
        keys=OF_MAMBA2,
        read=mamba2_config,
        **_BACKBONE,
    ),
    # the following run in transformers' code
    "gemma": GGUFArchitecture(
        "GemmaForCausalLM",
        "gemma",
        constants={"hidden_act": "gelu_pytorch_tanh"},
        norm_offset=1.0,
    ),
    "gemma2": GGUFArchitecture(
        "Gemma2ForCausalLM",
        "gemma2",
        _SANDWICH,
        constants={
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": 4096,
        },
        windows=2,
        norm_offset=1.0,
    ),
    "starcoder2": GGUFArchitecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        constants={"hidden_act": "gelu_pytorch_tanh"},
        presence={"use_bias": "attn_q.bias"},
    ),
    "phi2": GGUFArchitecture(
        "PhiForCausalLM",
        "phi",
        {
            "output_norm": "model.final_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
        constants={"hidden_act": "gelu_new", "partial_rotary_factor": 1.0},
    ),
    "glm4": GGUFArchitecture(
        "Glm4ForCausalLM",
        "glm4",
        _FUSED_UP
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        constants={"partial_rotary_factor": 1.0},
        presence=_BIASES,
    ),
    "chatglm": GGUFArchitecture(
        "GlmForCausalLM",
        "glm",
        _FUSED_UP,
        constants={"partial_rotary_factor": 1.0},
        presence=_BIASES,
    ),
    "hunyuan-dense": GGUFArchitecture(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        _HUNYUAN_LAYER,
        presence=_BIASES,
    ),
    "hunyuan-moe": GGUFArchitecture(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        _HUNYUAN_LAYER
        | {
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_shared_count": "num_shared_expert",
        },
        presence=_BIASES,
        sizes={"intermediate_size": "ffn_gate_exps.weight"},
    ),
    "olmo": GGUFArchitecture(
        "OlmoForCausalLM",
        "olmo",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "attention.clamp_kqv": "clip_qkv"},
        presence=_BIASES,
        is_permuted=True,
    ),
    "arcee": GGUFArchitecture(
        "ArceeForCausalLM",
        "arcee",
        constants={"hidden_act": "relu2"},
        presence=_BIASES,
        is_permuted=True,
    ),
    "command-r": GGUFArchitecture(
        "CohereForCausalLM",
        "cohere",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        presence=_BIASES | {"use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": GGUFArchitecture(
        "Cohere2ForCausalLM",
        "cohere2",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        presence=_BIASES,
        windows=4,
    ),
    "nemotron": GGUFArchitecture(
        "NemotronForCausalLM",
        "nemotron",
        keys={"attention.layer_norm_epsilon": "norm_eps"},
        constants={"hidden_act": "relu2", "partial_rotary_factor": 1.0},
        presence=_BIASES,
        norm_offset=1.0,
    ),
    "exaone4": GGUFArchitecture(
        "Exaone4ForCausalLM",
        "exaone4",
        _WITHOUT_PRE_NORMS,
        constants={"sliding_window": None},
        windows=4,
    ),
    "seed_oss": GGUFArchitecture(
        "SeedOssForCausalLM",
        "seed_oss",
        {"post_attention_norm": "post_attention_layernorm"},
        presence=_BIASES | {"attention_out_bias": "attn_output.bias"},
    ),
    "ernie4_5": GGUFArchitecture(
        "Ernie4_5ForCausalLM", "ernie4_5", presence={"use_bias": "attn_q.bias"}
    ),
    "ernie4_5-moe": GGUFArchitecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            "exp_probs_b": "mlp.moe_statics.e_score_correction",
            **_SHARED_EXPERTS,
        },
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        constants={"moe_num_shared_experts": 0},
        presence={"use_bias": "attn_q.bias"},
    ),
    # These are text encoders. RoBERTa's positions begin at the first row of the file's table, so
    # RoBERTa counts as BERT.
    "bert": _encoder("BertModel", constants={"hidden_act": "gelu"}),
    "nomic-bert": _encoder(
        "NomicBertModel",
        keys={"rope.freq_base": "rotary_emb_base"},
        constants={"hidden_act": "silu"},
    ),
}
# llama.cpp writes these models under the name of another. Their metadata tells them apart from it.
OLMO3 = GGUFArchitecture("Olmo3ForCausalLM", "olmo3")  # olmo2 with windows
MIXTRAL = GGUFArchitecture(  # llama with experts
    "MixtralForCausalLM", "mixtral", keys=_LOCAL_EXPERTS
)
# the text models of those that read images; the encoder has a file of its own
GGUF_ARCHITECTURES |= {
    "qwen2vl": GGUF_ARCHITECTURES["qwen2"],
    "qwen3vl": GGUF_ARCHITECTURES["qwen3"],
    "qwen3vlmoe": GGUF_ARCHITECTURES["qwen3moe"],
}
VARIANTS = {"olmo2": OLMO3, "llama": MIXTRAL}
VARIANT_KEYS = {"olmo2": ("attention.sliding_window",), "llama": ("expert_count",)}
_OTHER_ENCODERS = ("gemma-embedding", "jina-bert-v2", "modern-bert", "nomic-bert-moe", "t5encoder")
REFUSED_ARCHITECTURES = {
    "stablelm": "transformers does not declare that other attention functions serve it",
    **dict.fromkeys(_OTHER_ENCODERS, "this text encoder is read from safetensors"),
}
