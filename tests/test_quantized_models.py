"""A quantized checkpoint wherever a model is named: plan, doctor, sleep, reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quire import LLM, EngineArgs, SamplingParams
from quire.frontend.diagnosis.model import check_model
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.model_info.plan import make_plan
from quire.tests.quantized_checkpoints import write_quantized

BUNDLED = find_model_directory("bundled")
PROMPTS = ["Once upon a time", "12 + 34 =", "The fox"]
SETTINGS: dict[str, Any] = dict(engine="inproc", max_model_len=256)
FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"group_size": 128},
    "int-quantized": {},
    "fp8": {},
}


@pytest.fixture(scope="module", params=FORMATS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param) / "model"
    write_quantized(directory, BUNDLED, request.param, **FORMATS[request.param])
    return directory


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plan_equals_what_is_used(model: Path, dtype: Any) -> None:
    plan = make_plan(EngineArgs(str(model), dtype=dtype))
    with LLM(str(model), **SETTINGS, dtype=dtype) as llm:
        assert llm.collective_rpc("memory_usage")[0]["weights_bytes"] == plan.weights_bytes


def test_doctor_reads_it(model: Path) -> None:
    findings = {finding.name: finding for finding in check_model(EngineArgs(str(model)))}
    assert {name for name, finding in findings.items() if finding.status == "fail"} == set()


@pytest.mark.sampled(step=3)
def test_sleep_and_other_weights(model: Path) -> None:
    """The answers are the same after sleep, and after a reload from and to other formats."""
    with LLM(str(BUNDLED), **SETTINGS) as llm:
        original = answers(llm)
    with LLM(str(model), **SETTINGS) as llm:
        expected = answers(llm)
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == expected
        llm.load_weights(str(BUNDLED))
        assert answers(llm) == original
        llm.load_weights(str(model))
        assert answers(llm) == expected
