"""Ranks as processes: the executor's interface, equal tokens, and what a rank's failure does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from quire.core.engine_core import EngineCore
from quire.executor.executor import Executor, make_executor
from quire.executor.ranks.local_ranks import LocalRanks
from quire.executor.ranks.messages import StepDone
from quire.executor.ranks.multiproc_executor import MultiprocExecutor
from quire.ipc.config import EngineConfig
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.lora import LoRARequest
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.ipc.step_messages import SchedulerOutput
from quire.kernels.cpu.native.library import library
from quire.tests.core.engine_loop import Answer, collect, greedy, make_request, run, step
from quire.tests.executor.driver import Driver, generate, make_config, start_executor
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.lora_adapters import PROJECTIONS, adapted_weights, random_pairs, write_peft

LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}


def start(config: EngineConfig) -> MultiprocExecutor:
    executor = make_executor(config)
    assert isinstance(executor, MultiprocExecutor)
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    return executor


@pytest.fixture(scope="module")
def ranks(tiny) -> Iterator[MultiprocExecutor]:
    executor = start(make_config(tiny("qwen2"), tensor_parallel_size=2, **LORA))
    yield executor
    executor.shutdown()


@pytest.fixture
def own_core(tiny) -> Iterator[EngineCore]:
    core = EngineCore(make_config(tiny("qwen2"), pipeline_parallel_size=2))
    core.scheduler.limits.least_samples = 1
    yield core
    core.shutdown()
    core.shutdown()


def pids_of(executor: Executor) -> list[int]:
    assert isinstance(executor, MultiprocExecutor) and isinstance(executor.ranks, LocalRanks)
    return [process.pid for process in executor.ranks.processes]


def are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_tokens_equal_those_of_one_rank(ranks, tiny) -> None:
    one = start_executor(tiny("qwen2"))
    prompts, params = [[1, 2, 3], [7] * 40, [5, 6]], SamplingParams(temperature=0.9, seed=3)
    several = [row.output for row in generate(ranks, prompts, 20, params)]
    assert several == [row.output for row in generate(one, prompts, 20, params)]
    assert several == [row.output for row in generate(ranks, prompts, 20, params)]


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("kind", "size", "arguments"),
    [
        ("qwen2", 2, {}),
        ("llama", 2, {"dtype": "bfloat16", "quantization": "int8"}),
        pytest.param("gemma3_text", 2, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("qwen3", 3, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {"quantization": "int4"}, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", 2, {"quantization": "int8"}, marks=pytest.mark.slow),
        ("granitemoehybrid", 2, {"dtype": "bfloat16"}),
        pytest.param("qwen3_5_moe_text", 2, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("olmo2", 2, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("gemma3n_text", 2, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("lfm2", 4, {"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param("qwen2", 2, {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_one_native_call_has_the_bits_of_single_operations(tiny, kind, size, arguments) -> None:
    """Ranks that are threads of one process run operation by operation."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3} if size == 3 else {}
    if kind == "granitemoehybrid":  # ranks norm features of others, too
        shape = {"mamba_n_groups": 1}
    model = tiny(kind, **shape)
    arguments = dict(arguments)
    stages = arguments.pop("pipeline_parallel_size", 1)
    one_by_one = RankThreads.of(model, size, stages, **arguments)
    assert all(rank.runner.program is None for rank in one_by_one.ranks)
    parallel = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    native = start(make_config(model, **parallel, **arguments))
    try:
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=3, logprobs=3)
            prompts = [[1, 2, 3], [7] * 40, [5, 6]]
            for mine, theirs in zip(
                generate(native, prompts, 12, params), generate(one_by_one, prompts, 12, params)
            ):
                assert mine.output == theirs.output
                assert [p[1].tolist() for p in mine.logprobs] == [
                    p[1].tolist() for p in theirs.logprobs
                ]
    finally:
        native.shutdown()
        one_by_one.shutdown()


