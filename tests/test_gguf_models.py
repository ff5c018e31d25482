"""A GGUF file wherever a model is named: the bundled model, converted, answers as the original."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from quire import LLM, EngineArgs, ModelLoadError, SamplingParams
from quire.frontend.diagnosis.model import check_model
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.model_info.plan import make_plan
from quire.ipc.params import StructuredOutputsParams
from quire.tests import gguf_files
from quire.tests.frontend.cli.command import QUIRE, Terminal, run
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.test_same_answers import wait_for
from quire.tests.gguf_checkpoints import write_encoder_gguf, write_gguf
from quire.tests.tiny_encoders import save_tiny_encoder, save_word_piece
from quire.tests.tiny_models import save_tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors

BUNDLED = find_model_directory("bundled")
PROMPTS = ["Once upon a time", "12 + 34 =", "{"]
MESSAGES = [{"role": "user", "content": "Tell a story."}]
JSON = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
SETTINGS: dict[str, Any] = dict(engine="inproc", dtype="float32", max_model_len=256)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file alone in a folder."""
    path = tmp_path_factory.mktemp("gguf") / "bundled-F32.gguf"
    write_gguf(path, BUNDLED)
    return path


def answers(llm: LLM) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    outputs = [*llm.generate(PROMPTS, greedy), *llm.chat([MESSAGES], greedy)]
    return [output.outputs[0].token_ids for output in outputs]


