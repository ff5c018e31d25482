"""The tokenizer against transformers' AutoTokenizer on the same files."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quire import InvalidParameterError, ModelLoadError
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.frontend.tiny_tokenizers import TEXTS, tiny_tokenizer, tiny_tokenizer_directory
from quire.tests.gguf_files import write_gguf

BUNDLED = find_model_directory("bundled")
SPECIAL = "<|im_start|>user\nhi<|im_end|></s><s>"


def directories() -> dict[str, Path]:
    found = {
        kind: tiny_tokenizer_directory(kind)
        for kind in ("byte_level", "byte_fallback_strip", "word_piece")
    }
    return found | ({"bundled": BUNDLED} if (BUNDLED / "tokenizer.json").exists() else {})


@pytest.fixture(params=["byte_level", "byte_fallback_strip", "word_piece", "bundled"])
def directory(request) -> Path:
    if request.param not in directories():
        pytest.skip("the bundled model has no tokenizer yet")
    return directories()[request.param]


def changed_copy(tmp_path: Path, kind: str = "byte_level", **config) -> Path:
    """Copy a tiny tokenizer with changed keys in tokenizer_config.json."""
    shutil.copytree(tiny_tokenizer_directory(kind), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return tmp_path


def oracle(directory: Path):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


def assert_equal(ours: Tokenizer, original) -> None:
    rng = random.Random(0)
    texts = [
        *TEXTS,
        SPECIAL,
        "",
        *("".join(rng.choices("abc ▁é好🤖\n<|>", k=20)) for _ in range(20)),
    ]
    for text in texts:
        assert ours.encode(text) == original.encode(text)
        assert ours.encode(text, add_special_tokens=False) == original.encode(
            text, add_special_tokens=False
        )
    assert ours.encode_batch(texts) == original(texts)["input_ids"]
    for _ in range(50):
        ids = [rng.randrange(len(original)) for _ in range(10)]
        for skip in (True, False):
            assert ours.decode(ids, skip) == original.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert (ours.bos_token_id, ours.eos_token_id) == (original.bos_token_id, original.eos_token_id)
    assert (ours.bos_token, ours.eos_token) == (original.bos_token, original.eos_token)
    assert ours.vocab_size == len(ours) == len(original)
    assert ours.special_ids == set(original.all_special_ids) | {
        i for i, t in original.added_tokens_decoder.items() if t.special
    }


def test_same_as_transformers(directory) -> None:
    assert_equal(Tokenizer(directory), oracle(directory))


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback_strip"])
def test_special_tokens_around_a_prompt_as_in_transformers(
    tmp_path, kind, add_bos, add_eos
) -> None:
    flags = {
        key: value
        for key, value in (("add_bos_token", add_bos), ("add_eos_token", add_eos))
        if value is not None
    }
    bos = {"bos_token": "<|im_start|>"} if kind == "byte_level" else {}
    directory = changed_copy(tmp_path, kind, **flags, **bos)
    assert_equal(Tokenizer(directory), oracle(directory))


def test_tokens_only_in_the_config_as_in_transformers(tmp_path) -> None:
    described = {
        "303": {"content": "<tool>", "special": True, "normalized": False},
        "304": {"content": "<plain>", "special": False, "lstrip": True, "normalized": False},
    }
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    pad = {"__type": "AddedToken", "content": "<pad>", "special": True, **flags}
    directory = changed_copy(
        tmp_path,
        added_tokens_decoder=described,
        pad_token=pad,
        additional_special_tokens=["<extra>"],
    )
    ours, original = Tokenizer(directory), oracle(directory)
    for text in ("a <tool> b <plain> c", "<pad><extra>"):
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text), True) == original.decode(
            original.encode(text), skip_special_tokens=True
        )


def test_training_settings_do_not_truncate_or_pad_prompts(tmp_path) -> None:
    directory = changed_copy(tmp_path)
    backend = Tokenizer(directory).backend
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    backend.save(str(directory / "tokenizer.json"))
    assert Tokenizer(directory).encode("abcdefgh") == tiny_tokenizer().encode("abcdefgh")
    assert len(Tokenizer(directory).encode("ab")) == 2


def test_ids_and_tokens() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.token_to_id("<|im_end|>") == tokenizer.eos_token_id == 302
    assert tokenizer.id_to_token(302) == "<|im_end|>"
    assert tokenizer.token_to_id("nothing") is None and tokenizer.id_to_token(99_999) is None
    assert tokenizer.decode(tokenizer.token_to_id("Ġthe")) == " the"
    assert tokenizer.bos_token_id is None
    for text in (5, "half a character \ud800"):
        with pytest.raises(InvalidParameterError, match="prompt: must be text"):
            tokenizer.encode(text)


def test_chat_template_text_and_ids() -> None:
    tokenizer, messages = tiny_tokenizer(), [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False) and ids[0] == 301
    assert (
        tokenizer.apply_chat_template(
            messages, chat_template="{{ eos_token }}{{ extra }}", extra=5, tokenize=False
        )
        == "<|im_end|>5"
    )
    with pytest.raises(InvalidParameterError, match="tokenize"):
        tokenizer.apply_chat_template(messages, tokenize="no")


def test_bad_files_are_named(tmp_path) -> None:
    with pytest.raises(
        ModelLoadError, match=f"{tmp_path} has no tokenizer.json.*skip_tokenizer_init"
    ):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json must hold a JSON object"):
        Tokenizer(tmp_path)


def test_the_frontend_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from quire import LLM, AsyncLLM, EngineArgs; from "
        "quire.frontend.text.tokenizer "
        "import Tokenizer\n"
        f"t = Tokenizer({str(tiny_tokenizer_directory())!r}); "
        f"t.apply_chat_template([dict(role='user', content='x')])\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub', 'tqdm') if m in "
        "sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_gguf_file_is_a_tokenizer(tmp_path: Path) -> None:
    """Files beside it replace its parts. tests/ipc/models/test_gguf_tokenizer.py compares ids."""
    tokens = ["<s>", "</s>", "a", "b", "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    tokenizer = Tokenizer(path := write_gguf(tmp_path / "m.gguf", metadata))
    assert tokenizer.encode("ab</s>") == [0, 4, 1]
    assert tokenizer.decode([0, 4, 1], skip_special_tokens=True) == "ab"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == [4, 1]
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "b"}')
    assert Tokenizer(path).apply_chat_template([{"role": "user", "content": "ab"}]) == [3]
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    assert Tokenizer(path).encode("ab") == Tokenizer(BUNDLED).encode("ab")


@pytest.mark.parametrize("kind", ["rwkv", "no_vocab"])
def test_a_tokenizer_json_beside_a_gguf_file_with_another_kind(kind: str, tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": kind, "tokenizer.ggml.eos_token_id": 1}
    metadata |= {"tokenizer.ggml.tokens": ["<pad>", "</s>", "a"]} if kind == "rwkv" else {}
    path = write_gguf(tmp_path / "m.gguf", metadata)
    with pytest.raises(ModelLoadError, match=f"m.gguf: tokenizer.ggml.model is '{kind}' "):
        Tokenizer(path)
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    assert Tokenizer(path).encode("a tree") == Tokenizer(BUNDLED).encode("a tree")


def test_a_gguf_tokenizer_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(ModelLoadError, match="m.gguf: its tokenizer cannot be built: "):
        Tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
