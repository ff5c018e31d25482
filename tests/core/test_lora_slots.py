"""At most max_loras adapters are in use; a request that waits for its own is overtaken a bounded
number of times.
"""

import pytest
from quire.core.lora_slots import MAX_OVERTAKES, Adapter
from quire.ipc.lora import LoRARequest
from quire.tests.core.scheduling.loop import Loop, distinct


class LoraLoop(Loop):
    """A loop whose adapters, named by letters, are all in memory."""

    def __init__(self, **arguments):
        super().__init__(enable_lora=True, **arguments)
        self.adapters: dict[str, Adapter] = {}

    def use(self, request_id: str, name: str, max_tokens: int = 4, **fields) -> None:
        if name not in self.adapters:
            number = len(self.adapters) + 1
            request = LoRARequest(name, number, f"/adapters/{name}")
            adapter = self.adapters[name] = Adapter(request, number)
            adapter.number = number
            self.executor.read_lora(request)
            self.executor.add_lora(request)
        self.adapter = self.adapters[name]
        self.add(request_id, distinct(len(self.tokens), 5), max_tokens, **fields)

    def add(self, *args, **fields) -> None:
        add_request = self.scheduler.add_request
        adapter, self.adapter = getattr(self, "adapter", None), None

        def with_adapter(message, client_index):
            add_request(message, client_index, adapter=adapter)

        self.scheduler.add_request = with_adapter
        try:
            super().add(*args, **fields)
        finally:
            self.scheduler.add_request = add_request


def test_others_wait_and_do_not_block_those_behind_them() -> None:
    loop = LoraLoop(max_loras=1)
    loop.use("a1", "a")
    loop.use("b1", "b")
    loop.use("a2", "a")
    loop.add("plain", distinct(3, 5), 2)
    assert loop.step().keys() == {"a1", "a2", "plain"}
    assert loop.state("waiting") == ["b1"]
    assert loop.scheduler.lora_slots.wanted == [loop.adapters["b"]]
    loop.run()
    assert loop.ends.keys() == {"a1", "a2", "b1", "plain"}


def test_max_loras_adapters_run_together() -> None:
    loop = LoraLoop(max_loras=2)
    for name in "abc":
        loop.use(name, name)
    assert loop.step().keys() == {"a", "b"}
    loop.run()


def test_the_runner_is_told_the_executors_number() -> None:
    loop = LoraLoop(max_loras=2)
    loop.use("one", "a", 1)
    loop.use("two", "b", 1)
    loop.add("plain", distinct(3, 5), 1)
    loop.step()
    new = {r.request_id: r.lora_request for r in loop.executor.steps[0].new_requests}
    assert new["one"] == LoRARequest("a", 1, "/adapters/a")
    assert new["two"].lora_int_id == 2
    assert new["plain"] is None


@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_steady_stream_of_others_does_not_starve_an_adapter(max_loras: int) -> None:
    loop = LoraLoop(max_loras=max_loras, max_num_seqs=4)
    names, num_started = "ab"[:max_loras], 0
    for name in names:
        loop.use(f"first {name}", name, 5)
    loop.step()
    loop.use("patient", "z", 2)
    for i in range(400):  # in each step another request of an adapter in use
        name = names[i % max_loras]
        loop.use(f"{i}", name, 5)
        loop.step()
        if "patient" in loop.tokens:
            break
        num_started = sum(len(tokens) > 0 for tokens in loop.tokens.values()) - max_loras
    assert "patient" in loop.tokens, "it never started"
    # those that ran when it was its turn finish; with two adapters the other one goes on
    assert num_started <= (MAX_OVERTAKES + 4) * max_loras
    loop.run()


def test_adapters_in_turn_share_a_batch() -> None:
    """With one place, requests of two adapters that alternate still run several at a time."""
    loop = LoraLoop(max_loras=1, max_num_seqs=8)
    for i in range(32):
        loop.use(f"{i}", "ab"[i % 2], 4)
    num_steps = 0
    while loop.scheduler.has_unfinished_requests():
        loop.step()
        num_steps += 1
    assert num_steps <= 32 * 4 / 3


def test_a_pass_over_a_long_queue_is_not_repeated_until_something_changes() -> None:
    loop = LoraLoop(max_loras=1)
    loop.use("a", "a", 8)
    for i in range(50):
        loop.use(f"b{i}", "b", 1)
    loop.step()
    assert not loop.scheduler.lora_slots.is_stuck  # "a" has just started
    loop.step()
    assert loop.scheduler.lora_slots.is_stuck
    loop.add("plain", distinct(3, 5), 2)
    assert "plain" in loop.step()
    loop.run()
    assert len(loop.ends) == 52


def test_no_room_is_made_for_a_request_whose_adapter_has_no_place() -> None:
    loop = LoraLoop(max_loras=1, max_num_seqs=2)
    loop.use("a1", "a", 30)
    loop.use("a2", "a", 30)
    loop.step()
    loop.use("b", "b", 1, client_index=1)  # another owner, which has nothing so far
    for _ in range(5):
        assert loop.step().keys() == {"a1", "a2"}
    loop.use("a3", "a", 1, client_index=2)  # a third one, whose adapter is in use
    loop.run()
    assert loop.scheduler.counters.num_preemptions <= 1