def test_every_rank_has_its_part_of_an_adapter(ranks, tiny, tmp_path) -> None:
    one, modules = start_executor(tiny("qwen2"), **LORA), (*PROJECTIONS, "lm_head")
    pairs = random_pairs(adapted_weights(tiny("qwen2"), modules), size=0.1)
    adapter = LoRARequest("a", 1, str(write_peft(tmp_path / "a", pairs)))
    stamp = ranks.read_lora(adapter).result(60)
    assert stamp == "|".join([one.read_lora(adapter).result(60)] * 2)
    tokens = []
    for executor in (ranks, one):
        assert executor.add_lora(adapter) and executor.list_loras() == {1}
        driver = Driver(executor)
        rows = [driver.add("r", [5, 9, 2], lora_request=adapter), driver.add("s", [5, 9, 2])]
        driver.run(12)
        slots = [row.slot for row in rows]
        executor.execute_model(SchedulerOutput(0, [], [], [], [], freed_slots=slots))
        tokens.append([row.output for row in rows])
        assert executor.remove_lora(1) and executor.list_loras() == set()
    assert tokens[0] == tokens[1] and tokens[0][0] != tokens[0][1]
    with pytest.raises(InvalidParameterError, match="lora_path: .* has no adapter_config.json"):
        ranks.read_lora(LoRARequest("b", 2, str(tmp_path))).result(60)
    assert ranks.remove_lora(2)  # what was read, with its failure


def test_several_steps_are_one_call(ranks, tiny) -> None:
    core, one = EngineCore(ranks.config, ranks), start_executor(tiny("qwen2"))
    prompts, num_steps = [[i + 1, 2, 3] for i in range(4)], 0
    for i, prompt in enumerate(prompts):
        core.add_request(make_request(f"r{i}", prompt, greedy(max_tokens=33)))
    answers: dict[str, Answer] = {}
    while core.has_work():
        for outputs in step(core).values():
            collect(outputs, answers)
        num_steps += 1
    wanted = generate(one, prompts, 33)
    assert [answers[f"r{i}"].tokens for i in range(4)] == [row.output for row in wanted]
    if library is not None:
        assert ranks.burst_weights_bytes > 0 and num_steps < 20


def test_large_results(ranks) -> None:
    """Log-probabilities of all tokens take several slots of the ring."""
    params = SamplingParams(temperature=0.0, seed=0, logprobs=300, prompt_logprobs=300)
    [row] = generate(ranks, [[9] * 200], 5, params)
    assert len(row.prompt_logprobs) == 199 and len(row.logprobs[0][0]) == 301


def test_steps_may_be_submitted_before_earlier_results(ranks) -> None:
    driver = Driver(ranks)
    row = driver.add("r", [1, 2, 3])
    driver.step({"r": 3})
    steps = [
        SchedulerOutput(10 + i, [row.slot], [1], [3 + i], [[]], freed_slots=[]) for i in range(5)
    ]
    pending = [ranks.submit_model(step) for step in steps]
    tokens = [one.result().token_ids[0] for one in pending]
    ranks.execute_model(SchedulerOutput(20, [], [], [], [], freed_slots=[row.slot]))
    assert row.output + tokens == generate(ranks, [[1, 2, 3]], 6)[0].output


def test_calls_reach_every_rank(ranks) -> None:
    usage = ranks.collective_rpc("memory_usage")
    assert len(usage) == 2 and usage[0]["weights_bytes"] == usage[1]["weights_bytes"] > 0
    ranks.execute_dummy_batch()
    ranks.check_health()
    with pytest.raises(InvalidParameterError, match="method: must be one of"):
        ranks.collective_rpc("shutdown")
    with pytest.raises(InvalidParameterError, match="args: check_health does not take"):
        ranks.collective_rpc("check_health", 1)


