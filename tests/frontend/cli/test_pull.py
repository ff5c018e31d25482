"""`quire pull` as a command: interruption and continuation, its results and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from quire.frontend.model_info.model_pull import CHUNK_BYTES
from quire.tests.fake_hub import fake_hub, use_hub
from quire.tests.frontend.cli.command import QUIRE, call

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": os.urandom(4 * CHUNK_BYTES),
}


def test_an_interrupted_pull_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Ctrl-C in the middle of a file; the next pull asks for the rest only."""
    with fake_hub() as hub:
        hub.files["org/m"] = FILES
        hub.breaks_after = [2 * CHUNK_BYTES]
        hub.may_go_on.clear()
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        environment["HF_HUB_CACHE"] = str(tmp_path)
        with subprocess.Popen(
            [*QUIRE, "pull", "org/m"], env=environment, stderr=subprocess.PIPE, text=True
        ) as pulling:
            assert hub.has_broken.wait(60)
            [partial] = (tmp_path / "models--org--m" / "blobs").glob("*.incomplete")
            while partial.stat().st_size < 2 * CHUNK_BYTES:  # all that was sent
                assert pulling.poll() is None
            pulling.send_signal(signal.SIGINT)
            _, err = pulling.communicate(timeout=60)
            assert pulling.returncode == 130
            assert re.fullmatch(
                r"quire: interrupted; [\d.]+ MiB received, the next pull continues\n", err
            )
        num_there = partial.stat().st_size
        assert num_there == 2 * CHUNK_BYTES
        hub.may_go_on.set()

        use_hub(hub, tmp_path, monkeypatch)
        code, out, _ = call(capsys, "pull", "org/m", "--json")
        result = json.loads(out)
        weights = Path(result["path"]) / "model.safetensors"
        assert (code, weights.read_bytes()) == (0, FILES["model.safetensors"])
        assert result["num_bytes"] - result["num_bytes_received"] == num_there + 2
        assert ("GET", "model.safetensors", f"bytes={num_there}-") in hub.asked

        code, out, _ = call(capsys, "pull", "org/m")
        assert code == 0 and out.startswith("org/m: 3 files, 4.0 MiB, it was there already: ")
        blob = weights.resolve()
        blob.write_bytes(b"x" * blob.stat().st_size)
        code, out, err = call(capsys, "pull", "org/m", "--verify", "--json")
        assert (code, json.loads(out)["damaged"]) == (0, ["model.safetensors"])
        assert err == "quire: model.safetensors in the cache is damaged; downloading it again\n"
        blob.unlink()
        code, out, _ = call(capsys, "pull", "org/m")
        assert code == 0 and ", 4.0 MiB received, the rest was there already: " in out
        code, out, _ = call(capsys, "pull", "org/m", "--verify")
        assert code == 0 and ", all checksums are right: " in out

        code, _, err = call(capsys, "pull", "org/none")
        assert code == 2 and "has no repository 'org/none'" in err
        hub.sizes["model.safetensors"] = 2**60
        code, _, err = call(capsys, "pull", "org/m", "--download-dir", str(tmp_path / "other"))
        assert code == 1 and "GiB more on disk" in err


def test_a_name_is_needed(capsys: pytest.CaptureFixture) -> None:
    code, _, err = call(capsys, "pull")
    assert code == 2 and "the name of a model on the hub is missing" in err
