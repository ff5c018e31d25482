"""How a model is located, and its files read or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from quire import ModelLoadError, SamplingParams
from quire.frontend.model_info import model_files
from quire.frontend.model_info.model_files import (
    default_sampling_arguments,
    eos_token_ids,
    find_model_directory,
    read_generation_config,
    read_hf_config,
)
from quire.frontend.model_info.model_pull import find_wanted
from quire.frontend.session import default_sampling_params
from quire.ipc.config import ModelConfig
from quire.tests.gguf_files import write_gguf


def test_bundled_and_local_directories(tmp_path, monkeypatch) -> None:
    assert (
        find_model_directory("bundled") == Path(model_files.__file__).parents[1] / "bundled_model"
    )
    assert find_model_directory(str(tmp_path)) == tmp_path.resolve()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    # a directory wins over a name on the hub
    assert find_model_directory("mine") == tmp_path.resolve() / "mine"


@pytest.mark.parametrize(
    "model", ["/nowhere/model", "./model", "~/no-such-model", "a/b/c", "model/"]
)
def test_a_missing_path_never_contacts_the_hub(model, monkeypatch) -> None:
    monkeypatch.setattr(model_files, "_download", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(
        ModelLoadError, match=f"model {re.escape(repr(model))}: there is no such directory"
    ):
        find_model_directory(model)


@pytest.mark.parametrize("find", [find_model_directory, find_wanted])
@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf.co/org/model:Q4_K_M", "org/model:Q4_K_M"),
        ("https://huggingface.co/org/model", "org/model"),
        ("https://huggingface.co/org/model/tree/main", "org/model"),
        ("http://www.hf.co/org/model/resolve/main/file.gguf", "org/model/file.gguf"),
    ],
)
def test_the_address_of_a_model_on_the_hub_is_refused_with_its_name(find, address, name) -> None:
    with pytest.raises(ModelLoadError, match=rf"give the name without .*co/: '{name}'$"):
        find(address)


def test_a_file_is_a_model_if_it_is_gguf(tmp_path) -> None:
    for name in ("model.bin", "model.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match="is a file; a model is a GGUF file"):
        find_model_directory(str(tmp_path / "model.bin"))
    assert find_model_directory(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    assert find_model_directory(str(tmp_path)) == tmp_path / "model.gguf"
    with pytest.raises(ModelLoadError, match="there is no such file"):
        find_model_directory(str(tmp_path / "other.gguf"))


def test_a_gguf_file_describes_itself(tmp_path) -> None:
    """What lies beside it replaces its generation defaults."""
    metadata = {"general.architecture": "llama", "tokenizer.ggml.eos_token_id": 7}
    path = write_gguf(tmp_path / "m.gguf", metadata | {"llama.block_count": 3})
    config = read_hf_config(path, {"num_hidden_layers": 2})
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    assert read_generation_config(path) == {"eos_token_id": [7]}
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    assert read_generation_config(path) == {"top_k": 3}


def test_hub_names_are_downloaded_with_only_the_files_needed(tmp_path, monkeypatch) -> None:
    import huggingface_hub

    asked = []

    def download(model, *, revision, cache_dir, allow_patterns, ignore_patterns):
        asked.append((model, revision, cache_dir, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "config.json").touch()
    assert find_model_directory("org/model", revision="v1") == tmp_path.resolve()
    find_model_directory("org/model", weights=False, download_dir="here")
    assert [(m, r, d, "*.safetensors" in p) for m, r, d, p in asked] == [
        ("org/model", "v1", None, True),
        ("org/model", None, "here", False),
    ]


def test_without_a_network_the_error_names_the_model_in_one_line(monkeypatch) -> None:
    import huggingface_hub

    def download(*_, **__):
        raise ConnectionError("Got: Name or service not known\nmore\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError) as raised:
        find_model_directory("org/model")
    assert (
        str(raised.value)
        == "model 'org/model': there is no such directory, and the hub did not provide it: Name or "
        "service not known"
    )


def test_config_with_overrides(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": 1, "rope_parameters": {"x": 1, "y": 2}}))
    assert read_hf_config(tmp_path, {"a": 2, "b": 3, "rope_parameters": {"y": 5}}) == {
        "a": 2,
        "b": 3,
        "rope_parameters": {"x": 1, "y": 5},
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "has no config.json"),
        (b"{", r"config\.json cannot be read"),
        (b"\xff\xfe", r"config\.json cannot be read"),
        (b"[" * 200_000, r"config\.json is nested too deeply"),
        (b"[1]", r"config\.json must hold a JSON object, not a list"),
    ],
)
def test_bad_config_files_are_named(tmp_path, content, problem) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=problem):
        read_hf_config(tmp_path, {})


def test_generation_config(tmp_path) -> None:
    assert read_generation_config(tmp_path) == {}
    given = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 99,
        "do_sample": True,
        "repetition_penalty": 1.1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    arguments = default_sampling_arguments(read_generation_config(tmp_path))
    assert arguments == {
        "temperature": 0.6,
        "top_k": 20,
        "max_tokens": 99,
        "repetition_penalty": 1.1,
    }


CHAT = {"general.architecture": "llama", "tokenizer.chat_template": "{{ messages }}"}


@pytest.mark.parametrize(
    ("metadata", "beside", "expected"),
    [
        (CHAT, {}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
        # what the model's author recommends stands alone
        (CHAT | {"general.sampling.top_k": 20}, {}, {"top_k": 20}),
        (CHAT, {"top_p": 0.5}, {"top_p": 0.5}),
        # a base model samples from what it has learned
        ({"general.architecture": "llama"}, {}, {}),
    ],
)
def test_a_gguf_file_that_recommends_no_sampling_has_usual_defaults(
    metadata: dict, beside: dict, expected: dict, tmp_path: Path, caplog
) -> None:
    path = write_gguf(tmp_path / "model.gguf", metadata)
    if beside:
        (tmp_path / "generation_config.json").write_text(json.dumps(beside))

    def defaults(**settings) -> SamplingParams:
        return default_sampling_params(ModelConfig(model=str(path), **settings))

    with caplog.at_level("INFO"):
        assert defaults() == SamplingParams(**expected)
    is_usual = len(expected) == 3
    line = "temperature=0.8, top_k=40, top_p=0.95; the GGUF file names none"
    assert (line in caplog.text) == is_usual
    assert defaults(generation_config="none") == SamplingParams()
    overridden = defaults(override_generation_config={"temperature": 0.1})
    assert overridden == SamplingParams(**expected | {"temperature": 0.1})


def test_eos_token_ids() -> None:
    assert eos_token_ids({}, {}) == []
    assert eos_token_ids({}, {"eos_token_id": 5}) == [5]
    assert eos_token_ids({"eos_token_id": [1, 2]}, {"eos_token_id": 5}) == [1, 2]
    assert eos_token_ids({"eos_token_id": None}, {"eos_token_id": [5]}) == [5]
    assert eos_token_ids({"eos_token_id": 0}, {"eos_token_id": 5}) == [0]
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        eos_token_ids({"eos_token_id": "</s>"}, {})


def test_folders_of_modules_are_downloaded_and_other_forms_are_not() -> None:
    from huggingface_hub.utils import filter_repo_objects
    from quire.frontend.model_info.model_files import (
        CONFIG_PATTERNS,
        NOT_NEEDED,
        WEIGHT_PATTERNS,
    )

    needed = ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = ["onnx/config.json", "original/model.safetensors", "consolidated.safetensors"]
    patterns = CONFIG_PATTERNS + WEIGHT_PATTERNS
    found = filter_repo_objects(
        [*needed, *others], allow_patterns=patterns, ignore_patterns=NOT_NEEDED
    )
    assert list(found) == needed