def test_sleep_wake_and_other_weights(ranks, tiny) -> None:
    before = generate(ranks, [[1, 2, 3]], 8)[0].output
    ranks.collective_rpc("sleep", ["kv_cache", "weights"])
    with pytest.raises(RuntimeError, match="the worker sleeps"):
        ranks.check_health()
    ranks.collective_rpc("wake_up", ["weights"])
    ranks.collective_rpc("wake_up", ["kv_cache"])
    assert generate(ranks, [[1, 2, 3]], 8)[0].output == before
    with pytest.raises(ModelLoadError):
        ranks.collective_rpc("load_weights", "/nowhere")
    ranks.collective_rpc("load_weights", str(tiny("qwen2", seed=7)))
    assert generate(ranks, [[1, 2, 3]], 8)[0].output != before
    ranks.collective_rpc("load_weights", str(tiny("qwen2")))
    assert generate(ranks, [[1, 2, 3]], 8)[0].output == before


def test_a_trace_has_what_each_rank_did(ranks) -> None:
    ranks.start_trace(2)
    generate(ranks, [[1, 2, 3]], 2)
    trace = ranks.end_trace()
    assert [len(some) for some in trace.steps.values()] == [2, 2]
    assert all(rank.kernels for some in trace.steps.values() for rank in some)
    assert trace.model_class == "Qwen2ForCausalLM"
    if library is not None:  # a step is one native call, with what ranks exchange in it
        for rank in (rank for some in trace.steps.values() for rank in some):
            ops = [kernel.op for kernel in rank.kernels]
            assert (ops.count("all_reduce"), ops.count("all_gather")) == (7, 1)
            assert all(kernel.implementation.startswith("native") for kernel in rank.kernels)


def test_a_grammar_is_checked_by_every_rank(ranks) -> None:
    ranks.check_grammar(StructuredOutputsParams(regex="[ab]+")).result(60)
    with pytest.raises(InvalidParameterError):
        ranks.check_grammar(StructuredOutputsParams(regex="(")).result(60)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded(tiny, tmp_path) -> None:
    (tmp_path / "config.json").write_bytes((tiny("qwen2") / "config.json").read_bytes())
    executor = make_executor(make_config(tmp_path, tensor_parallel_size=2))
    pids = pids_of(executor)
    with pytest.raises(ModelLoadError, match="neither model.safetensors nor"):
        executor.load_model(lambda stage, fraction: None)
    # the error of one rank, or that of all
    with pytest.raises(RuntimeError, match="the worker has no model"):
        executor.execute_model(SchedulerOutput(1, [0], [1], [0], [[1]]))
    executor.shutdown()
    assert are_gone(pids)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has the GPUs")
def test_a_machine_that_lacks_the_gpus(tiny) -> None:
    before = psutil.Process().children()
    with pytest.raises(InvalidParameterError, match="device: cuda: PyTorch|needs a GPU of this"):
        MultiprocExecutor(make_config(tiny("qwen2"), tensor_parallel_size=2, device="cuda"))
    assert psutil.Process().children() == before


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_with_steps_in_flight(own_core, tiny, rank: int) -> None:
    executor = own_core.executor
    pids, died = pids_of(executor), []

    def kill() -> None:
        time.sleep(0.1)
        died.append(time.monotonic())
        os.kill(pids[rank], signal.SIGKILL)

    def add(max_tokens: int) -> None:
        for i in range(4):
            own_core.add_request(make_request(f"r{i}", [i + 1, 2], greedy(max_tokens=max_tokens)))

    add(9)
    answers: dict[str, Answer] = {}
    for _ in range(5):
        for outputs in step(own_core).values():
            collect(outputs, answers)
        assert own_core.has_step_in_flight
        # a call waits for the steps that run, and their results are still there
        assert own_core.call_utility("status", [])["experts"] is not None
    run(own_core, {0: answers})
    wanted = generate(start_executor(tiny("qwen2")), [[i + 1, 2] for i in range(4)], 9)
    assert [answers[f"r{i}"].tokens for i in range(4)] == [row.output for row in wanted]
    threading.Thread(target=kill).start()
    with pytest.raises(RuntimeError, match=rf"rank {rank} of 2 \(pid {pids[rank]}\) was killed by"):
        while True:
            if not own_core.has_work():
                add(200)
            own_core.step_fn()
    assert time.monotonic() - died[0] < 60  # step_timeout_s is 300
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        executor.collective_rpc("memory_usage")
    own_core.shutdown()
    assert are_gone(pids)


