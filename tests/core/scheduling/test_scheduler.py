"""The scheduler: chunks within the budget, reproducible schedules, counters."""

from quire.tests.core.scheduling.loop import Loop, distinct


def test_chunks_of_the_reference():
    loop = Loop(max_model_len=1024, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    for i in range(3):
        loop.add(str(i), distinct(i, 800))
    assert loop.step() == {"0": 400, "1": 400, "2": 224}
    assert loop.step() == {"0": 400, "1": 400, "2": 224}
    assert loop.step() == {"0": 1, "1": 1, "2": 352}
    assert loop.step() == {"0": 1, "1": 1, "2": 1}


def test_chunks_of_the_budget_alone():
    loop = Loop(max_model_len=1024, max_num_batched_tokens=1024)
    for i in range(3):
        loop.add(str(i), distinct(i, 800))
    assert [loop.step() for _ in range(3)] == [
        {"0": 800, "1": 224},
        {"0": 1, "1": 576, "2": 447},
        {"0": 1, "1": 1, "2": 353},
    ]


def test_an_idle_scheduler_schedules_nothing():
    loop = Loop()
    assert loop.step() == {} and loop.executor.steps == []


def test_equal_arrivals_give_equal_schedules():
    def schedules() -> list:
        loop = Loop(
            num_gpu_blocks_override=17, max_num_batched_tokens=64, scheduling_policy="priority"
        )
        for i in range(20):
            loop.add(str(i), distinct(i % 5, 30 + i), max_tokens=25, priority=i % 3)
        loop.run()
        return loop.executor.steps

    assert schedules() == schedules()


def test_counters():
    loop = Loop()
    loop.add("a", distinct(0, 20), max_tokens=5)
    loop.add("b", distinct(1, 10), max_tokens=3)
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (
        2,
        0,
        257,
        253,
    )
    loop.run()
    stats = loop.scheduler.stats()
    assert (
        stats.num_prompt_tokens,
        stats.num_generation_tokens,
        stats.num_preemptions,
        stats.num_recomputed_tokens,
    ) == (30, 8, 0, 0)
