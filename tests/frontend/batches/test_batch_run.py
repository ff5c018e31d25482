"""One batch with an answer that is scripted: results are in the files once, whenever a run ends,
whatever the disk does, and lines are answered in turn.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.batches import batch_run, line_run, results
from quire.frontend.batches.batch_run import BatchRun
from quire.frontend.batches.formats import Answer
from quire.frontend.batches.input_file import InputLine, InputRules, check_input
from quire.frontend.batches.line_run import Gate
from quire.frontend.batches.results import OtherInputError, Results
from quire.frontend.batches.store import FullError, Store, StoredBatch

URL = "/v1/completions"
RULES = InputRules([URL], lambda name: None, 1000, 1000)


def line(custom_id: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body})


def stored(tmp_path: Path, num_lines: int, **fields: Any) -> tuple[Store, StoredBatch]:
    store = Store(tmp_path / "store", 10**6, lambda: 1000.0)
    named = {"id": store.new_id("batch_"), "owner": "me", "kind": "openai", "urls": [URL]}
    times = {"created_at": 1000, "expires_at": 2000}
    files = {"output_file_id": store.new_id("file-"), "error_file_id": store.new_id("file-")}
    batch = StoredBatch(**named | times | files | fields)
    text = "\n".join(line(str(i)) for i in range(num_lines))
    store.add_batch(batch, lambda path: path.write_text(text))
    return store, batch


class Answers:
    """Counts what is asked. Every third line fails. After `stop_after` answers none comes."""

    def __init__(self, stop_after: float = float("inf")):
        self.asked: Counter[str] = Counter()
        self.answered: list[str] = []
        self.most = self.num_running = 0
        self.is_stuck = asyncio.Event()
        self._stop_after = stop_after

    async def __call__(self, asked: InputLine, request_id: str) -> Answer:
        self.asked[asked.custom_id] += 1
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        try:
            await asyncio.sleep(0)
            if len(self.answered) >= self._stop_after:
                self.is_stuck.set()
                await asyncio.Event().wait()
            self.answered.append(asked.custom_id)
            status = 400 if int(asked.custom_id) % 3 == 2 else 200
            return Answer(status, request_id, b'{"id": %s}' % asked.custom_id.encode())
        finally:
            self.num_running -= 1


def run_of(store: Store, batch: StoredBatch, answers: Any, num_places: int = 4) -> BatchRun:
    return BatchRun(store, batch, RULES, answers, Gate(lambda: num_places))


def ids_of(store: Store, batch: StoredBatch) -> list[str]:
    paths = (store.content("me", id) for id in (batch.output_file_id, batch.error_file_id))
    lines = [json.loads(row) for path in paths for row in path.read_text().splitlines()]
    return sorted(row["custom_id"] for row in lines)


def test_a_batch_runs_and_its_results_become_files(tmp_path: Path) -> None:
    store, batch = stored(tmp_path, 20)
    assert list(store.unfinished()) == [("me", batch.id)]

    async def run() -> Answers:
        await run_of(store, batch, answers := Answers()).run()
        return answers

    answers = asyncio.run(run())
    assert answers.most == 4 and set(answers.asked.values()) == {1}
    found = store.batch("me", batch.id, "openai")
    assert found is not None and found.status == "completed"
    assert (found.counts.total, found.counts.completed, found.counts.failed) == (20, 14, 6)
    assert ids_of(store, batch) == sorted(map(str, range(20)))
    errors = store.content("me", batch.error_file_id).read_text().splitlines()
    first = json.loads(errors[0])
    number = int(first["custom_id"]) + 1
    assert first["id"].endswith(f"_{number}") and first["response"]["status_code"] == 400
    assert first["response"]["body"] == {"id": int(first["custom_id"])}
    assert list(store.unfinished()) == []
    assert {file.purpose for file in store.files("me")} == {"batch_output"}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_is_continued_answers_the_rest(tmp_path: Path, is_killed: bool) -> None:
    """A process that is killed leaves lines that no journal knows, and half of a line."""
    store, batch = stored(tmp_path, 30)

    async def interrupted() -> Answers:
        answers = Answers(stop_after=11)
        task = asyncio.create_task(run_of(store, batch, answers).run())
        await answers.is_stuck.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return answers

    first = asyncio.run(interrupted())
    folder = store.batch_folder(batch)
    if is_killed:
        for name in ("output.jsonl", "errors.jsonl", "journal"):
            with (folder / name).open("ab") as file:
                file.write(b'{"custom_id": "29", "resp')
    found = store.batch("me", batch.id, "openai")
    assert found is not None and found.status == "in_progress"

    async def rest() -> Answers:
        await run_of(store, found, answers := Answers()).run()
        return answers

    second = asyncio.run(rest())
    assert len(first.answered) == 11 and not set(first.answered) & set(second.asked)
    assert ids_of(store, found) == sorted(map(str, range(30)))
    assert found.counts.completed + found.counts.failed == 30


def test_a_full_disk_delays_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third write does not take all, the fourth nothing; nothing is lost or there twice."""
    store, batch = stored(tmp_path, 40)
    write, num_writes = os.pwrite, 0

    def failing(file: int, data: Any, offset: int) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 3:
            return write(file, data[: len(data) // 2], offset)
        if num_writes in (4, 5, 8):
            raise OSError(28, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr(results.os, "pwrite", failing)
    for module in (line_run, batch_run):
        monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(line_run, "COMMIT_S", 0.0)

    async def run() -> None:
        await run_of(store, batch, Answers()).run()

    asyncio.run(run())
    assert num_writes > 8 and ids_of(store, batch) == sorted(map(str, range(40)))


@pytest.mark.parametrize(("reason", "num_lines"), [("cancelled", 5), ("expired", 20)])
def test_the_rest_of_a_batch_that_ends_early(tmp_path: Path, reason: str, num_lines: int) -> None:
    store, batch = stored(tmp_path, 20, expires_at=2000 if reason == "cancelled" else 0)

    async def run() -> None:
        answers = Answers(stop_after=5)
        task = asyncio.create_task(run_of(store, batch, answers).run())
        await answers.is_stuck.wait()
        if reason == "cancelled":
            store.request_cancel(batch)
        await task

    asyncio.run(run())
    assert batch.status == reason and batch.counts.dropped == 15
    assert len(ids_of(store, batch)) == num_lines


def test_a_batch_that_is_deleted_while_it_runs(tmp_path: Path) -> None:
    store, batch = stored(tmp_path, 20)

    async def run() -> None:
        answers = Answers(stop_after=5)
        task = asyncio.create_task(run_of(store, batch, answers).run())
        await answers.is_stuck.wait()
        store.delete_batch(batch)
        await task

    asyncio.run(run())
    assert store.batch("me", batch.id, "openai") is None and not list(store.unfinished())


def test_batches_are_answered_in_turn(tmp_path: Path) -> None:
    """Of two batches that share two places, none is far ahead."""
    both = [stored(tmp_path, 40) for _ in range(2)]
    order: list[str] = []

    async def run() -> None:
        places = 0  # until both have read their first line
        gate = Gate(lambda: places)

        async def open_gate() -> None:
            nonlocal places
            while len(gate._waiting) < 2:
                await asyncio.sleep(0.001)
            places = 2

        def asking(name: str) -> Callable[..., Any]:
            async def answer(asked: InputLine, request_id: str) -> Answer:
                order.append(name)
                await asyncio.sleep(0)
                return Answer(200, request_id, b"{}")

            return answer

        runs = [BatchRun(s, b, RULES, asking(str(i)), gate) for i, (s, b) in enumerate(both)]
        await asyncio.gather(open_gate(), *(one.run() for one in runs))

    asyncio.run(run())
    together = "".join(order).strip("0").strip("1")  # the first may begin earlier
    counts = [abs(together[:i].count("0") - together[:i].count("1")) for i in range(len(together))]
    assert len(together) > 40 and max(counts) <= 4, "".join(order)


def test_a_gate_follows_its_limit() -> None:
    async def run() -> None:
        limit = 0
        gate = Gate(lambda: limit)
        waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        limit = 1
        await asyncio.wait_for(waiting[1], 5)
        assert not waiting[2].done()
        gate.leave()
        await asyncio.wait_for(waiting[2], 5)

    asyncio.run(run())


def test_a_journal_of_another_input_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("out", "errors", "journal")]
    Results(*paths, 5, "a").close()
    Results(*paths, 5, "a").close()
    with pytest.raises(OtherInputError, match="another input"):
        Results(*paths, 5, "b")


def test_limits_of_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "store", 1000, lambda: 1000.0)
    upload = store.new_file("me")
    upload.write(b"1" * 600)
    upload.finish("a", "batch", 50)
    (file,) = store.files("me")
    assert store.file("you", file.id) is None and store.file("me", "../x") is None
    upload = store.new_file("me")
    with pytest.raises(FullError, match="1000 bytes"):
        upload.write(b"1" * 600)
    upload.discard()
    assert list(store.files("me")) == [file]
    later = Store(store.root, 1000, lambda: 1050.0)
    assert not list(later.files("me"))
    later.sweep()
    assert later.used_bytes() == 0


def test_an_input_is_checked_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join([line("a"), line("b"), "", line("c")]).encode())
    assert check_input(path, RULES).num_requests == 3 and check_input(path, RULES).num_lines == 4
    path.write_text("\n".join([line("a"), line("b", text="1" * 2000), line("c"), line("a")]))
    (error,) = check_input(path, RULES).errors
    assert (error.line, error.code) == (2, "line_too_long")
    few = InputRules([URL], lambda name: None, 10_000, 3)
    assert [error.code for error in check_input(path, few).errors] == ["too_many_requests"]
    path.write_text("\n".join([line("a"), line("b"), line("a"), line("b")]))
    errors = check_input(path, RULES).errors
    assert [(error.line, error.code) for error in errors] == [
        (3, "duplicate_custom_id"),
        (4, "duplicate_custom_id"),
    ]