@pytest.mark.slow
def test_a_rank_that_others_wait_for_is_killed(tiny) -> None:
    executor = start(make_config(tiny("qwen2"), tensor_parallel_size=2))
    pids = pids_of(executor)
    died: list[float] = []

    def kill() -> None:
        os.kill(pids[1], signal.SIGSTOP)  # so that the other one waits within a step
        time.sleep(0.3)
        died.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    timer = threading.Timer(0.1, kill)
    timer.start()
    with pytest.raises(RuntimeError, match=rf"rank 1 of 2 \(pid {pids[1]}\) was killed by SIGK"):
        while True:
            generate(executor, [[1, 2, 3]], 20)
    assert time.monotonic() - died[0] < 60  # step_timeout_s is 300
    timer.join()
    executor.shutdown()
    assert are_gone(pids)


@pytest.mark.slow
@pytest.mark.skipif(library is None, reason="only native code waits for so long, and no longer")
def test_a_rank_that_is_stopped_is_named(tiny) -> None:
    executor = start(make_config(tiny("qwen2"), tensor_parallel_size=2, step_timeout_s=2.0))
    pids, driver = pids_of(executor), Driver(executor)
    driver.add("r", [1, 2, 3])
    os.kill(pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of 2 failed: .*: rank 1 of those that share"):
        driver.step({"r": 3})
    assert 1.8 <= time.monotonic() - begin < 60
    executor.shutdown()
    assert are_gone(pids)


@pytest.mark.slow
def test_nothing_survives_the_engines_process(tiny, tmp_path) -> None:
    """The kernel ends the ranks of a process that is killed."""
    script = (
        "import sys, time; from quire.tests.executor.driver import make_config;"
        "from quire.executor.executor import Executor, make_executor;"
        "executor = make_executor(make_config(sys.argv[1], tensor_parallel_size=2));"
        "print(*[p.pid for p in executor.ranks.processes], flush=True); time.sleep(100)"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", script, str(tiny("qwen2"))], stdout=subprocess.PIPE
    )
    assert program.stdout is not None
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == 2 and not are_gone(pids)
    program.kill()
    program.communicate()
    deadline = time.monotonic() + 60
    while not are_gone(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert are_gone(pids)


def test_ranks_with_other_tokens_end_the_engine(ranks, monkeypatch) -> None:
    """As from a user's processor that draws random numbers."""
    collect = ranks._collect

    def other(**arguments) -> list:
        first, second = collect(**arguments)
        changed = StepDone(second.digest + 1) if isinstance(second, StepDone) else second
        return [first, changed]

    monkeypatch.setattr(ranks, "_collect", other)
    with pytest.raises(RuntimeError, match="the ranks sampled different tokens"):
        generate(ranks, [[1, 2, 3]], 2)
    with pytest.raises(RuntimeError, match="the ranks sampled different tokens"):
        ranks.check_health()
    ranks._failure = None
    os.eventfd_read(ranks.ranks._interrupt_fd)
    monkeypatch.undo()
    ranks.check_health()


def test_a_rank_that_dies_between_steps_is_noticed(ranks) -> None:
    """It is the last one to use `ranks`."""
    causes: list[str] = []
    told = threading.Event()

    def on_failure(cause: str) -> None:
        causes.append(cause)
        told.set()

    ranks.watch(on_failure)
    check = ranks.check_grammar(StructuredOutputsParams(regex="[ab]"))
    check.result(60)
    os.kill(pids_of(ranks)[1], signal.SIGKILL)
    assert told.wait(60)
    assert "rank 1 of 2" in causes[0] and "SIGKILL" in causes[0] and len(causes) == 1
    ranks.watch(on_failure)
    assert len(causes) == 2
