"""Each check of a model finds its defect: missing files, wrong tokenizers, inconsistent templates
and end tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire import EngineArgs
from quire.frontend.diagnosis.machine import Finding
from quire.frontend.diagnosis.model import check_model, check_plan
from quire.frontend.model_info import plan as planning
from quire.frontend.server.config import ServerConfig
from quire.tests.frontend.tiny_tokenizers import write_byte_fallback_tokenizer
from quire.tests.tiny_models import CHAT_TEMPLATE, EOS_TOKEN_ID, save_tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", num_shards=2)


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def check(model: Path | str, **arguments: Any) -> dict[str, Finding]:
    findings = list(check_model(EngineArgs(str(model), **arguments)))
    assert [finding for finding in findings if finding.status != "pass" and not finding.fix] == []
    return {finding.name: finding for finding in findings}


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        path = model / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def remove(file: str) -> Callable[[Path], None]:
    return lambda model: (model / file).unlink()


def write_weights(model: Path, change: Callable[[bytes], bytes]) -> None:
    path = max(model.glob("*.safetensors"))
    path.write_bytes(change(path.read_bytes()))


def test_a_valid_model_passes(model: Path) -> None:
    for findings in (check(model), check("bundled")):
        assert {finding.status for finding in findings.values()} == {"pass"}
        assert list(findings) == [
            "model",
            "weights",
            "fits",
            "tokenizer",
            "ends",
            "BOS",
            "generation prompt",
            "end of turn",
            "answers",
        ]


TEMPLATE = "tokenizer_config.json"
# defect -> (how to create it, finding, status, words)
CASES: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    "no config": (remove("config.json"), "model", "fail", "has no config.json"),
    "unread key": (edit("config.json", mup_scale=8.0), "config", "warn", "ignores: mup_scale"),
    "architecture": (
        edit("config.json", architectures=["OtherForImages"]),
        "model",
        "fail",
        "OtherForImages is not supported",
    ),
    "quantized": (
        edit("config.json", quantization_config={"quant_method": "gptq"}),
        "model",
        "fail",
        "quantization_config",
    ),
    "no shard": (
        lambda m: max(m.glob("*.safetensors")).unlink(),
        "weights",
        "fail",
        "1 missing: model-0000",
    ),
    "no weights": (remove("model.safetensors.index.json"), "weights", "fail", "model.safetensors"),
    "bad index": (
        lambda m: (m / "model.safetensors.index.json").write_text("[]"),
        "weights",
        "fail",
        "must hold a JSON object",
    ),
    "truncated shard": (
        lambda m: write_weights(m, lambda content: content[:-10]),
        "weights",
        "fail",
        "truncated: 10 bytes are missing",
    ),
    "empty shard": (
        lambda m: write_weights(m, lambda content: b""),
        "weights",
        "fail",
        "it has 0 bytes",
    ),
    "other shapes": (
        edit("config.json", intermediate_size=100),
        "weights",
        "fail",
        "has shape [64, 96], the model needs [64, 100]",
    ),
    "too few layers": (
        edit("config.json", num_hidden_layers=4),
        "weights",
        "fail",
        "no file has the tensor model.layers.3.",
    ),
    "too many layers": (
        edit("config.json", num_hidden_layers=2),
        "weights",
        "fail",
        "the model has no place for tensor model.layers.2.",
    ),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer", "fail", "has no tokenizer.json"),
    "foreign tokenizer": (
        edit("config.json", vocab_size=100),
        "tokenizer",
        "fail",
        "its largest id is 302",
    ),
    "no end": (
        lambda m: [
            edit("config.json", eos_token_id=None)(m),
            edit("generation_config.json", eos_token_id=None)(m),
            edit(TEMPLATE, eos_token=None)(m),
        ],
        "ends",
        "warn",
        "no end-of-sequence token",
    ),
    "strange end": (
        edit("generation_config.json", eos_token_id="x"),
        "ends",
        "fail",
        "must be an id or a list of ids",
    ),
    "end beyond": (
        edit("generation_config.json", eos_token_id=[99_999]),
        "ends",
        "fail",
        "id 99999 is outside",
    ),
    "ends overridden": (
        edit("config.json", eos_token_id=[EOS_TOKEN_ID, 301]),
        "ends",
        "warn",
        "config.json also names <|im_start|> (301)",
    ),
    "tokenizer's end": (
        edit("generation_config.json", eos_token_id=300),
        "ends",
        "warn",
        "the tokenizer's <|im_end|> (302) is not in the configuration",
    ),
    "no template": (edit(TEMPLATE, chat_template=None), "template", "warn", "none"),
    "broken template": (
        edit(TEMPLATE, chat_template="{% for"),
        "template",
        "fail",
        "not valid Jinja",
    ),
    "no generation prompt": (
        edit(TEMPLATE, chat_template=CHAT_TEMPLATE.split("{%- if")[0]),
        "generation prompt",
        "warn",
        "writes none",
    ),
    "answers refused": (
        edit(
            TEMPLATE,
            chat_template="{{ messages[1].x.y if messages|length > 1 else ('a' if "
            "add_generation_prompt else '') }}",
        ),
        "end of turn",
        "warn",
        "fails for an answer",
    ),
    "turn ends elsewhere": (
        lambda m: [
            edit(TEMPLATE, eos_token="<|endoftext|>")(m),
            edit("config.json", eos_token_id=300)(m),
            edit("generation_config.json", eos_token_id=300)(m),
        ],
        "end of turn",
        "warn",
        "<|im_end|> (302) ends an answer in the template, and no sequence",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_defects_are_found(case: str, model: Path) -> None:
    spoil, name, status, words = CASES[case]
    spoil(model)
    finding = check(model)[name]
    assert finding.status == status and words in finding.detail, finding


def test_the_suggested_fix_for_an_end_of_turn_works(model: Path) -> None:
    spoil = CASES["turn ends elsewhere"][0]
    spoil(model)
    option, value = check(model)["end of turn"].fix.split(" ", 1)
    assert option == "--override-generation-config"
    assert (
        check(model, override_generation_config=json.loads(value.strip("'")))["end of turn"].status
        == "pass"
    )


@pytest.mark.parametrize(
    ("template", "status", "words"),
    [
        (
            "{{ bos_token }}{{ messages[0].content }}",
            "pass",
            "<s> once; a chat that a program renders itself",
        ),
        ("{{ bos_token }}{{ bos_token }}{{ messages[0].content }}", "fail", "writes <s> twice"),
        ("{{ messages[0].content }}", "warn", "before a plain prompt, the template before no chat"),
    ],
)
def test_bos(template: str, status: str, words: str, model: Path) -> None:
    """A tokenizer that puts a BOS before every prompt, like Llama's."""
    write_byte_fallback_tokenizer(model)
    edit(TEMPLATE, chat_template=template)(model)
    finding = check(model)["BOS"]
    assert finding.status == status and words in finding.detail


