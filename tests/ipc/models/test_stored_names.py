"""The names under which a checkpoint has a model's tensors."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from quire.ipc.models.decoder_config import parse_decoder_config
from quire.ipc.models.encoders import ENCODERS
from quire.ipc.models.stored_names import StoredNames, is_ignored

NAMES = ["bert.embeddings.LayerNorm.weight", "bert.encoder.layer.0.output.dense.bias"]


def in_checkpoint(names: Collection[str], base_prefix: str, stored: Collection[str]) -> list[str]:
    found = StoredNames(base_prefix, names, stored)
    return [found.of(name) for name in names]


def test_a_checkpoint_of_the_base_model_lacks_the_prefix():
    bare = [name.removeprefix("bert.") for name in NAMES]
    assert in_checkpoint(NAMES, "bert.", bare) == bare
    assert in_checkpoint(NAMES, "bert.", NAMES) == NAMES
    assert in_checkpoint(NAMES, "", bare) == NAMES


def test_a_head_has_no_prefix():
    names = [*NAMES, "classifier.weight"]
    assert in_checkpoint(names, "bert.", names) == names


def test_old_endings_are_read():
    stored = ["bert.embeddings.LayerNorm.gamma", "bert.encoder.layer.0.output.dense.bias"]
    assert in_checkpoint(NAMES, "bert.", stored) == stored
    wrapped = [f"module.{name.removeprefix('bert.')}" for name in stored]
    assert in_checkpoint(NAMES, "bert.", wrapped) == wrapped


DECODER = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
OF_TEXT_PART = [f"language_model.{name}" for name in DECODER]


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize(
    ("place", "head"),
    [
        ("model.", "lm_head."),
        ("", "lm_head."),
        ("language_model.", "lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
    ],
)
def test_a_decoder_may_lie_in_another_model(wrapper: str, place: str, head: str):
    """Of the model alone as of a multimodal model's text part, whichever way it was saved."""
    stored = [wrapper + place + name.removeprefix("model.") for name in DECODER[:2]]
    stored.append(f"{wrapper}{head}weight")
    others = [f"{wrapper}vision_tower.layers.0.weight", f"{wrapper}model.vision_tower.norm.weight"]
    for names, base in ((DECODER, "model."), (OF_TEXT_PART, "language_model.model.")):
        found = StoredNames(base, names, [*stored, *others])
        assert [found.of(name) for name in names] == stored
        assert [found.of(name) for name in names[1:]] == stored[1:]  # of a stage
        if place:
            assert [found.own(name) for name in stored[:2]] == names[:2]


def test_tensors_that_are_missing_have_the_names_of_the_others():
    found = StoredNames("model.", DECODER, ["module.layers.0.mlp.up_proj.weight"])
    assert found.of(DECODER[0]) == "module.embed_tokens.weight"
    assert found.of("lm_head.weight") == "module.lm_head.weight"
    assert StoredNames("model.", DECODER, []).of(DECODER[0]) == DECODER[0]


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