def test_a_tokenizer_beside_the_file_and_a_folder_as_the_name(file: Path, tmp_path: Path) -> None:
    """The bundled model's pre-tokenizer has no name in GGUF, so its tokenizer.json is needed."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(file, folder)
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    with LLM(**SETTINGS) as llm:
        expected = answers(llm)
    with LLM(str(folder), **SETTINGS) as llm:
        assert answers(llm) == expected
        llm.load_weights(str(folder))
        assert answers(llm) == expected
    with LLM(str(file), **SETTINGS, tokenizer="bundled") as llm:
        assert answers(llm) == expected


def test_a_file_alone_is_enough(file: Path) -> None:
    with LLM(str(file), **SETTINGS) as llm:
        assert llm.tokenizer is not None and llm.tokenizer.eos_token == "<|im_end|>"
        (prompt,) = llm.chat([MESSAGES], SamplingParams(max_tokens=1))
        assert prompt.prompt_token_ids[0] == 1
        constrained = SamplingParams(max_tokens=60, temperature=0, structured_outputs=JSON)
        (output,) = llm.generate(["{"], constrained)
        assert output.outputs[0].finish_reason == "length" or json.loads(output.outputs[0].text)


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, window": ("phi3", {"sliding_window": 20}),
    "phi3, long": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
            },
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "granite": ("granite", {}),
    "mistral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "mistral3, default rope": (
        "ministral3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_answers_as_its_safetensors(name: str, tmp_path: Path) -> None:
    """Only the metadata describes the model: sizes, windows, factors, names, order of rows."""
    kind, overrides = ARCHITECTURES[name]
    directory = save_tiny_model(tmp_path / "model", kind, **overrides)
    path = tmp_path / "m.gguf"
    write_gguf(path, directory)
    prompts = [{"prompt_token_ids": [3 + i % 290 for i in range(n)]} for n in (5, 90)]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(directory), **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
    with LLM(str(path), **SETTINGS) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)] == expected


def test_it_embeds_as_its_safetensors(tmp_path: Path) -> None:
    """The file has an output matrix, which embeddings do not need."""
    directory = save_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    write_gguf(tmp_path / "m.gguf", directory)
    prompts = [{"prompt_token_ids": [3 + i % 290 for i in range(n)]} for n in (5, 90)]
    found = []
    for model in (directory, tmp_path / "m.gguf"):
        with LLM(str(model), runner="pooling", **SETTINGS) as llm:
            found.append(llm.embed(prompts, as_array=True, use_tqdm=False))
    assert found[0].shape == (2, 64) and (found[0] == found[1]).all()


TEXTS = ["the old garden", "Rivers, letters and a winter", "it was " * 40]
OF_ENCODER: dict[str, Any] = dict(engine="inproc", num_threads=1)


def save_encoder(directory: Path, kind: str) -> Path:
    """With the kind of tokenizer that such models have."""
    own = {"hidden_act": "gelu", "type_vocab_size": 1} if kind == "xlm-roberta" else {}
    save_tiny_encoder(directory, kind, **own)
    if kind != "xlm-roberta":
        save_word_piece(directory, ["the old garden and it was", "rivers letters winter"] * 3)
        return directory
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("<mask>", 0.0)]
    pieces = dict.fromkeys(["▁the", "▁", "▁old", "ar", *"theoldgarn"])
    vocab += [(text, -2.0 - i) for i, text in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(vocab, 3, False))
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.add_special_tokens([text for text, _ in vocab[:5]])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("kind", ["bert", "nomic_bert", "xlm-roberta"])
def test_a_text_encoder_embeds_as_its_safetensors(kind: str, type: str, tmp_path: Path) -> None:
    """Only the file describes model, tokenizer and pooling. In F32 the bits are the same."""
    directory, path = save_encoder(tmp_path / "model", kind), tmp_path / "m.gguf"
    write_encoder_gguf(path, directory, type)
    found, ids = [], []
    for model in (directory, path):
        with LLM(str(model), dtype="float32", **OF_ENCODER) as llm:
            assert llm.llm_engine.config.model_config.pooling.modes == ("mean",)
            found.append(llm.embed(TEXTS, as_array=True, use_tqdm=False))
            ids.append([llm.get_tokenizer().encode(text) for text in TEXTS])
    assert ids[0] == ids[1] and len(set(map(len, ids[0]))) == 3
    if type == "F32":
        assert (found[0] == found[1]).all()
    else:  # 8 bits, and unit vectors
        assert (found[0] != found[1]).any() and (found[0] * found[1]).sum(1).min() > 0.998
    arguments = EngineArgs(str(path), dtype="float32")
    assert make_plan(arguments).kv_bytes_per_token == 0
    findings = {finding.name: finding for finding in check_model(arguments)}
    assert "GGUF" in findings["weights"].detail
    assert {name for name, finding in findings.items() if finding.status == "fail"} == set()


def test_blocks_of_a_text_encoder_are_multiplied_as_they_are(tmp_path: Path) -> None:
    directory, path = save_encoder(tmp_path / "model", "bert"), tmp_path / "m.gguf"
    write_encoder_gguf(path, directory, "Q8_0")
    found = []
    for dtype in ("float32", "bfloat16"):
        with LLM(str(path), dtype=dtype, **OF_ENCODER) as llm:
            found.append(llm.embed(TEXTS, as_array=True, use_tqdm=False))
    assert (found[0] * found[1]).sum(1).min() > 0.99
    plans = [make_plan(EngineArgs(str(path), dtype=dtype)) for dtype in ("float32", "bfloat16")]
    assert [plan.keeps_blocks for plan in plans] == [False, True]
    assert plans[1].weights_bytes < plans[0].weights_bytes / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "jina-bert-v2"}, "is not supported: this text encoder is read"),
        ({"bert.attention.causal": True}, "attention.causal is not supported for encoders"),
        ({"bert.pooling_type": 4}, "pooling_type=4 of the GGUF file is not supported"),
        ({}, "config.json lacks vocab_size"),
    ],
)
def test_text_encoders_that_cannot_be_read(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    metadata = {
        "general.architecture": "bert",
        "bert.embedding_length": 8,
        "bert.block_count": 2,
        "bert.attention.head_count": 2,
    }
    words = {"token_embd.weight": ((4, 8), "F32", bytes(128))} if changes else {}
    gguf_files.write_gguf(tmp_path / "m.gguf", metadata | changes, words)
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(tmp_path / "m.gguf"), engine="inproc")


def test_plan_and_doctor_read_it(file: Path) -> None:
    args = EngineArgs(str(file), dtype="float32")
    assert make_plan(args).weights_bytes == make_plan(EngineArgs(dtype="float32")).weights_bytes
    findings = {finding.name: finding for finding in check_model(args)}
    assert "GGUF" in findings["weights"].detail
    assert {name for name, finding in findings.items() if finding.status == "fail"} == set()


def test_parts_and_names_in_the_hubs_cache(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split model answers as the whole one, under every name that leads to it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--g" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--g" / "refs").mkdir()
    (tmp_path / "models--org--g" / "refs" / "main").write_text("0" * 40)
    write_gguf(snapshot / "g-F32.gguf", BUNDLED, tensors_in_a_part=20)
    parts = sorted(snapshot.glob("g-F32-0000*.gguf"))
    assert len(parts) == 4
    with LLM(str(file), **SETTINGS) as llm:
        expected = answers(llm)
    for name in ("org/g:F32", f"org/g/{parts[1].name}", str(parts[2])):
        assert find_model_directory(name).name == parts[0].name
    with LLM("org/g:F32", **SETTINGS) as llm:
        assert answers(llm) == expected


@pytest.mark.slow
def test_sleep_and_other_weights(file: Path, tmp_path: Path) -> None:
    """On blocks: after both levels of sleep, and after other weights and the own ones again."""
    path, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(path, BUNDLED, "Q8_0")
    write_gguf(other, BUNDLED, "Q4_0")
    with LLM(str(path), **SETTINGS | {"dtype": "bfloat16"}) as llm:
        expected = answers(llm)
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert answers(llm) == expected
        llm.load_weights(str(other))
        assert answers(llm) != expected
        llm.load_weights(str(path))
        assert answers(llm) == expected


@pytest.fixture(scope="module")
def address(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with the file, which the next tests attach to."""
    socket = tmp_path_factory.mktemp("daemon") / "engine.sock"
    words = [*QUIRE, "engine", str(file), "--listen", f"ipc://{socket}"]
    settings = ["--dtype", "float32", "--max-model-len", "256"]
    with subprocess.Popen([*words, *settings], stderr=subprocess.DEVNULL) as daemon:
        try:
            wait_for(socket, daemon)
            yield f"ipc://{socket}"
        finally:
            daemon.terminate()


