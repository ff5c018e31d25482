"""What a model does, and how it pools, from its files and what the user changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.models.pooling import STORED_POOLING, PoolerConfig, Pooling
from quire.ipc.models.resolve_pooling import check_dimensions, positions_of, resolve_pooling
from quire.tests.ipc.models.test_sentence_transformers import MINILM, NORMALIZE, chain, write

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
NOWHERE = Path("/there is none")


def config(name: str, **changes):
    return {**SIZES, "architectures": [name], **changes}


def resolve(name: str, directory: Path = NOWHERE, *args, changes=None, **named):
    return resolve_pooling(directory, config(name, **(changes or {})), *args, **named)


def test_a_decoder_generates_and_pools_its_last_token():
    resolved = resolve("Qwen3ForCausalLM")
    assert resolved[:3] == ("generate", "none", Pooling(modes=("lasttoken",), embedding_size=64))
    assert resolved.hf_config == config("Qwen3ForCausalLM")
    assert not resolved.pooling.reads_all_tokens


def test_a_decoder_is_made_an_embedding_model():
    resolved = resolve("Qwen3ForCausalLM", NOWHERE, "pooling")
    assert (resolved.runner, resolved.convert) == ("pooling", "embed")
    assert resolved.hf_config["architectures"] == ["Qwen3Model"]
    assert resolve("Qwen3Model").runner == "pooling"
    assert resolve("Qwen3ForCausalLM", convert="embed").hf_config == resolved.hf_config


def test_a_model_with_modules_pools(tmp_path):
    write(tmp_path, chain(MINILM, NORMALIZE), sentence_bert_config={"max_seq_length": 256})
    resolved = resolve("BertModel", tmp_path)
    assert (resolved.runner, resolved.convert) == ("pooling", "none")
    pooling = resolved.pooling
    assert (pooling.modes, pooling.activation) == (("mean",), "normalize")
    assert pooling.is_bidirectional and pooling.has_token_types and pooling.max_seq_length == 256
    (tmp_path / "sentence_bert_config.json").unlink()
    last = write(tmp_path, chain({"pooling_mode": "lasttoken"}, NORMALIZE))
    resolved = resolve("Qwen3ForCausalLM", last)
    assert (resolved.runner, resolved.pooling) == (
        "pooling",
        Pooling(modes=("lasttoken",), embedding_size=64),
    )
    assert resolve("Qwen3ForCausalLM", last, "generate").runner == "generate"


def test_a_gguf_file_names_its_pooling():
    for number, mode in ((1, "mean"), (2, "cls"), (3, "lasttoken")):
        resolved = resolve("Qwen3ForCausalLM", changes={STORED_POOLING: number})
        assert (resolved.runner, resolved.pooling.modes) == ("pooling", (mode,))
    assert resolve("Qwen3ForCausalLM", changes={STORED_POOLING: 0}).runner == "generate"
    for number in (4, -1, [3]):  # 4 is a reranker's
        with pytest.raises(ModelLoadError, match=r"pooling_type=.* is not supported; supported: 0"):
            resolve("Qwen3ForCausalLM", changes={STORED_POOLING: number})


def test_an_encoder_without_files_has_the_mean():
    for name, has_types in (("BertModel", True), ("RobertaForMaskedLM", False)):
        resolved = resolve(name)
        assert resolved.runner == "pooling" and resolved.pooling.modes == ("mean",)
        assert resolved.pooling.has_token_types is has_types
    assert positions_of(config("RobertaModel")) == 510
    assert positions_of(config("BertModel")) == 512
    assert positions_of(config("Qwen3Model")) is None


@pytest.mark.parametrize(
    ("name", "changes", "modes", "activation", "num_labels"),
    [
        ("Qwen3ForSequenceClassification", {"num_labels": 1}, ("lasttoken",), "sigmoid", 1),
        ("BertForSequenceClassification", {}, ("cls",), "softmax", 2),
        ("BertForSequenceClassification", {"problem_type": "regression"}, ("cls",), "identity", 2),
        (
            "BertForSequenceClassification",
            {"problem_type": "multi_label_classification", "num_labels": 3},
            ("cls",),
            "sigmoid",
            3,
        ),
        (
            "BertForSequenceClassification",
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Identity"},
            ("cls",),
            "identity",
            1,
        ),
        (
            "RobertaForSequenceClassification",
            {
                "num_labels": 2,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
            },
            ("cls",),
            "sigmoid",
            2,
        ),
        (
            "ModernBertForSequenceClassification",
            {"classifier_pooling": "mean"},
            ("mean",),
            "softmax",
            2,
        ),
        ("ModernBertForSequenceClassification", {}, ("cls",), "softmax", 2),
    ],
)
def test_a_classifier(name, changes, modes, activation, num_labels):
    resolved = resolve(name, changes=changes)
    pooling = resolved.pooling
    assert (resolved.runner, resolved.convert, pooling.tasks) == ("pooling", "none", ("classify",))
    assert (pooling.modes, pooling.activation, pooling.num_labels) == (
        modes,
        activation,
        num_labels,
    )
    assert len(pooling.labels) == num_labels


def test_a_classifier_of_tokens():
    pooling = resolve("BertForTokenClassification", changes={"id2label": {"0": "O"}}).pooling
    assert (pooling.tasks, pooling.labels) == (("token_classify",), ("O",))


def test_a_user_changes_how_it_pools():
    wanted = PoolerConfig(pooling_type="MEAN", use_activation=False, dimensions=8)
    changes = {"is_matryoshka": True}
    pooling = resolve("Qwen3Model", config=wanted, changes=changes).pooling
    assert (pooling.modes, pooling.activation, pooling.dimensions) == (("mean",), "identity", 8)
    assert pooling.reads_all_tokens
    wanted = PoolerConfig(seq_pooling_type="LAST", logit_mean=1.5, logit_sigma=2.0)
    pooling = resolve("BertForSequenceClassification", config=wanted).pooling
    assert (pooling.modes, pooling.logit_mean, pooling.logit_sigma) == (("lasttoken",), 1.5, 2.0)


def test_a_user_chooses_the_task():
    pooling = resolve("BertModel", config=PoolerConfig(task="token_embed")).pooling
    assert pooling.tasks == ("token_embed", "embed")
    with pytest.raises(InvalidParameterError, match="task must be one of embed, token_embed for"):
        resolve("BertModel", config=PoolerConfig(task="classify"))


def test_only_matryoshka_models_have_shorter_embeddings():
    check_dimensions(8, Pooling(is_matryoshka=True))
    check_dimensions(16, Pooling(matryoshka_dimensions=(16, 32)))
    with pytest.raises(InvalidParameterError, match="dimensions: must be one of 16, 32, got 8"):
        check_dimensions(8, Pooling(matryoshka_dimensions=(16, 32)))
    with pytest.raises(InvalidParameterError, match="dimensions: must be left out"):
        resolve("BertModel", config=PoolerConfig(dimensions=8))


def tokenizer(directory: Path, vocab) -> Path:
    file = {"model": {"vocab": vocab}, "added_tokens": [{"id": 9, "content": "<yes>"}]}
    (directory / "tokenizer.json").write_text(json.dumps(file))
    return directory


RERANKER = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}


def test_a_score_is_made_of_two_tokens(tmp_path):
    name = "Qwen3ForSequenceClassification"
    directory = tokenizer(tmp_path, {"no": 5, "yes": 3, "Yes": 4})
    for changes in (RERANKER, {**RERANKER, "is_original_qwen3_reranker": False}):
        changes = {"method": "from_2_way_softmax", **changes}
        resolved = resolve(name, directory, changes=changes)
        assert resolved.hf_config["score_token_ids"] == [5, 3]
        assert resolved.pooling.num_labels == 1 and resolved.pooling.activation == "sigmoid"
    one = {"classifier_from_token": ["<yes>"], "method": "no_post_processing"}
    resolved = resolve(name, tokenizer(tmp_path, [["no", 0.0], ["yes", -1.0]]), changes=one)
    assert resolved.hf_config["score_token_ids"] == [9]
    for wrong, message in (
        ({"classifier_from_token": ["yes"]}, "must be a list of 2 tokens"),
        ({"classifier_from_token": ["no", "Ja"]}, "the tokenizer has no token 'Ja'"),
        ({"classifier_from_token": "no"}, "must be a list of 2 tokens"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            resolve(name, directory, changes={**RERANKER, **wrong})


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("BertModel", ("generate",), "runner: must be pooling: the model generates no text"),
        ("Qwen3ForCausalLM", ("generate", "embed"), "convert: must be none with runner=generate"),
        ("Qwen3ForCausalLM", ("pooling", "none"), "convert: must be embed or classify"),
        ("GPT2LMHeadModel", ("pooling", "classify"), "convert: classify is not supported for"),
    ],
)
def test_what_a_model_cannot_do_is_refused(name, args, message):
    with pytest.raises(InvalidParameterError, match=message):
        resolve(name, NOWHERE, *args)


def test_a_decoder_whose_tokens_see_all_only_pools():
    changes = {"is_causal": False}
    resolved = resolve("Qwen2ForCausalLM", changes=changes)
    assert resolved.runner == "pooling" and resolved.pooling.is_bidirectional
    assert resolved.pooling.modes == ("mean",)
    with pytest.raises(InvalidParameterError, match="runner: must be pooling"):
        resolve("Qwen2ForCausalLM", NOWHERE, "generate", changes=changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem_type": "ranking"}, "problem_type='ranking' is not supported"),
        ({"sbert_ce_default_activation_function": "os.system"}, "activation 'os.system'"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}},
            "activation 'torch.nn.ReLU' is not supported",
        ),
    ],
)
def test_activations_that_are_unknown_are_refused(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        resolve("BertForSequenceClassification", changes=changes)
