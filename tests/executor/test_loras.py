"""Adapters of a rank, through the executor: reading, adding, removing, places; logits of adapted
models against models whose weights are merged.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from quire import InvalidParameterError, LoRARequest
from quire.executor.loras import Loras, start_reader
from quire.executor.worker import Worker
from quire.ipc.config import LoRAConfig
from quire.ipc.step_messages import SchedulerOutput
from quire.tests.executor.driver import Driver, Row, greedy, make_config, start_executor
from quire.tests.executor.on_device import use_forward
from quire.tests.gguf_checkpoints import write_gguf
from quire.tests.lora_adapters import (
    PROJECTIONS,
    adapted_weights,
    merge,
    random_pairs,
    write_gguf_adapter,
    write_peft,
)

REQUEST = LoRARequest("sql", 1, "/nowhere/sql")
PROMPTS = [[5, 9, 2, 7, 1, 8, 44, 3, 17], [11, 200, 30], [4] * 40]
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}


def start(model: Path, **arguments) -> Worker:
    return start_executor(model, **{**LORA, **arguments})


def start_gguf(checkpoint: Path, path: Path, **arguments) -> Worker:
    """With the weights of a GGUF file that was made of the checkpoint."""
    config = make_config(checkpoint, dtype="bfloat16", **arguments)
    model_config = msgspec.structs.replace(config.model_config, model=str(path))
    executor = Worker(msgspec.structs.replace(config, model_config=model_config))
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    return executor


def add(executor: Worker, number: int, path: Path) -> LoRARequest:
    request = LoRARequest(f"adapter-{number}", number, str(path))
    assert executor.add_lora(request)
    return request


def run(
    executor: Worker,
    requests: list[tuple[list[int], LoRARequest | None]],
    max_tokens: int = 6,
    chunk=None,
    params=None,
) -> list[Row]:
    driver = Driver(executor)
    rows = [
        driver.add(f"r{i}", prompt, params or greedy(logprobs=320), lora_request=adapter)
        for i, (prompt, adapter) in enumerate(requests)
    ]
    driver.run(max_tokens, chunk)
    leave = SchedulerOutput(0, [], [], [], [], freed_slots=[row.slot for row in rows])
    executor.execute_model(leave)
    assert [row.error for row in rows] == [None] * len(rows)
    return rows


def by_token(row: Row) -> np.ndarray:
    """[tokens, vocab_size]: the log-probabilities of each step, in the order of token ids."""
    out = []
    for ids, logprobs, _ in row.logprobs:
        values = np.zeros(int(ids.max()) + 1, np.float32)
        values[ids] = logprobs
        out.append(values)
    return np.array(out)


def bits(rows: list[Row]) -> list[tuple[list[int], bytes]]:
    return [(row.output, by_token(row).tobytes()) for row in rows]


def test_a_rank_without_adapters() -> None:
    loras = Loras(LoRAConfig(), torch.float32)
    assert loras.list() == set()
    assert loras.remove(1) is False
    with pytest.raises(InvalidParameterError, match="lora_request: needs an engine with"):
        loras.read(REQUEST)


def test_the_reader_has_no_further_threads_of_torch() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with start_reader() as reader, ThreadPoolExecutor(1) as other:
            assert reader.submit(torch.get_num_threads).result() == 1
            assert torch.get_num_threads() == other.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


def write_adapters(model: Path, directory: Path, count: int = 3) -> list[Path]:
    """Of different ranks and modules."""
    paths = []
    for seed in range(count):
        rank = (4, 8, 16)[seed % 3]
        modules = PROJECTIONS if seed != 1 else ("q_proj", "v_proj", "down_proj", "lm_head")
        pairs = random_pairs(adapted_weights(model, modules), rank, seed)
        paths.append(write_peft(directory / str(seed), pairs, rank))
    return paths


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2", "llama", "phi3", "gemma3_text", "granite", "olmo2"),
        *("qwen2_moe", "olmoe", "gpt_oss"),  # attention and shared experts
        *("deepseek_v3", "kimi_linear"),
    ],
)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_logits_are_those_of_merged_weights(tiny, tmp_path, kind, kernels):
    base = tiny(kind)
    modules = (*PROJECTIONS, "qkv_proj", "gate_up_proj", "lm_head", "embed_tokens")
    modules += "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"  # of latent attention
    modules += "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"  # of Kimi Delta Attention
    if kind == "gemma3_text":  # its head is tied
        modules = PROJECTIONS
    weights = adapted_weights(base, modules)
    # transformers saves the MLP of Kimi Linear's first layer under the name of its experts
    unnamed = ".experts.", "layers.0.block_sparse_moe."
    dense = {name: w for name, w in weights.items() if not any(one in name for one in unnamed)}
    pairs = random_pairs(dense, size=0.1)
    for name in [name for name in pairs if name.endswith("embed_tokens")]:
        a, b = pairs[name]  # of W [vocab_size, hidden_size], B A is the transposed change
        pairs[name] = b.t().contiguous(), a.t().contiguous()
    chosen = {} if kernels == "native" else {"kernels": {"add_lora": "reference"}}
    executor = start(base, **chosen)
    adapter = add(executor, 1, write_peft(tmp_path / "adapter", pairs))
    mine = run(executor, [(prompt, adapter) for prompt in PROMPTS])
    merged = start_executor(merge(base, tmp_path / "merged", pairs))
    theirs = run(merged, [(prompt, None) for prompt in PROMPTS])
    for one, other in zip(mine, theirs, strict=True):
        assert one.output == other.output
        np.testing.assert_allclose(by_token(one), by_token(other), atol=1e-4)
    changed = run(executor, [(PROMPTS[0], None)])
    assert not np.allclose(by_token(changed[0]), by_token(mine[0]), atol=1e-2)


def mixed(adapters: list[LoRARequest]) -> list[tuple[list[int], LoRARequest | None]]:
    """Rows of several adapters and of none, of equal and of different prompts."""
    first, second, third = adapters
    used = [None, first, second, None, first, third, second]
    return [(PROMPTS[i % 2], adapter) for i, adapter in enumerate(used)]


BITS = [
    ("float32", None, 1),
    ("float32", None, 2),
    ("bfloat16", None, 1),
    ("bfloat16", None, 2),
    ("bfloat16", "int8", 1),
    ("bfloat16", "int8", 2),
    ("bfloat16", "int4", 1),
]


@pytest.mark.parametrize(("dtype", "quantization", "num_threads"), BITS)
def test_a_row_has_the_bits_that_it_has_alone(tiny, tmp_path, dtype, quantization, num_threads):
    """Also with prompts in chunks; and rows without an adapter have those of the base."""
    model = tiny("qwen2")
    options = {"dtype": dtype, "quantization": quantization, "num_threads": num_threads}
    executor = start(model, **options)
    assert executor.runner.program is not None  # recorded
    paths = write_adapters(model, tmp_path)
    requests = mixed([add(executor, n, path) for n, path in enumerate(paths, 1)])
    together = run(executor, requests)
    for row, request in zip(together, requests, strict=True):
        assert bits(run(executor, [request])) == bits([row])
    assert bits(run(executor, requests, chunk=lambda row: 4)) == bits(together)
    base = start_executor(model, **options)
    without = [i for i, (_, adapter) in enumerate(requests) if adapter is None]
    expected = run(base, [requests[i] for i in without])
    assert bits([together[i] for i in without]) == bits(expected)
    adapted = [row.output for row, (_, adapter) in zip(together, requests) if adapter is not None]
    assert adapted[0] not in [row.output for row in expected]


def test_a_row_over_blocks_of_a_gguf_file_has_the_bits_that_it_has_alone(tiny, tmp_path):
    model, path = tiny("llama"), tmp_path / "model.gguf"
    write_gguf(path, model, "Q8_0")
    executor = start_gguf(model, path, num_threads=2, **LORA)
    paths = write_adapters(model, tmp_path)
    requests = mixed([add(executor, n, path) for n, path in enumerate(paths, 1)])
    together = run(executor, requests)
    for row, request in zip(together, requests, strict=True):
        assert bits(run(executor, [request])) == bits([row])
    expected = run(start_gguf(model, path, num_threads=2), requests[:1])
    assert bits(together[:1]) == bits(expected)


def test_logits_are_those_of_pefts_own_merge(tiny, oracle, tmp_path):
    """Needs peft, which the tests do not install."""
    peft = pytest.importorskip("peft")
    model = tiny("qwen2")
    modules = (*PROJECTIONS, "lm_head")
    config = {
        "use_rslora": True,
        "alpha_pattern": {"q_proj": 5, r"layers\.1\.mlp\.up_proj": 9},
        "lora_alpha": 4,
    }
    pairs = random_pairs(adapted_weights(model, modules), size=0.1)
    directory = write_peft(tmp_path, pairs, **config)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(oracle(model)), directory)
    merged = theirs.merge_and_unload()
    executor = start(model)
    (row,) = run(executor, [(PROMPTS[0], add(executor, 1, directory))], 8)
    with torch.inference_mode():
        tokens = torch.tensor([PROMPTS[0] + row.output])
        expected = merged(tokens).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    np.testing.assert_allclose(by_token(row), expected, atol=1e-4)
    assert row.output == expected.argmax(-1).tolist()


def test_op_by_op_gives_the_bits_of_the_recorded_program(tiny, tmp_path):
    model = tiny("llama")
    results = []
    for is_recorded in (True, False):
        executor = start(model, dtype="bfloat16")
        if not is_recorded:
            use_forward(executor, None)
        paths = write_adapters(model, tmp_path / str(is_recorded))
        requests = mixed([add(executor, n, path) for n, path in enumerate(paths, 1)])
        results.append(bits(run(executor, requests)))
    assert results[0] == results[1]


def test_bursts_give_the_bits_of_single_steps(tiny, tmp_path):
    model = tiny("qwen2")
    executor = start(model)
    paths = write_adapters(model, tmp_path)
    requests = mixed([add(executor, n, path) for n, path in enumerate(paths, 1)])
    single = [row.output for row in run(executor, requests, params=greedy())]
    driver = Driver(executor)
    rows = [
        driver.add(f"r{i}", prompt, greedy(), lora_request=adapter)
        for i, (prompt, adapter) in enumerate(requests)
    ]
    driver.run(1)
    driver.step({row.request_id: 1 for row in rows}, {row.request_id: 4 for row in rows})
    assert [row.output for row in rows] == single


def test_b_of_zeros_gives_the_bits_of_the_base(tiny, tmp_path):
    model = tiny("qwen2")
    pairs = random_pairs(adapted_weights(model, (*PROJECTIONS, "lm_head")))
    zero = {name: (a, torch.zeros_like(b)) for name, (a, b) in pairs.items()}
    executor = start(model, dtype="bfloat16")
    adapter = add(executor, 1, write_peft(tmp_path, zero))
    mine = run(executor, [(prompt, adapter) for prompt in PROMPTS])
    assert bits(mine) == bits(run(executor, [(prompt, None) for prompt in PROMPTS]))


def test_prompt_logprobs_are_those_of_merged_weights(tiny, tmp_path):
    model = tiny("qwen2")
    pairs = random_pairs(adapted_weights(model, ("down_proj", "lm_head")), size=0.1)
    executor = start(model)
    adapter = add(executor, 1, write_peft(tmp_path / "adapter", pairs))
    params = greedy(prompt_logprobs=0)
    (mine, base) = run(executor, [(PROMPTS[0], adapter), (PROMPTS[0], None)], 1, params=params)
    merged = start_executor(merge(model, tmp_path / "merged", pairs))
    (theirs,) = run(merged, [(PROMPTS[0], None)], 1, params=params)

    def values(row: Row) -> list[float]:
        return [float(logprobs[0]) for _, logprobs, _ in row.prompt_logprobs.values()]

    np.testing.assert_allclose(values(mine), values(theirs), atol=1e-4)
    assert not np.allclose(values(mine), values(base), atol=1e-2)


def test_a_gguf_adapter_gives_the_bits_of_the_same_in_pefts_format(tiny, tmp_path):
    model = tiny("llama")
    pairs = random_pairs(adapted_weights(model))
    executor = start(model)
    peft = add(executor, 1, write_peft(tmp_path / "peft", pairs))
    path = write_gguf_adapter(tmp_path / "adapter.gguf", "llama", pairs, 16.0, (4, 2))
    gguf = add(executor, 2, path)
    mine = run(executor, [(PROMPTS[0], gguf)])
    assert bits(mine) == bits(run(executor, [(PROMPTS[0], peft)]))


def test_more_adapters_than_places_take_turns(tiny, tmp_path):
    """The least recently used one that no slot uses leaves its place."""
    model = tiny("qwen2")
    executor = start(model, max_loras=2)
    loras = executor.loras
    paths = write_adapters(model, tmp_path, 4)
    adapters = [add(executor, n, path) for n, path in enumerate(paths, 1)]
    alone = [bits(run(executor, [(PROMPTS[0], adapter)])) for adapter in adapters]
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        for i in order:
            assert bits(run(executor, [(PROMPTS[0], adapters[i])])) == alone[i]
    assert {1, 2, 3, 4} == executor.list_loras()
    driver = Driver(executor)
    rows = [
        driver.add(f"r{i}", PROMPTS[0], lora_request=adapter) for i, adapter in enumerate(adapters)
    ]
    driver.step({"r0": 9, "r1": 9, "r2": 9})
    assert [row.error and str(row.error) for row in rows] == [
        None,
        None,
        "max_loras: 2 adapters are in use, and a request has another",
        None,
    ]
    driver.free(rows[0])
    driver.free(rows[2])
    driver.step({"r1": 1, "r3": 9})
    assert rows[3].error is None and sorted(loras._places.values()) == [2, 4]


def test_adapters_that_are_not_there(tiny, tmp_path):
    model = tiny("qwen2")
    executor = start(model)
    request = LoRARequest("gone", 7, str(tmp_path))
    driver = Driver(executor)
    row = driver.add("r", PROMPTS[0], lora_request=request)
    driver.step({"r": 9})
    assert str(row.error) == "lora_request: adapter 7 is not loaded"
    with pytest.raises(InvalidParameterError, match="lora_path: .* has no adapter_config.json"):
        executor.add_lora(request)
    assert executor.list_loras() == set() and executor.remove_lora(7) is False
    plain = start_executor(model)
    driver = Driver(plain)
    row = driver.add("r", PROMPTS[0], lora_request=request)
    driver.step({"r": 9})
    assert str(row.error) == "lora_request: needs an engine with enable_lora=True"


def test_adapters_stay_when_the_weights_are_replaced(tiny, tmp_path):
    model, other = tiny("qwen2"), tiny("qwen2", seed=1)
    executor = start(model)
    (path,) = write_adapters(model, tmp_path, 1)
    adapter = add(executor, 1, path)
    before = bits(run(executor, [(PROMPTS[0], adapter)]))
    executor.collective_rpc("load_weights", str(other))
    assert bits(run(executor, [(PROMPTS[0], adapter)])) != before
    executor.collective_rpc("sleep", ["weights", "kv_cache"])
    executor.collective_rpc("load_weights", str(model))
    executor.collective_rpc("wake_up", ["weights", "kv_cache"])
    assert bits(run(executor, [(PROMPTS[0], adapter)])) == before
    assert executor.remove_lora(1) and executor.list_loras() == set()
