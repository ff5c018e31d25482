"""Model directories of unknown origin: engine, plan and doctor each fail with one sentence. None of
them blocks or runs out of memory.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quire
from quire import EngineArgs, QuireError
from quire.frontend.diagnosis.model import check_model
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.model_info.plan import make_plan
from quire.frontend.text import tokenizer_trial
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.gguf_pre_tokenizers import PRE_TOKENIZERS
from quire.tests.tiny_models import save_tiny_model

Spoil = Callable[[Path], Any]
CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
DEEP = b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}"


def edit(file: str, **changes: Any) -> Spoil:
    def apply(model: Path) -> None:
        path = model / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def write(file: str, content: bytes) -> Spoil:
    return lambda model: (model / file).write_bytes(content)


def pipe(file: str) -> Spoil:
    def apply(model: Path) -> None:
        (model / file).unlink(missing_ok=True)
        os.mkfifo(model / file)

    return apply


def link(file: str, target: Path | None = None) -> Spoil:
    """Makes the file a link to `target`, or to a copy of itself outside the model's directory."""

    def apply(model: Path) -> None:
        path, outside = model / file, model.parent / "outside"
        path.parent.mkdir(exist_ok=True)
        if target is None:
            path.rename(outside)
        path.symlink_to(target or outside)

    return apply


def normalize(*steps: dict[str, Any], tokens: int = 1, content: str = "a" * 40) -> Spoil:
    """Gives the tokenizer these normalizers, and added tokens that they normalize at the load."""

    def apply(model: Path) -> None:
        path = model / "tokenizer.json"
        file = json.loads(path.read_text())
        flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip"), False)
        token = {"content": content, "normalized": True, **flags}
        file["added_tokens"] += [token | {"id": 9000 + i} for i in range(tokens)]
        file["normalizer"] = {"type": "Sequence", "normalizers": list(steps)}
        path.write_text(json.dumps(file))

    return apply


def split(regex: str) -> Spoil:
    """Gives the tokenizer a pre-tokenizer."""
    pattern = {"Regex": regex}
    return edit(
        "tokenizer.json",
        pre_tokenizer={
            "type": "Split",
            "pattern": pattern,
            "behavior": "Isolated",
            "invert": False,
        },
    )


def charsmap(trie_size: int, trie: bytes, texts: bytes) -> dict[str, Any]:
    table = base64.b64encode(trie_size.to_bytes(4, "little") + trie + texts).decode()
    return {"type": "Precompiled", "precompiled_charsmap": table}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