def test_another_template_and_the_answer_format(model: Path) -> None:
    edit(TEMPLATE, chat_template=None)(model)
    template = (
        CHAT_TEMPLATE
        + "{% if tools %}<tool_call>{{ tools }}</tool_call> <tools></tools>{% endif %}"
    )
    findings = {
        finding.name: finding
        for finding in check_model(
            EngineArgs(str(model)), ServerConfig(tool_call_parser="hermes"), template
        )
    }
    assert findings["BOS"].status == findings["end of turn"].status == "pass"
    assert findings["answers"].detail == "tool calls: hermes; reasoning: none"
    assert check(model)["answers"].detail.startswith("tool calls: none (tools cannot be used")
    findings = {
        finding.name: finding
        for finding in check_model(EngineArgs("bundled"), ServerConfig(), "nowhere.jinja")
    }
    assert (
        findings["template"].status == "fail"
        and findings["template"].detail
        == "nowhere.jinja is neither a file nor one of the model's templates: default"
    )
    [*_, last] = check_model(
        EngineArgs(str(model)), ServerConfig(tool_call_parser="nobodys"), template
    )
    assert (last.name, last.status) == ("answers", "fail") and last.detail.startswith(
        "tool_call_parser: "
    )


def test_insufficient_memory(model: Path) -> None:
    finding = check(model, kv_cache_memory_bytes=10**6, dtype="float32")["fits"]
    assert (
        finding.status == "fail"
        and "at most 1280 tokens fits, max_model_len is 2048" in finding.detail
        and "--max-model-len 1280" in finding.fix
    )
    assert check(model, max_model_len=9999)["fits"].detail.startswith(
        "max_model_len: must be at most 2048"
    )


@pytest.mark.parametrize(
    ("arguments", "words", "number"),
    [
        ({"tensor_parallel_size": 2}, "; 2 ranks, each with 0.19 GiB of weights and cache;", 256),
        ({"pipeline_parallel_size": 2}, "; 2 ranks, each with 0.25 GiB of weights and cache;", 256),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2},
            "; 2 ranks of an engine, each with 0.19 GiB of weights and cache;",
            512,
        ),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            "2 engines, each with 0.00 GiB of weights as float32 (1/2 of the experts) in ",
            512,
        ),
    ],
)
def test_ranks_and_divided_experts(
    arguments: dict[str, Any], words: str, number: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(planning, "free_memory_bytes", lambda: 8 * 2**30)
    model = save_tiny_model(tmp_path, "qwen3_moe")
    finding = check_plan(EngineArgs(str(model), dtype="float32", device="cpu", **arguments))
    assert finding.status == "pass" and words in finding.detail, finding.detail
    assert finding.detail.endswith(f"{number} requests of 2048 tokens at once")


def test_without_tokenizer_and_with_random_weights(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    findings = check(model, skip_tokenizer_init=True, load_format="dummy")
    assert list(findings) == ["model", "weights", "fits"] and findings["weights"].status == "warn"


def test_a_model_in_the_hubs_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are links. Weights that are missing are downloaded at the first start."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--somebody--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for path in model.iterdir():
        blob = path.rename(repository / "blobs" / f"blob-of-{path.name}")
        (snapshot / path.name).symlink_to(blob)
    findings = check("somebody/tiny")
    assert {finding.status for finding in findings.values()} == {"pass"} and findings[
        "model"
    ].detail.endswith(str(snapshot))
    for path in snapshot.glob("*.safetensors"):
        path.unlink()
    finding = check("somebody/tiny")["weights"]
    assert finding.status == "warn" and finding.fix.startswith("hf download somebody/tiny")
