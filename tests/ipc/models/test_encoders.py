"""The tables of text encoders agree with the executor's models, and read config.json as
transformers does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire.executor import models
from quire.executor.models.layers import LayerFactory
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import find_architecture
from quire.ipc.models.encoders import ENCODERS
from quire.kernels import registry
from quire.tests import tiny_encoders

FORMS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
FAMILIES = {architecture.model_type: name for name, architecture in ENCODERS.items()}


def config_of(kind: str, form: str = "Model", **changes: Any) -> dict[str, Any]:
    names = [FAMILIES[kind].removesuffix("Model") + form]
    own = tiny_encoders.ENCODERS[kind]
    return {"model_type": kind, "architectures": names, "pad_token_id": 0, **own, **changes}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_tensors_equal_those_of_the_model(kind: str, form: str) -> None:
    hf_config = config_of(kind, form, num_labels=3)
    name = find_architecture(hf_config)
    assert name == FAMILIES[kind] == find_architecture({"model_type": kind})
    config = ENCODERS[name].parse(hf_config)
    ops = registry.select("cpu", torch.float32)
    make = LayerFactory(ops, torch.float32, torch.device("cpu"))
    model = models.find_model(hf_config).build(config, make, 64)
    tensors = {tensor: list(values.shape) for tensor, values in model.weights()}
    assert tensors == ENCODERS[name].weight_shapes(config)
    is_classifier = "Classification" in form
    assert is_classifier == any("classifier" in tensor for tensor in tensors)


def test_positions_are_counted_behind_the_padding_token() -> None:
    config = ENCODERS["RobertaModel"].parse(config_of("roberta"))
    assert (config.max_position_embeddings, config.position_offset) == (256, 2)
    config = ENCODERS["BertModel"].parse(config_of("bert"))
    assert (config.max_position_embeddings, config.position_offset) == (512, 0)


def test_the_older_keys_of_modernbert_and_nomic_bert_are_read() -> None:
    own = {"global_attn_every_n_layers": 2, "global_rope_theta": 7e4, "local_rope_theta": 5e3}
    config = ENCODERS["ModernBertModel"].parse(config_of("modernbert", **own))
    assert config.windows == (0, 8, 0)
    assert [rope["rope_theta"] for rope in config.ropes if rope] == [7e4, 5e3, 7e4]
    gpt2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_inner": 96, "n_positions": 8192}
    own = gpt2 | {"activation_function": "swiglu", "layer_norm_epsilon": 1e-12}
    own |= {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "vocab_size": 320}
    config = ENCODERS["NomicBertModel"].parse(own)
    assert config == ENCODERS["NomicBertModel"].parse(
        config_of("nomic_bert", max_position_embeddings=8192)
    )
    scaled = ENCODERS["NomicBertModel"].parse(own | {"rotary_scaling_factor": 2.0})
    assert scaled.max_position_embeddings == 2048  # up to which nothing is scaled


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative"),
        ("bert", {"hidden_act": "mish"}, "hidden_act='mish' is not supported; supported: gelu"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("bert", {"num_attention_heads": 7}, "is not a multiple of num_attention_heads=7"),
        ("bert", {"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to"),
        ("bert", {"vocab_size": None}, "lacks vocab_size"),
        ("bert", {"layer_norm_eps": "small"}, "layer_norm_eps must be a number from 0 to 1"),
        ("roberta", {"max_position_embeddings": 2}, "must be more than 2, got 2"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "supported: 32"),
        ("distilbert", {"sinusoidal_pos_embds": True, "dim": None}, "sinusoidal_pos_embds=True"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "rope type dynamic is not supported for text encoders; supported: default, linear",
        ),
        ("nomic_bert", {"rope_parameters": [1]}, "rope_parameters must be objects, got"),
        ("modernbert", {"norm_bias": 1}, "norm_bias must be true or false"),
        ("modernbert", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is not supported"),
        ("modernbert", {"hidden_activation": "relu"}, "relu is not supported in a gated MLP"),
        ("modernbert", {"layer_types": ["full_attention"]}, "must be a list of 3 names"),
        ("nomic_bert", {"num_experts": 8}, "num_experts=8 is not supported"),
        ("nomic_bert", {"qkv_proj_bias": True}, "qkv_proj_bias=true is not supported"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction other than 1"),
        ("nomic_bert", {"prenorm": True}, "prenorm=True is not supported"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(kind, changes, message) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ENCODERS[FAMILIES[kind]].parse(config_of(kind, **changes))
