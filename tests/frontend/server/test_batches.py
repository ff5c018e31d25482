"""Files and batches of a real server over HTTP: OpenAI's and Anthropic's, by key, after a kill."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from quire.tests.frontend.server.conftest import running_server

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
def batching(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("batches")
    flags = ("--api-key", "a", "--api-key", "b", "--max-file-bytes", "100000")
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


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_other_endpoints(batching: httpx.Client, endpoint: str, body: Any) -> None:
    line = {"custom_id": "1", "method": "POST", "url": endpoint, "body": body}
    done = ended(batching, create(batching, [line], endpoint))
    assert done["status"] == "completed", done
    live = batching.post(endpoint, json=body)
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
    done = ended(batching, create(batching, lines))
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
    done = ended(batching, create(batching, [chat_line("a"), chat_line("b"), chat_line("a")]))
    (error,) = done["errors"]["data"]
    assert error["line"] == 3 and error["code"] == "duplicate_custom_id"
    assert ended(batching, create(batching, [""]))["errors"]["data"][0]["code"] == "empty_file"


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
    batch = create(batching, [chat_line(str(i), **endless) for i in range(300)])
    path = f"/v1/batches/{batch['id']}"
    wait_for(lambda: batching.get(path).json(), lambda found: found["status"] == "in_progress")
    assert batching.post(f"{path}/cancel").json()["status"] == "cancelling"
    done = ended(batching, batch)
    assert done["status"] == "cancelled" and done["cancelling_at"] <= done["cancelled_at"]
    assert done["request_counts"]["completed"] < 300
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


def test_a_server_that_was_killed_continues_its_batches(tmp_path: Path) -> None:
    """Each line is answered once in the result, and those that were done are not run again."""
    flags = ("--batch-dir", str(tmp_path), "--max-batch-requests", "4")
    lines = [chat_line(str(i), max_tokens=24, ignore_eos=True) for i in range(120)]
    with running_server(*flags) as client:
        batch = create(client, lines)

        def num_completed() -> int:
            found = client.get(f"/v1/batches/{batch['id']}").json()
            return found["request_counts"]["completed"]

        before = wait_for(num_completed, lambda number: number > 0)
        assert before < 120
        client.process.send_signal(signal.SIGKILL)
        client.process.wait()
    (output,) = tmp_path.rglob("output.jsonl")
    (journal,) = tmp_path.rglob("journal")
    last = json.loads(journal.read_text().splitlines()[-1])
    committed = output.read_bytes()[: last["output_bytes"]]
    assert len(committed.splitlines()) >= before
    with running_server(*flags) as client:
        done = ended(client, batch)
        assert done["status"] == "completed", done
        assert done["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
        raw = client.get(f"/v1/files/{done['output_file_id']}/content").content
        assert raw.startswith(committed)  # these have not been answered again
        ids = [json.loads(line)["custom_id"] for line in raw.splitlines()]
        assert sorted(ids) == sorted(str(i) for i in range(120))


def test_an_expired_batch_says_which_lines_it_did_not_answer(tmp_path: Path) -> None:
    """The clock of the batch is set back where it is kept."""
    flags = ("--batch-dir", str(tmp_path), "--max-batch-requests", "1")
    lines = [chat_line(str(i), max_tokens=200, ignore_eos=True) for i in range(50)]
    with running_server(*flags, wait=False) as client:
        batch = create(client, lines)
        (path,) = tmp_path.rglob("batch.json")
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {"expires_at": stored["created_at"]}))
        done = ended(client, batch)
        assert done["status"] == "expired"
        counts = done["request_counts"]
        assert counts["completed"] + counts["failed"] == 50 and counts["failed"] > 40
        errors = content(client, done["error_file_id"])
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}
        assert len(errors) == counts["failed"]


def test_a_server_without_room(tmp_path: Path) -> None:
    flags = ("--batch-dir", str(tmp_path))
    with running_server(*flags, "--max-stored-file-bytes", "1000", wait=False) as client:
        assert upload(client, ["1" * 2000]).status_code == 507
        assert upload(client, ["1" * 900]).status_code == 200
        assert upload(client, ["1" * 500]).status_code == 507
        assert client.get("/v1/files").json()["data"][0]["bytes"] == 900
