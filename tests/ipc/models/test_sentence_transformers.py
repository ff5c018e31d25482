"""Directories as sentence-transformers writes them, in its older and its newer form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.pooling import Dense, Pooling
from quire.ipc.models.sentence_transformers import has_modules, read_modules

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules."


def write(directory: Path, modules: list[tuple[str, str, Any]], /, **files: Any) -> Path:
    """modules: type, folder and config; files: by name without .json"""
    listed = []
    for index, (kind, folder, config) in enumerate(modules):
        listed.append({"idx": index, "name": str(index), "path": folder, "type": kind})
        if config is not None:
            (directory / folder).mkdir(exist_ok=True)
            (directory / folder / "config.json").write_text(json.dumps(config))
    for name, value in {"modules": listed, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def chain(pooling: Any, *others: tuple[str, str, Any], prefix: str = OLD):
    return [
        (f"{prefix}Transformer", "", None),
        (f"{prefix}Pooling", "1_Pooling", pooling),
        *others,
    ]


MINILM = {  # as all-MiniLM-L6-v2 has it
    "word_embedding_dimension": 384,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}
NORMALIZE = (f"{OLD}Normalize", "2_Normalize", None)


def test_flags_and_a_mode_by_name_are_read(tmp_path):
    assert not has_modules(tmp_path)
    directory = write(tmp_path, chain(MINILM, NORMALIZE))
    assert has_modules(directory)
    expected = Pooling(modes=("mean",), activation="normalize")
    assert read_modules(directory, {}) == expected
    new = {"embedding_dimension": 384, "pooling_mode": "mean", "include_prompt": True}
    kind = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    modules = [
        (f"{NEW}transformer.Transformer", "", None),
        (kind, "1_Pooling", new),
        (f"{NEW}normalize.Normalize", "2_Normalize", {"module_input_name": "sentence_embedding"}),
    ]
    assert read_modules(write(tmp_path, modules), {}) == expected


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["cls", "max"]}, ("cls", "max")),
        ({**MINILM, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weightedmean",)),
        ({"pooling_mode": "mean", "pooling_mode_cls_token": True}, ("mean",)),
        ({}, ("mean",)),
    ],
)
def test_modes(tmp_path, config, modes):
    read = read_modules(write(tmp_path, chain(config)), {})
    assert read.modes == modes and read.activation == "identity" and read.include_prompt


def test_dense_modules_prompts_and_limits_are_read(tmp_path):
    dense = {
        "in_features": 64,
        "out_features": 128,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    tanh = {"in_features": 128, "out_features": 32, "bias": True}
    others = (f"{OLD}Dense", "2_Dense", dense), (f"{OLD}Dense", "3_Dense", tanh), NORMALIZE
    directory = write(
        tmp_path,
        chain({"pooling_mode": "mean", "include_prompt": False}, *others),
        config_sentence_transformers={
            "prompts": {"query": "query: ", "document": ""},
            "default_prompt_name": "document",
            "similarity_fn_name": "dot",
        },
        sentence_bert_config={"max_seq_length": 128, "do_lower_case": True},
        tokenizer_config={"model_max_length": 512},
    )
    read = read_modules(directory, {"matryoshka_dimensions": [32, 16]})
    assert read == Pooling(
        modes=("mean",),
        include_prompt=False,
        dense=(
            Dense(
                folder="2_Dense",
                in_features=64,
                out_features=128,
                has_bias=False,
                activation="identity",
            ),
            Dense(folder="3_Dense", in_features=128, out_features=32),
        ),
        activation="normalize",
        matryoshka_dimensions=(16, 32),
        prompts={"query": "query: ", "document": ""},
        default_prompt_name="document",
        similarity="dot",
        max_seq_length=128,
        do_lower_case=True,
    )


@pytest.mark.parametrize(("limit", "length"), [(512, 512), (1e30, None), (None, None)])
def test_without_max_seq_length_the_tokenizers_limit_counts(tmp_path, limit, length):
    directory = write(tmp_path, chain(MINILM), tokenizer_config={"model_max_length": limit})
    assert read_modules(directory, {}).max_seq_length == length


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        ([], {}, "there is no module Pooling"),
        (chain(MINILM)[:1], {}, "there is no module Pooling"),
        (
            chain(MINILM, (f"{OLD}CNN", "2_CNN", {})),
            {},
            "module CNN is not supported; supported: T",
        ),
        (chain(MINILM, ("my_code.Dense", "2", {})), {}, "my_code.Dense is not one of sentence_tr"),
        (chain(MINILM, NORMALIZE, NORMALIZE), {}, "module Normalize behind Normalize"),
        (chain(MINILM)[1:], {}, "module Pooling behind nothing is not supported"),
        (
            [(f"{OLD}Transformer", "0_Transformer", None)],
            {},
            "Transformer in folder '0_Transformer",
        ),
        (chain({"pooling_mode": "median"}), {}, "must be one or several of cls, mean, max"),
        (chain({"pooling_mode": []}), {}, "pooling_mode must be one or several"),
        (chain({"pooling_mode_attention": True}), {}, "pooling_mode_attention is not supported"),
        (chain({"pooling_mode_cls_token": False}), {}, "pooling_mode must be one or several"),
        (chain({"include_prompt": 1}), {}, "include_prompt must be true or false"),
        (chain(MINILM, (f"{OLD}Dense", "2", {"in_features": 0})), {}, "in_features and out_f"),
        (
            chain(MINILM, (f"{OLD}Dense", "../2", None)),
            {},
            "'../2' is not a folder of the model",
        ),
        (
            chain(MINILM, (f"{OLD}Dense", "2", {"use_residual": True})),
            {},
            "use_residual=True is not supported",
        ),
        (
            chain(
                MINILM,
                (
                    f"{OLD}Dense",
                    "2",
                    {"in_features": 1, "out_features": 1, "activation_function": "os.system"},
                ),
            ),
            {},
            "activation 'os.system' is not supported; supported: torch.nn's Identity",
        ),
        (chain(MINILM), {"config_sentence_transformers": {"prompts": {"a": 1}}}, "prompts must be"),
        (
            chain(MINILM),
            {"config_sentence_transformers": {"default_prompt_name": "q"}},
            "default_prompt_name='q' is not one of prompts",
        ),
        (
            chain(MINILM),
            {"config_sentence_transformers": {"similarity_fn_name": "euclidean"}},
            "similarity_fn_name='euclidean' is not supported; supported: cosine, dot",
        ),
        (chain(MINILM), {"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length must be"),
        (chain(MINILM), {"modules": {"a": 1}}, "must hold a JSON list, not a dict"),
        (chain(MINILM), {"modules": ["a"]}, "a module must have a type and a path"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, modules, files, message):
    with pytest.raises(ModelLoadError, match=message):
        read_modules(write(tmp_path, modules, **files), {})


def test_lengths_of_embeddings_are_checked(tmp_path):
    directory = write(tmp_path, chain(MINILM))
    assert read_modules(directory, {"is_matryoshka": True}).is_matryoshka
    with pytest.raises(ModelLoadError, match="matryoshka_dimensions must be a list of positive"):
        read_modules(directory, {"matryoshka_dimensions": [0]})
