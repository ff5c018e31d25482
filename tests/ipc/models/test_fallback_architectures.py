"""Which implementation a model gets, and what is read from config.json without torch.

The tables are compared with the installed transformers.
"""

from __future__ import annotations

import pytest
from packaging.version import Version
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import NATIVE
from quire.ipc.models.encoders import FALLBACK_ENCODERS
from quire.ipc.models.fallback_architectures import (
    FALLBACKS,
    REFUSED,
    choose_implementation,
    parse_fallback_config,
)

NEWEST = (5, 24)  # of transformers, whose types are all in the tables
SHAPE = {
    "vocab_size": 100,
    "hidden_size": 480 * 16,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 480,  # a multiple of every default number of KV heads
    "max_position_embeddings": 256,
}
MODEL = {**SHAPE, "architectures": ["GemmaForCausalLM"], "model_type": "gemma"}


def test_quires_own_page_comes_first() -> None:
    config = {**SHAPE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    assert choose_implementation(config, "auto") == ("quire", "Qwen2ForCausalLM")
    assert choose_implementation(config, "quire") == ("quire", "Qwen2ForCausalLM")
    assert choose_implementation(config, "transformers") == ("transformers", "qwen2")


@pytest.mark.parametrize("name", ["ExaoneForCausalLM", "LlamaForCausalLM"])
def test_a_type_with_another_ones_layers_is_read_by_transformers(name: str) -> None:
    """Checkpoints name the class of their own code, those of transformers 5 the Llama's."""
    config = {**SHAPE, "architectures": [name], "model_type": "exaone"}
    assert choose_implementation(config, "auto") == ("transformers", "exaone")


def test_other_architectures_run_through_transformers() -> None:
    assert choose_implementation(MODEL, "auto") == ("transformers", "gemma")
    with pytest.raises(
        ModelLoadError, match="GemmaForCausalLM is not supported; supported: .*Qwen"
    ):
        choose_implementation(MODEL, "quire")


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_name_with_the_reason(model_type: str) -> None:
    if model_type in FALLBACK_ENCODERS:
        return  # as an encoder it runs
    has_page = any(page.model_type == model_type for page in NATIVE.values())
    for impl in ("transformers",) if has_page else ("auto", "transformers"):
        with pytest.raises(ModelLoadError) as refusal:
            choose_implementation({"model_type": model_type}, impl)
        assert str(refusal.value) == (
            f"model_type {model_type} is not supported: {REFUSED[model_type]}"
        )


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "unheard_of"},
        {"model_type": ["gemma"]},
        {"model_type": "gemma", "architectures": ["GemmaForSequenceClassification"]},
        {},
    ],
    ids=str,
)
def test_unknown_ones_are_refused_with_a_list(config: dict) -> None:
    with pytest.raises(ModelLoadError, match=r"^[^\n]{,2000}docs/models.md lists"):
        choose_implementation(config, "auto")


def test_every_causal_model_of_transformers_is_in_one_table() -> None:
    version = pytest.importorskip("transformers").__version__
    if Version(version).release[:2] > NEWEST:
        pytest.skip(f"transformers {version} may have types that the tables do not know yet")
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    known = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert FALLBACKS.keys().isdisjoint(REFUSED)
    assert known.keys() - FALLBACKS.keys() - REFUSED.keys() == set()
    for model_type, fallback in FALLBACKS.items():
        names = known[model_type]
        assert fallback.architecture in ([names] if isinstance(names, str) else names)


@pytest.mark.parametrize("model_type", FALLBACKS)
def test_sizes_are_those_that_transformers_reads(model_type: str) -> None:
    """With as few keys as possible, so that defaults count, and with all of them."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    keys = FALLBACKS[model_type].keys
    few = {keys.get(name, name): value for name, value in SHAPE.items()}
    theirs = auto.CONFIG_MAPPING[model_type](**few)
    for hf_config in (few, theirs.to_dict()):
        mine = parse_fallback_config({**hf_config, "model_type": model_type})
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            assert getattr(mine, name) == getattr(theirs, name)
        heads = getattr(theirs, "num_key_value_heads", None)
        if heads is not None and "num_key_value_heads" not in keys:
            assert mine.num_key_value_heads == heads
        head_dim = getattr(theirs, "head_dim", None) or 16
        assert mine.head_dim == head_dim


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer from 1 to 1,024"),
        ({"vocab_size": "many"}, "vocab_size must be an integer from 1"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(change: dict, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        parse_fallback_config({**MODEL, **change})
