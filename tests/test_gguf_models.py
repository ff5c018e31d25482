"""A GGUF file wherever a model is named: the bundled model, converted, answers as the original."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quire import LLM, EngineArgs, ModelLoadError, SamplingParams
from quire.frontend.model_info.model_diagnosis import check_model
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.model_info.plan import make_plan
from quire.ipc.params import StructuredOutputsParams
from quire.tests.gguf_checkpoints import write_gguf

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


def test_plan_and_doctor_read_it(file: Path) -> None:
    args = EngineArgs(str(file), dtype="float32")
    assert make_plan(args).weights_bytes == make_plan(EngineArgs(dtype="float32")).weights_bytes
    findings = {finding.name: finding for finding in check_model(args)}
    assert "GGUF" in findings["weights"].detail
    assert {name for name, finding in findings.items() if finding.status == "fail"} == set()


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-100_000])
    with pytest.raises(ModelLoadError, match="cut.gguf: not a readable GGUF file: tensor "):
        LLM(str(cut), **SETTINGS)