@pytest.fixture(scope="module")
def greedy_text(file: Path, address: str) -> str:
    """The greedy answer to MESSAGES, the same from the daemon and from an engine in a program."""
    with LLM(str(file), **SETTINGS) as llm, LLM(str(file), engine=address) as attached:
        expected = answers(llm)
        assert answers(attached) == expected
        assert llm.tokenizer is not None
        return llm.tokenizer.decode(expected[-1], skip_special_tokens=True)


def test_a_server_with_the_files_own_template(file: Path, address: str, greedy_text: str) -> None:
    """Plain, structured, and as a call in the format that is found in the template."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    with running_server(str(file), "--engine", address) as client:

        def message(**fields: Any) -> dict[str, Any]:
            answer = client.post("/v1/chat/completions", json=body | fields)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]

        assert message()["content"] == greedy_text
        schema = {"type": "object", "properties": {"day": {"enum": [7, 8]}}, "required": ["day"]}
        as_json = {"type": "json_schema", "json_schema": {"name": "day", "schema": schema}}
        structured = message(response_format=as_json, max_tokens=100)["content"]
        jsonschema.validate(json.loads(structured), schema)
        tool = {"type": "function", "function": {"name": "set_day", "parameters": schema}}
        calls = message(tools=[tool], tool_choice="required", max_tokens=100)["tool_calls"]
        assert calls
        for call in calls:
            assert call["function"]["name"] == "set_day"
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        assert client.get("/").status_code == 200  # the page
        assert client.get("/api/tags").json()["models"][0]["details"]["format"] == "gguf"


def test_commands(file: Path, address: str, greedy_text: str, tmp_path: Path) -> None:
    words = ["--max-tokens", "24", "--temperature", "0", "--engine", address]
    done = run("generate", "--model", str(file), *words, "Once")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    terminal = Terminal(
        "chat", "--model", str(file), *words, XDG_STATE_HOME=str(tmp_path), TERM="xterm"
    )
    terminal.wait_for("> ")
    terminal.type(f"{MESSAGES[0]['content']}\r")
    terminal.wait_for("story.")  # the question, as it is typed
    terminal.wait_for(greedy_text.splitlines()[0][:60])
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-100_000])
    with pytest.raises(ModelLoadError, match="cut.gguf: not a readable GGUF file: tensor "):
        LLM(str(cut), **SETTINGS)
