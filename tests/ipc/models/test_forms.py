"""What a checkpoint is for, by the name of its architecture."""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models import forms
from quire.ipc.models.forms import decoder_head, family_and_form, form_of, in_form, label_names


@pytest.mark.parametrize(
    ("name", "family", "form"),
    [
        ("Qwen3ForCausalLM", "Qwen3", forms.GENERATE),
        ("Qwen3Model", "Qwen3", forms.EMBED),
        ("BertForMaskedLM", "Bert", forms.EMBED),
        ("BertForSequenceClassification", "Bert", forms.CLASSIFY),
        ("BertForTokenClassification", "Bert", forms.CLASSIFY_TOKENS),
        ("GPT2LMHeadModel", "GPT2", forms.GENERATE),
        ("SomethingElse", "SomethingElse", forms.GENERATE),
    ],
)
def test_a_name_has_a_family_and_a_form(name, family, form):
    assert family_and_form(name) == (family, form)
    assert form_of({"architectures": [name]}) == form


def test_no_name_generates():
    for names in (None, [], "Qwen3Model", [1]):
        assert form_of({"architectures": names}) == forms.GENERATE


def test_a_form_is_changed_by_name():
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}
    assert in_form(config, forms.EMBED) == {**config, "architectures": ["Qwen3Model"]}
    converted = in_form(config, forms.CLASSIFY)
    assert converted["architectures"] == ["Qwen3ForSequenceClassification"]
    assert in_form(converted, forms.CLASSIFY) is converted


def test_labels_are_in_the_order_of_their_numbers():
    assert label_names({"id2label": {"1": "b", "0": "a"}}) == ("a", "b")
    assert label_names({"id2label": {i: str(i) for i in range(11)}})[10] == "10"
    assert label_names({"num_labels": 1}) == ("LABEL_0",)
    assert label_names({}) == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": {"1": "a"}}, "id2label must be an object of names by number"),
        ({"id2label": {"0": 3}}, "id2label"),
        ({"id2label": ["a"]}, "id2label"),
        ({"id2label": {}}, "id2label"),
        ({"num_labels": 0}, "num_labels must be an integer from 1"),
        ({"num_labels": True}, "num_labels"),
    ],
)
def test_labels_that_are_none_are_refused(config, message):
    with pytest.raises(ModelLoadError, match=message):
        label_names(config)


def test_a_decoder_has_a_head_where_it_classifies():
    config = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}
    (layer,) = decoder_head(config, 8)
    assert dict(layer.shapes()) == {"score.weight": [3, 8]}
    (layer,) = decoder_head({**config, "architectures": ["Qwen3ForTokenClassification"]}, 8)
    assert dict(layer.shapes()) == {"score.weight": [3, 8], "score.bias": [3]}
    assert decoder_head({**config, "score_token_ids": [1, 2]}, 8) == ()
    assert decoder_head({"architectures": ["Qwen3Model"]}, 8) == ()
