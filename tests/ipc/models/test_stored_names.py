"""The names under which a checkpoint has a model's tensors."""

from __future__ import annotations

import pytest
from quire.ipc.models.decoder_config import parse_decoder_config
from quire.ipc.models.encoders import ENCODERS
from quire.ipc.models.stored_names import in_checkpoint, is_ignored

NAMES = {"bert.embeddings.LayerNorm.weight": 1, "bert.encoder.layer.0.output.dense.bias": 2}


def test_a_checkpoint_of_the_base_model_lacks_the_prefix():
    bare = {name.removeprefix("bert."): value for name, value in NAMES.items()}
    assert in_checkpoint(NAMES, "bert.", bare) == bare
    assert in_checkpoint(NAMES, "bert.", NAMES) == NAMES
    assert in_checkpoint(NAMES, "", bare) == NAMES


def test_a_head_has_no_prefix():
    names = NAMES | {"classifier.weight": 3}
    assert in_checkpoint(names, "bert.", names) == names


def test_old_endings_are_read():
    stored = {"bert.embeddings.LayerNorm.gamma", "bert.encoder.layer.0.output.dense.bias"}
    assert set(in_checkpoint(NAMES, "bert.", stored)) == stored


@pytest.mark.parametrize(
    "name",
    [
        *("cls.predictions.bias", "pooler.dense.weight", "bert.pooler.dense.weight"),
        *("embeddings.position_ids", "bert.embeddings.position_ids", "lm_head.weight"),
        *("classifier.bias", "vocab_transform.weight", "head.norm.weight", "decoder.bias"),
    ],
)
def test_what_a_pooling_model_does_not_need_is_ignored(name):
    config = ENCODERS["BertModel"].parse(
        {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    )
    assert is_ignored(name, config)
    assert not is_ignored("bert.encoder.layer.0.output.dense.bias", config)
    assert not is_ignored("encoder.layer.7.attention.self.query.weight", config)


def test_a_generating_model_ignores_nothing():
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 8
    ) | {"num_attention_heads": 2, "max_position_embeddings": 64}
    for names, ignores in (["Qwen3ForCausalLM"], False), (["Qwen3Model"], True):
        config = parse_decoder_config({**sizes, "architectures": names})
        assert config.has_lm_head is not ignores
        assert is_ignored("lm_head.weight", config) is ignores
        assert not is_ignored("model.layers.0.mlp.up_proj.weight", config)
