"""Files and batches of a real server over HTTP: OpenAI's and Anthropic's, by key, after a kill.

The servers share one daemon, so that each starts without loading a model.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.cli.command import running_daemon
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.scripted import ScriptedEngine, scripted_app, talk

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"Hi, {custom_id}"}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked | body}


def upload(client: httpx.Client, lines: list[Any], **more: Any) -> httpx.Response:
    content = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    files = {"file": ("in.jsonl", content.encode())}
    return client.post("/v1/files", files=files, data={"purpose": "batch"} | more)


def create(client: httpx.Client, lines: list[Any], endpoint: str = CHAT, **more: Any) -> Any:
    body = {"endpoint": endpoint, "completion_window": "24h"} | more
    body["input_file_id"] = upload(client, lines).json()["id"]
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_for(look: Callable[[], Any], is_it: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 60
    while not is_it(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def ended(client: httpx.Client, batch: Any) -> Any:
    def look() -> Any:
        return client.get(f"/v1/batches/{batch['id']}").json()

    return wait_for(look, lambda found: found["status"] in ENDED)


def content(client: httpx.Client, file_id: str) -> list[Any]:
    return list(map(json.loads, client.get(f"/v1/files/{file_id}/content").text.splitlines()))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running_daemon(tmp_path_factory.mktemp("daemon") / "engine.sock") as address:
        yield address


@pytest.fixture(scope="module")
def batching(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("batches")
    flags = ("--api-key", "a", "--api-key", "b", "--max-file-bytes", "100000", "--engine", engine)
    with running_server(*flags, "--batch-dir", str(folder), wait=False) as client:
        client.headers["authorization"] = "Bearer a"
        client.folder = folder
        yield client


def test_a_batch_gives_what_the_endpoint_gives(batching: httpx.Client) -> None:
    """The batch is created while the model may still load, and waits for it."""
    greedy = {"temperature": 0, "seed": 1}
    lines = [chat_line("a", **greedy), "", chat_line("b", temperature=-1), chat_line("c", **greedy)]
    batch = create(batching, lines, metadata={"is": "mine"})
    assert batch["object"] == "batch" and batch["status"] == "validating"
    done = ended(batching, batch)
    assert done["status"] == "completed", done
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert done["metadata"] == {"is": "mine"} and done["errors"] is None
    assert done["created_at"] <= done["in_progress_at"] <= done["completed_at"]
    good = {line["custom_id"]: line for line in content(batching, done["output_file_id"])}
    (bad,) = content(batching, done["error_file_id"])
    assert sorted(good) == ["a", "c"] and bad["custom_id"] == "b"
    for name, line in good.items():
        assert line["error"] is None and line["response"]["status_code"] == 200
        live = batching.post(CHAT, json=chat_line(name, **greedy)["body"]).json()
        assert line["response"]["body"]["choices"] == live["choices"]
        assert line["response"]["body"]["usage"] == live["usage"]
    assert bad["response"]["status_code"] == 400 and bad["response"]["request_id"]
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    file = batching.get(f"/v1/files/{done['output_file_id']}").json()
    assert file["purpose"] == "batch_output" and file["bytes"] > 0


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "Hi"},
}


def test_other_endpoints(batching: httpx.Client) -> None:
    line = {"custom_id": "1", "method": "POST"}
    made = [
        create(batching, [line | {"url": url, "body": body}], url) for url, body in BODIES.items()
    ]
    for batch, (url, body) in zip(made, BODIES.items(), strict=True):
        done = ended(batching, batch)
        assert done["status"] == "completed", done
        live = batching.post(url, json=body)
        counts = done["request_counts"]
        assert counts["completed" if live.status_code == 200 else "failed"] == 1


def test_what_is_wrong_with_an_input_is_said_by_line(batching: httpx.Client) -> None:
    lines = [
        chat_line("a"),
        "{",
        chat_line("a"),
        chat_line("s", stream=True),
        chat_line("m", model="other"),
        chat_line("u") | {"url": "/v1/completions"},
        chat_line("g") | {"method": "GET"},
        {"custom_id": "x"},
    ]
    made = [
        create(batching, some)
        for some in (lines, [chat_line("a"), chat_line("b"), chat_line("a")], [""])
    ]
    done, twice, empty = (ended(batching, batch) for batch in made)
    assert done["status"] == "failed" and done["failed_at"]
    found = {(error["line"], error["code"]) for error in done["errors"]["data"]}
    assert found == {
        (2, "invalid_json_line"),
        (4, "stream_unsupported"),
        (5, "model_not_found"),
        (6, "mismatched_url"),
        (7, "invalid_method"),
        (8, "invalid_request"),
    }
    (error,) = twice["errors"]["data"]
    assert error["line"] == 3 and error["code"] == "duplicate_custom_id"
    assert empty["errors"]["data"][0]["code"] == "empty_file"


def test_files(batching: httpx.Client) -> None:
    first = upload(batching, ["1"]).json()
    second = upload(batching, ["22"], **{"expires_after[anchor]": "created_at"} | SECONDS).json()
    assert first["object"] == "file" and first["filename"] == "in.jsonl" and first["bytes"] == 1
    assert second["expires_at"] == second["created_at"] + 3600
    listed = batching.get("/v1/files", params={"limit": 1, "purpose": "batch"}).json()
    assert [file["id"] for file in listed["data"]] == [second["id"]] and listed["has_more"]
    after = {"limit": 1, "after": second["id"], "purpose": "batch"}
    assert batching.get("/v1/files", params=after).json()["data"] == [first]
    assert batching.get(f"/v1/files/{first['id']}/content").text == "1"
    others = {"authorization": "Bearer b"}
    assert batching.get("/v1/files", headers=others).json()["data"] == []
    assert batching.get(f"/v1/files/{first['id']}", headers=others).status_code == 404
    body = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": first["id"]}
    assert batching.post("/v1/batches", json=body, headers=others).status_code == 404
    assert batching.delete(f"/v1/files/{first['id']}", headers=others).status_code == 404
    assert batching.delete(f"/v1/files/{first['id']}").json()["deleted"]
    assert batching.get(f"/v1/files/{first['id']}").status_code == 404
    modes = {path.stat().st_mode & 0o777 for path in batching.folder.rglob("*") if path.is_file()}
    assert modes == {0o600}
    folders = {path.stat().st_mode & 0o777 for path in batching.folder.rglob("*") if path.is_dir()}
    assert folders == {0o700}


SECONDS = {"expires_after[seconds]": "3600"}


def test_uploads_that_are_refused(batching: httpx.Client) -> None:
    def refused(status: int, param: str | None, **request: Any) -> None:
        answer = batching.post("/v1/files", **request)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param

    file = {"file": ("a", b"1")}
    refused(415, None, json={})
    refused(400, "purpose", files=file)
    refused(400, "purpose", files=file, data={"purpose": "vision"})
    refused(400, "file", files={"purpose": (None, "batch")})
    refused(413, "file", files={"file": ("a", b"1" * 100_001)}, data={"purpose": "batch"})
    wrong = {"purpose": "batch", "expires_after[anchor]": "created_at"}
    refused(400, "expires_after[seconds]", files=file, data=wrong)
    multipart = {"content-type": "multipart/form-data; boundary=x"}
    refused(400, None, content=b"--x\r\nnonsense", headers=multipart)
    assert not [path for path in batching.folder.rglob("*.writing") if path.is_dir()]


def test_cancel(batching: httpx.Client) -> None:
    endless = {"max_tokens": 400, "ignore_eos": True}
    batch = create(batching, [chat_line(str(i), **endless) for i in range(100)])
    path = f"/v1/batches/{batch['id']}"
    wait_for(lambda: batching.get(path).json(), lambda found: found["status"] == "in_progress")
    assert batching.post(f"{path}/cancel").json()["status"] == "cancelling"
    done = ended(batching, batch)
    assert done["status"] == "cancelled" and done["cancelling_at"] <= done["cancelled_at"]
    assert done["request_counts"]["completed"] < 100
    assert batching.post(f"{path}/cancel").status_code == 409
    listed = batching.get("/v1/batches", params={"limit": 1}).json()
    assert listed["data"] == [done] and listed["has_more"]


def test_anthropic(batching: httpx.Client) -> None:
    good = {"model": "", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    bad = good | {"max_tokens": -1}
    requests = [{"custom_id": "g", "params": good}, {"custom_id": "b", "params": bad}]
    path = "/v1/messages/batches"
    batch = batching.post(path, json={"requests": requests}).json()
    assert batch["type"] == "message_batch" and batch["processing_status"] == "in_progress"
    one = f"{path}/{batch['id']}"
    done = wait_for(
        lambda: batching.get(one).json(), lambda found: found["processing_status"] == "ended"
    )
    assert done["request_counts"] == {
        "processing": 0,
        "succeeded": 1,
        "errored": 1,
        "canceled": 0,
        "expired": 0,
    }
    lines = map(json.loads, batching.get(done["results_url"]).text.splitlines())
    results = {line["custom_id"]: line["result"] for line in lines}
    assert results["g"]["message"]["type"] == "message"
    assert results["b"]["type"] == "errored" and results["b"]["error"]["type"] == "error"
    twice = {"requests": requests + requests[:1]}
    assert batching.post(path, json=twice).json()["type"] == "error"
    others = {"authorization": "Bearer b"}
    assert batching.get(one, headers=others).status_code == 404
    assert batching.get(path).json()["data"] == [done]
    assert batching.delete(one).json() == {"id": batch["id"], "type": "message_batch_deleted"}
    assert batching.get(path).json()["data"] == []


def runners(client: httpx.Client) -> list[psutil.Process]:
    """The server processes that have a batch's journal open."""
    found = []
    for process in psutil.Process(client.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(file.path.endswith("/journal") for file in process.open_files()):
                found.append(process)
    return found


def committed(folder: Path, batch: Any) -> bytes:
    """Returns the results of which the journal says that they are complete."""
    (journal,) = folder.glob(f"*/batches/{batch['id']}/journal")
    last = json.loads(journal.read_text().splitlines()[-1])
    return (journal.parent / "output.jsonl").read_bytes()[: last.get("output_bytes", 0)]


@pytest.mark.slow
def test_batches_continue_when_servers_are_killed(engine: str, tmp_path: Path) -> None:
    """One of two processes runs them; when it is killed, the other one does, and after both a later
    server. Each line is answered once in the result, and what was done is not run again. A batch
    that expires meanwhile says which lines it did not answer.
    """
    flags = ("--batch-dir", str(tmp_path), "--engine", engine)
    lines = [chat_line(str(i), max_tokens=60, ignore_eos=True) for i in range(30)]
    results: list[bytes] = []
    with running_server(*flags, "--api-server-count", "2", "--max-batch-requests", "1") as client:
        batch = create(client, lines)
        for _ in range(2):
            (runner,) = wait_for(lambda: runners(client), len)
            before = results[-1] if results else b""
            wait_until(lambda before=before: len(committed(tmp_path, batch)) > len(before))
            if not results:
                runner.kill()
                runner.wait()
            results.append(committed(tmp_path, batch))
        late = create(client, lines)
        members = psutil.Process(client.process.pid).children()
        assert runner in members and len(results[-1].splitlines()) < 30
        client.process.kill()
        psutil.wait_procs(members, timeout=30)
    results.append(committed(tmp_path, batch))
    (path,) = tmp_path.glob(f"*/batches/{late['id']}/batch.json")
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"expires_at": stored["created_at"]}))
    with running_server(*flags, wait=False) as client:
        done = ended(client, batch)
        assert done["status"] == "completed", done
        assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        raw = client.get(f"/v1/files/{done['output_file_id']}/content").content
        for before in results:
            assert raw.startswith(before) and len(before.splitlines()) < 30
        ids = [json.loads(line)["custom_id"] for line in raw.splitlines()]
        assert sorted(ids) == sorted(str(i) for i in range(30))
        expired = ended(client, late)
        assert expired["status"] == "expired"
        counts = expired["request_counts"]
        assert counts["completed"] + counts["failed"] == 30 and counts["failed"] > 0
        errors = content(client, expired["error_file_id"])
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}
        assert len(errors) == counts["failed"]


def test_a_server_without_room(tmp_path: Path) -> None:
    app = scripted_app(ScriptedEngine([]), batch_dir=str(tmp_path), max_stored_file_bytes=1000)

    async def uploads(client: httpx.AsyncClient) -> list[int]:
        found = []
        for size in (2000, 900, 500):
            files = {"file": ("in.jsonl", b"1" * size)}
            answer = await client.post("/v1/files", files=files, data={"purpose": "batch"})
            found.append(answer.status_code)
        assert (await client.get("/v1/files")).json()["data"][0]["bytes"] == 900
        return found

    assert talk(app, uploads) == [507, 200, 507]
