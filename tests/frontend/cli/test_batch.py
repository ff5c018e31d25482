"""`quire batch`: the answers of a file, refusals, and runs that go on after a signal or a kill."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from quire import AsyncLLM
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.cli.command import QUIRE, assert_refused, call

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Once", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/embeddings": {"input": "Hi"},
}


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": BODIES[url] | body}


def write(path: Path, lines: list[Any]) -> str:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    path.write_text("\n".join(texts))
    return str(path)


def read(path: Path) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_every_endpoint(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(url, url) for url in BODIES]
    file = write(tmp_path / "a.jsonl", [*lines, "", line("bad", temperature=-1)])
    words = ("batch", file, "--engine", address, "--progress")
    code, out, err = call(capsys, *words)
    assert (code, out) == (1, ""), err
    assert "'bad': 400 Invalid value for 'temperature'" in err and "Processed prompts: 100%" in err
    assert "4 lines answered, 1 failed (" in err and "output: 0.00 toks/s" not in err.split("|")[-1]
    found, failed = read(tmp_path / "a.output.jsonl"), read(tmp_path / "a.errors.jsonl")
    assert set(found) == set(BODIES) and set(failed) == {"bad"}
    assert {row["response"]["status_code"] for row in found.values()} == {200}
    assert found["/v1/completions"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert failed["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert len(list(tmp_path.iterdir())) == 3  # the journal is gone
    assert_refused(capsys, f"batch {file}", "a.output.jsonl exists; --no-resume replaces it")
    assert len(list(tmp_path.iterdir())) == 3
    write(tmp_path / "a.jsonl", lines[:2])
    code, _, err = call(capsys, *words, "--no-resume")
    assert code == 0 and set(read(tmp_path / "a.output.jsonl")) == set(list(BODIES)[:2]), err
    assert not (tmp_path / "a.errors.jsonl").exists()


def test_lines_are_in_the_background_of_an_engine_that_is_shared(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    requests = []
    sent = AsyncLLM.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        requests.append(kwargs)
        return sent(self, *args, **kwargs)

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    file = write(tmp_path / "a.jsonl", [line("a")])
    assert call(capsys, "batch", file, "--engine", address)[0] == 0
    assert [(one["owner"], one["owner_weight"]) for one in requests] == [("batch:", 0)]


def test_what_is_wrong_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said for each line before an engine starts, and no file is made."""
    file = write(tmp_path / "a.jsonl", [line("a"), "{", line("s", stream=True), {"custom_id": 1}])
    code, _, err = call(capsys, "batch", file)
    assert code == 2 and [re.findall(r"line \d", one) for one in err.splitlines()] == [
        *(["line 2"], ["line 3"], ["line 4"], []),
    ], err
    assert "nothing was run" in err and list(tmp_path.iterdir()) == [tmp_path / "a.jsonl"]
    assert_refused(capsys, "batch", "FILE: none given")
    assert_refused(capsys, f"batch {tmp_path / 'none'}", "cannot read")
    assert_refused(capsys, f"batch {file} -o {file}", "must be three files")


def test_an_unknown_model(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", [line("a", model="gpt")])
    words = f"batch {file} --engine {address}"
    assert_refused(capsys, words, "The model 'gpt' does not exist. This server has 'bundled'")
    assert call(capsys, *words.split(), "--unknown-model", "default")[0] == 0
    assert set(read(tmp_path / "a.output.jsonl")) == {"a"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_is_continued(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """Lines that are done stay where they are, and are not answered again."""
    lines = [line(str(i), max_tokens=40, ignore_eos=True) for i in range(60)]
    file, output = write(tmp_path / "a.jsonl", lines), tmp_path / "b.jsonl"
    journal = tmp_path / "b.jsonl.journal"
    words = ["batch", file, "-o", str(output), "--engine", address]
    words += ["--max-concurrent-requests", "1"]
    with subprocess.Popen([*QUIRE, *words], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: journal.exists() and journal.read_text().count("\n") > 1, timeout_s=60)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    if number == signal.SIGINT:
        assert process.returncode == 130 and "the same command continues after them" in said
    last = json.loads(journal.read_text().splitlines()[-1])
    before = output.read_bytes()[: last["output_bytes"]]
    num_before = len(before.splitlines())
    assert 0 < num_before < 60
    code, _, err = call(capsys, *words[:-2])
    assert code == 0, err
    assert f"{num_before} of 60 lines have been answered before" in err
    assert output.read_bytes().startswith(before)
    assert len(output.read_text().splitlines()) == 60 == len(read(output))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_results_of_another_file_are_kept(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = write(tmp_path / "a.jsonl", [line("a")]), tmp_path / "a.output.jsonl"
    journal = tmp_path / "a.output.jsonl.journal"
    journal.write_text('{"input":"other"}\n')
    journal.chmod(0o600)
    output.touch(0o600)
    words = f"batch {file} --engine {address}"
    assert_refused(capsys, words, "belongs to another FILE or model; --no-resume replaces it")
    assert journal.exists() and call(capsys, *words.split(), "--no-resume")[0] == 0
    assert set(read(output)) == {"a"} and not journal.exists()