ENVIRONMENT = Path("/proc/self/environ")
CASES: dict[str, Spoil] = {
    "no heads": edit(CONFIG, num_attention_heads=0),
    "text for a size": edit(CONFIG, hidden_size="64"),
    "many layers": edit(CONFIG, num_hidden_layers=10**9),
    "large vocabulary": edit(CONFIG, vocab_size=2 * 10**9),
    "large layer": edit(CONFIG, intermediate_size=2 * 10**9),
    "large heads": edit(CONFIG, head_dim=2 * 10**9),
    "long context": edit(CONFIG, max_position_embeddings=2 * 10**9),
    "longer context": edit(CONFIG, max_position_embeddings=10**30),
    "no text": edit(CONFIG, comment="\ud800"),
    "rope of another shape": edit(CONFIG, rope_parameters=[1]),
    "layer types of another shape": edit(CONFIG, layer_types=[[1]] * 3),
    "nested config": write(CONFIG, DEEP),
    "nested header": write("model.safetensors", len(DEEP).to_bytes(8, "little") + DEEP),
    "nested tokenizer": write("tokenizer.json", DEEP),
    "pipe for config": pipe(CONFIG),
    "pipe for weights": pipe("model.safetensors"),
    "pipe for tokenizer": pipe("tokenizer.json"),
    "pipe for template": pipe("chat_template.jinja"),
    "template of another type": edit(TOKENIZER, chat_template=5),
    "templates of another shape": edit(TOKENIZER, chat_template=[{"name": 1, "template": 2}]),
    "tokens of another shape": edit(TOKENIZER, added_tokens_decoder={"9999": {"content": 5}}),
    "chained replacements": normalize(*[replace({"String": "a"}, "a" * 10)] * 9),
    "one long replacement": normalize(replace({"String": "a"}, "a" * 10**8)),
    "replacements of nothing": normalize(*[replace({"Regex": ""}, "a" * 9)] * 9),
    "nested normalizers": normalize(
        *[{"type": "Sequence", "normalizers": [replace({"String": "a"}, "aaa")] * 5}] * 5
    ),
    "many steps": normalize(*[{"type": "Prepend", "prepend": "a"}] * 40),
    "many normalizers": normalize(*[{"type": "NFC"}] * 10**5),
    "table without its trie": normalize(charsmap(2**31, b"\xff" * 16, b"a\0")),
    "table with a trie that points out of it": normalize(charsmap(16, b"\xff" * 16, b"a\0")),
    "table with a long text": normalize(charsmap(16, b"\0" * 16, b"a" * 10**6)),
    "expression that the library gives up": normalize(
        replace({"Regex": "(a+)+$"}, ""), content="a" * 60 + "b"
    ),
    "expression that cannot be compiled": split("(a"),
    "link for config": link(CONFIG),
    "link for weights": link("model.safetensors"),
    "link for tokenizer": link("tokenizer.json"),
    "link for settings of the tokenizer": link(TOKENIZER),
    "link for template": link("chat_template.jinja", ENVIRONMENT),
    "link for another template": link("additional_chat_templates/rag.jinja", ENVIRONMENT),
    "special token of another type": edit(TOKENIZER, eos_token=[1]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2")


@pytest.mark.timeout(60)  # opening a pipe would block forever
@pytest.mark.parametrize("case", CASES)
def test_engine_plan_and_doctor_fail_with_one_sentence(
    case: str, saved: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(saved, tmp_path / "model")
    CASES[case](model)
    args = EngineArgs(str(model), kv_cache_memory_bytes=2**22)
    with pytest.raises(QuireError) as refused:
        LLMEngine.from_engine_args(args, engine="inproc").shutdown()
    sentences = [str(refused.value)]
    try:
        make_plan(args)
    except QuireError as error:  # a plan reads only config.json
        sentences.append(str(error))
    failures = [finding.detail for finding in check_model(args) if finding.status == "fail"]
    assert failures
    for sentence in sentences + failures:
        assert "\n" not in sentence and len(sentence) < 600, sentence


COSTLY: dict[str, Spoil] = {
    "to compile": split(
        "".join(rf"(?<n{i}>a|\g<n{i + 1}>\g<n{i + 1}>)" for i in range(60)) + "(?<n60>a)"
    ),
    "for an added token": normalize(
        replace({"Regex": "(?:a|aa)+[^a]z"}, ""), content=("a" * 26 + "b") * 10**4
    ),
    "for a text": split("(?:a|aa){1,19}[^a]z|a"),
    "of an unknown form": edit(
        "tokenizer.json",
        normalizer={"pattern": {"Regex": "(?:a|aa)+[^a]z"}, "content": ""},
        added_tokens=[
            {"id": 9000, "content": ("a" * 26 + "b") * 10**4, "normalized": True}
            | dict.fromkeys(("special", "single_word", "lstrip", "rstrip"), False)
        ],
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", COSTLY)
def test_costly_regular_expressions_end_within_a_limit(
    case: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_trial, "CPU_LIMIT_S", 1)
    model = shutil.copytree(saved, tmp_path / "model")
    COSTLY[case](model)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: .* took more than 1 s or 2\.0 GiB"):
        Tokenizer(model)


def test_known_regular_expressions_need_no_process(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    monkeypatch.setattr(tokenizer_trial, "try_out", lambda path, contents: tried.append(path))
    Tokenizer(Path(quire.__file__).parent / "frontend" / "bundled_model")
    model = shutil.copytree(saved, tmp_path / "model")
    for name in ("qwen2", "llama-bpe", "gpt-4o", "deepseek-v3"):
        steps = {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[name].steps)}
        edit("tokenizer.json", pre_tokenizer=steps)(model)
        Tokenizer(model)
    assert tried == []
    split("[a-z]+|.")(model)
    Tokenizer(model)
    assert tried == [model / "tokenizer.json"]


def test_another_regular_expression_is_tried_out_and_used(saved: Path, tmp_path: Path) -> None:
    model = shutil.copytree(saved, tmp_path / "model")
    split("[a-z]+|.")(model)
    assert Tokenizer(model).encode("abc") == Tokenizer(saved).encode("abc")


@pytest.mark.timeout(60)
def test_a_pipe_that_is_not_needed_is_not_opened(saved: Path, tmp_path: Path) -> None:
    model = shutil.copytree(saved, tmp_path / "model")
    pipe("another.safetensors")(model)
    args = EngineArgs(str(model), kv_cache_memory_bytes=2**22)
    LLMEngine.from_engine_args(args, engine="inproc").shutdown()
    assert [finding for finding in check_model(args) if finding.status == "fail"] == []


def test_links_within_the_directory_and_into_the_cache_of_the_hub_are_followed(
    saved: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(saved, tmp_path / "model")
    (model / "tokenizer.json").rename(model / "own.json")
    (model / "tokenizer.json").symlink_to("own.json")
    blobs = tmp_path / "models--someone--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (model / "model.safetensors").rename(blobs / "1234")
    (model / "model.safetensors").symlink_to(blobs / "1234")
    (tmp_path / "named").symlink_to(model)  # what the user names may be a link
    args = EngineArgs(str(tmp_path / "named"), kv_cache_memory_bytes=2**22)
    LLMEngine.from_engine_args(args, engine="inproc").shutdown()
    assert [finding for finding in check_model(args) if finding.status == "fail"] == []
