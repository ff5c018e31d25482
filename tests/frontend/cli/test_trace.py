"""`quire trace`: the tree, the files, and bad input."""

import json

from quire.tests.frontend.cli.command import ONE_THREAD, call

FAST = (*ONE_THREAD, "--engine", "inproc")


def test_the_path_of_a_token(capsys):
    code, out, err = call(capsys, "trace", "--prompt", "Once upon a time", "--steps", "2", *FAST)
    assert code == 0, err
    for stage in (
        "LLM.generate  frontend/llm.py:",
        "LLMEngine.step  frontend/llm_engine.py:",
        "EngineCore._step  core/engine_core.py:",
        "Scheduler.schedule  core/scheduling/scheduler.py:",
        "Worker.execute_model  executor/worker.py:",
        "ModelRunner.execute_model  executor/runner/model_runner.py:",
        "token_ids [4] int32",
        "layers[i].self_attn.qkv_proj → linear",
        "OutputProcessor.process_outputs  frontend/requests/output_processor.py:",
        "IncrementalDetokenizer.update  frontend/text/detokenizer.py:",
    ):
        assert stage in out, stage
    assert out.count("most time: ") == 2 and "of the limit that" in out


def test_files_and_their_comparison(capsys, tmp_path):
    names = [str(tmp_path / name) for name in ("a.json", "a.html", "a.perfetto.json")]
    flags = ("--out", names[0], "--html", names[1], "--perfetto", names[2])
    code, out, err = call(capsys, "trace", "--steps", "1", *flags, *FAST)
    assert (code, out) == (0, ""), err
    with open(names[0]) as file:
        assert len(json.load(file)["engine"]["steps"]) == 1
    with open(names[2]) as file:
        assert json.load(file)["traceEvents"]
    code, out, err = call(capsys, "trace", "--diff", names[0], names[0])
    assert code == 0 and "1.00" in out and "only A" not in out


def test_json_on_standard_output(capsys):
    code, out, err = call(capsys, "trace", "--steps", "1", "--json", *FAST)
    [step] = json.loads(out)["engine"]["steps"]
    assert code == 0 and step["rows"][0]["num_tokens"] == 4


def test_bad_input(capsys, tmp_path):
    code, _, err = call(capsys, "trace", "--steps", "0")
    assert code == 2 and "--steps: must be 1 to 64, got 0" in err
    code, _, err = call(capsys, "trace", "--prompt", "")
    assert code == 2 and "--prompt: must not be empty" in err
    file = tmp_path / "x.json"
    file.write_text("{}")
    code, _, err = call(capsys, "trace", "--diff", str(file), str(file))
    assert code == 2 and "is not a trace of Quire" in err
    code, _, err = call(capsys, "trace", "--diff", str(tmp_path / "none"), str(file))
    assert code == 1 and "No such file" in err
