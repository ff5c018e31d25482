"""Conversations that the KV cache has no room for, end to end: the same bits as with a large cache,
over restarts, from a damaged file, and apart for tenants, adapters and models.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from quire import LLM, EngineArgs, InvalidParameterError, LLMEngine, LoRARequest, SamplingParams
from quire.executor import worker
from quire.frontend.model_info.model_files import find_model_directory
from quire.ipc.kv_events import DISK, GPU, KVEventsConfig
from quire.ipc.models.ranks import row_of
from quire.kernels.cpu.native.library import library
from quire.tests.client_forms import closing as closing_engine
from quire.tests.client_forms import make_engine
from quire.tests.engine_device import engine_device
from quire.tests.kv_subscriber import Subscriber
from quire.tests.lora_adapters import adapted_weights, random_pairs, write_peft
from quire.tests.tiny_models import save_tiny_model
from safetensors.torch import load_file, save_file

BLOCK_SIZE, FEW_BLOCKS = 8, 26  # one sequence of 192 tokens
SETTINGS = dict(
    dtype="bfloat16",
    max_model_len=192,
    block_size=BLOCK_SIZE,
    max_num_seqs=4,
    num_gpu_blocks_override=FEW_BLOCKS,
    max_num_batched_tokens=64,
)
LARGE = dict(num_gpu_blocks_override=2000)


def conversations(seed: int, count: int, turns: int = 3) -> list[list[int]]:
    """Prompts, in which conversations alternate and grow."""
    rng = random.Random(seed)
    texts = [rng.choices(range(300, 1000), k=rng.randint(10, 60)) for _ in range(count)]
    prompts = []
    for _ in range(turns):
        rng.shuffle(texts)
        for text in texts:
            prompts.append(text.copy())
            text += rng.choices(range(300, 1000), k=rng.randint(1, 30))
    return prompts


def run(
    engine: LLMEngine,
    prompts: list[list[int]],
    at_once: int = 3,
    cache_salt: str | None = None,
    **fields,
) -> list[tuple]:
    """The tokens and log-probabilities of each prompt."""
    results = []
    for first in range(0, len(prompts), at_once):
        for i, prompt in enumerate(prompts[first : first + at_once], start=first):
            params = SamplingParams(
                temperature=i % 2 * 1.0, seed=i, max_tokens=6, logprobs=1, ignore_eos=True
            )
            request = {"prompt_token_ids": prompt, "cache_salt": cache_salt}
            engine.add_request(f"r{i}", request, params, **fields)
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.error is None, output.error
                found[output.request_id] = output
        for i in range(first, min(first + at_once, len(prompts))):
            [completion] = found[f"r{i}"].outputs
            logprobs = [
                sorted((token, value.logprob) for token, value in position.items())
                for position in completion.logprobs
            ]
            results.append((tuple(completion.token_ids), logprobs))
    return results


def reloaded(engine: LLMEngine) -> int:
    return engine.get_metrics()["num_blocks_reloaded"]


def file_in(folder: Path) -> Path:
    [file] = folder.glob("*.kv")
    return file


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"dtype": "float32", "preemption_mode": "swap", "async_scheduling": True},
        {"quantization": "int8", "speculative_config": {"method": "auto"}, "max_num_seqs": 16},
    ],
    ids=str,
)
def test_the_same_bits_as_a_large_cache(settings, tmp_path):
    prompts = conversations(len(str(settings)), 9)
    with closing_engine(make_engine(**SETTINGS | settings | LARGE)) as engine:
        expected = run(engine, prompts)
    for place in ({}, {"kv_offloading_path": str(tmp_path)}):
        offload = dict(kv_offloading_size=0.05, **place)
        with closing_engine(make_engine(**SETTINGS | settings | offload)) as engine:
            assert run(engine, prompts) == expected
            assert reloaded(engine) > 20
            assert engine.call_utility("check_integrity")


@pytest.mark.skipif(library is None, reason="torch's kernels do not promise the same bits")
@pytest.mark.parametrize(
    "kind",
    [
        "gemma3_text",
        "lfm3",  # with states
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("gemma4_text", marks=pytest.mark.slow),  # layers of different sizes
    ],
)
def test_windows_get_what_they_see(kind, tmp_path):
    """Blocks of all groups of layers are kept; a hit loads the last ones of a group with a
    window.
    """
    sizes = {"vocab_size": 1000}
    if kind == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = 1000
    model = save_tiny_model(tmp_path / kind, kind, dtype="bfloat16", **sizes)
    settings = SETTINGS | dict(model=str(model), state_checkpoint_interval=16)
    settings |= dict(num_gpu_blocks_override=60, async_scheduling=False)
    prompts = conversations(10, 8)
    with closing_engine(make_engine(**settings | LARGE)) as engine:
        assert len(engine.client._engine.core.executor.kv_cache_windows) > 1
        expected = run(engine, prompts)
    for place in ({}, {"kv_offloading_path": str(tmp_path / "kv")}):
        for is_second in (False, True)[: 1 + len(place)]:
            offload = dict(kv_offloading_size=0.05, **place)
            with closing_engine(make_engine(**settings | offload)) as engine:
                assert run(engine, prompts) == expected
                metrics = engine.get_metrics()
                assert metrics["num_blocks_reloaded"] > 20
                if is_second:  # all that was computed before the restart
                    assert metrics["num_prompt_tokens"] <= len(prompts) * 3 * BLOCK_SIZE
                assert engine.call_utility("check_integrity")


def test_a_restart_keeps_them_and_two_engines_share_them(tmp_path):
    settings = SETTINGS | dict(kv_offloading_size=0.05, kv_offloading_path=str(tmp_path))
    prompts = conversations(1, 6)
    with closing_engine(make_engine(**SETTINGS | LARGE)) as engine:
        expected = run(engine, prompts)
    with closing_engine(make_engine(**settings)) as engine:
        assert run(engine, prompts) == expected
        first = reloaded(engine)
    size = file_in(tmp_path).stat().st_size
    assert 0.04 * 2**30 < size <= 0.05 * 2**30
    with closing_engine(make_engine(**settings)) as engine:
        with closing_engine(make_engine(**settings)) as second:
            for one in (engine, second):
                assert run(one, prompts) == expected
                # all that was computed before, also what the cache had at the end
                assert reloaded(one) > 2 * first
                missed = one.get_metrics()["num_prompt_tokens"]
                assert missed <= len(prompts) * 2 * BLOCK_SIZE
            engine.reset_prefix_cache()
            found = reloaded(second)
            assert run(second, conversations(1, 6)[:1]) == expected[:1]
            assert reloaded(second) == found


@pytest.fixture(
    scope="module",
    params=["granitemoehybrid", pytest.param("qwen3_5_text", marks=pytest.mark.slow), "mamba2"],
)
def hybrid(request, tmp_path_factory) -> dict:
    """Settings of a model that keeps states, with room for few blocks and fewer checkpoints."""
    options = {"dtype": "bfloat16", "vocab_size": 1000}
    model = save_tiny_model(tmp_path_factory.mktemp("hybrid"), request.param, **options)
    settings = SETTINGS | dict(model=str(model), state_checkpoint_interval=16)
    model_config = EngineArgs(**settings).create_engine_config().model_config
    row, _ = row_of(model_config)
    assert row is not None
    place_bytes = row.parse(model_config.hf_config).state_bytes(2)
    return settings | dict(state_cache_memory_bytes=8 * place_bytes)


LARGE_HYBRID = LARGE | dict(state_cache_memory_bytes=2**24)


def states(engine: LLMEngine) -> tuple[int, int]:
    metrics = engine.get_metrics()
    return metrics["num_states_offloaded"], metrics["num_states_reloaded"]


@pytest.mark.skipif(library is None, reason="torch's kernels do not promise the same bits")
def test_states_come_back_with_the_same_bits(hybrid, tmp_path):
    prompts = conversations(7, 6)
    with closing_engine(make_engine(**hybrid | LARGE_HYBRID)) as engine:
        expected = run(engine, prompts)
    for place in ({}, {"kv_offloading_path": str(tmp_path)}):
        for is_second in (False, True)[: 1 + len(place)]:
            offload = dict(kv_offloading_size=0.05, **place)
            with closing_engine(make_engine(**hybrid | offload)) as engine:
                assert run(engine, prompts) == expected
                kept, loaded = states(engine)
                assert (is_second or kept > 5) and loaded > (8 if is_second else 5)
                if is_second:  # all that was computed before the restart
                    missed = engine.get_metrics()["num_prompt_tokens"]
                    assert missed <= len(prompts) * 3 * 16
                assert run(engine, prompts[:2], cache_salt="mine") == expected[:2]
                assert engine.call_utility("check_integrity")


@pytest.mark.skipif(library is None, reason="torch's kernels do not promise the same bits")
@pytest.mark.parametrize("kind", ["cut", "zeros", "bits"])
def test_damaged_states_cost_time_and_no_token(hybrid, tmp_path, kind):
    settings = hybrid | dict(kv_offloading_size=0.003, kv_offloading_path=str(tmp_path))
    prompts = conversations(8, 3, turns=2)
    with closing_engine(make_engine(**settings)) as engine:
        expected = run(engine, prompts)
    damage(file_in(tmp_path), kind)
    with closing_engine(make_engine(**settings)) as engine:
        assert run(engine, prompts) == expected
        assert (engine.get_metrics()["num_blocks_corrupt"] > 0) == (kind != "cut")


def test_blocks_and_states_share_the_room(hybrid, tmp_path):
    """A place that is too small keeps some of both, and never more than its size."""
    settings = hybrid | dict(kv_offloading_size=0.0008, kv_offloading_path=str(tmp_path))
    prompts = conversations(9, 6, turns=2)
    with closing_engine(make_engine(**hybrid | LARGE_HYBRID)) as engine:
        expected = run(engine, prompts)
    with closing_engine(make_engine(**settings)) as engine:
        assert run(engine, prompts) == expected
        assert states(engine)[0] > 2
    assert file_in(tmp_path).stat().st_size <= 0.0008 * 2**30


def damage(file: Path, kind: str) -> None:
    data = bytearray(file.read_bytes())
    if kind == "cut":
        del data[len(data) // 3 :]
    elif kind == "zeros":
        data[4096 * 20 :] = bytes(len(data) - 4096 * 20)
    else:
        step = 2000
        for place in range(4096 * 20, len(data), step):
            data[place] ^= 0x40
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["cut", "zeros", "bits"])
def test_a_damaged_file_costs_time_and_no_token(tmp_path, kind, caplog):
    settings = SETTINGS | dict(kv_offloading_size=0.02, kv_offloading_path=str(tmp_path))
    prompts = conversations(2, 4, turns=2)
    with closing_engine(make_engine(**settings)) as engine:
        expected = run(engine, prompts)
    damage(file_in(tmp_path), kind)
    with closing_engine(make_engine(**settings)) as engine:
        assert run(engine, prompts) == expected
        assert (engine.get_metrics()["num_blocks_corrupt"] > 2) == (kind != "cut")
    assert ("is cut short, and is emptied" if kind == "cut" else "checksum is wrong") in caplog.text


def test_tenants_and_adapters_are_apart(tmp_path):
    weights = adapted_weights(Path(find_model_directory("bundled")))
    for i in (1, 2):
        write_peft(tmp_path / f"a{i}", random_pairs(weights, seed=i, size=0.1))
    adapters = [None, *(LoRARequest(f"a{i}", i, str(tmp_path / f"a{i}")) for i in (1, 2))]
    common = SETTINGS | dict(enable_lora=True, max_loras=2)
    place = dict(kv_offloading_size=0.05, kv_offloading_path=str(tmp_path / "kv"))
    prompts = conversations(3, 4, turns=2)

    def everything(engine: LLMEngine) -> list[list[tuple]]:
        return [run(engine, prompts, lora_request=one) for one in adapters]

    with closing_engine(make_engine(**common | LARGE)) as engine:
        expected = everything(engine)
        assert expected[0] != expected[1] != expected[2]
    for is_first in (True, False):
        with closing_engine(make_engine(**common | place)) as engine:
            # in another order: an adapter has another number in the second engine
            adapters.reverse()
            expected.reverse()
            assert everything(engine) == expected
            assert reloaded(engine) > 5
            found = reloaded(engine)
            assert run(engine, prompts, cache_salt="mine") == expected[adapters.index(None)]
            of_mine = reloaded(engine) - found
            assert run(engine, prompts, cache_salt="mine") == expected[adapters.index(None)]
            # another tenant's blocks are not used, its own are
            assert not is_first or reloaded(engine) - found - of_mine > of_mine


def test_another_model_has_another_file(tmp_path):
    place = dict(kv_offloading_size=0.01, kv_offloading_path=str(tmp_path))
    prompts = conversations(4, 3, turns=1)
    variants = (
        {},
        {"dtype": "float32"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"block_size": 16},
        {"hf_overrides": {"rope_theta": 5e5}},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        *([{"cpu_isa": "none"}] if engine_device() == "cpu" else []),
    )
    for number, settings in enumerate(variants, start=1):
        with closing_engine(make_engine(**SETTINGS | place | settings)) as engine:
            run(engine, prompts)
            assert reloaded(engine) == 0
        assert len(list(tmp_path.glob("*.kv"))) == number


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("has_path", [True, False])
def test_new_weights_have_another_place(has_path, tmp_path):
    model = Path(find_model_directory("bundled"))
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (other / file.name).write_bytes(file.read_bytes())
    place = {"kv_offloading_path": str(tmp_path / "kv")} if has_path else {}
    with closing_engine(make_engine(**SETTINGS, kv_offloading_size=0.01, **place)) as engine:
        prompts = conversations(5, 8, turns=1)
        expected = run(engine, prompts)
        run(engine, prompts)
        found = reloaded(engine)
        assert found > 0
        engine.load_weights(str(other))
        assert run(engine, prompts, at_once=1) == expected
        # what these weights have stored since comes back, nothing else
        engine.sleep(level=1)
        engine.wake_up()
        assert reloaded(engine) == found
        assert run(engine, prompts, at_once=1) == expected
        assert reloaded(engine) > found


def test_without_a_place_for_new_weights_the_old_ones_stay(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    for file in Path(find_model_directory("bundled")).iterdir():
        if file.is_file():
            (other / file.name).write_bytes(file.read_bytes())
    tensors = load_file(other / "model.safetensors")
    save_file({name: -one for name, one in tensors.items()}, other / "model.safetensors")
    prompts = conversations(5, 2, turns=1)
    with closing_engine(make_engine(**SETTINGS | LARGE, kv_offloading_size=0.01)) as engine:
        expected = run(engine, prompts)

        def refuse(*args: object) -> None:
            raise InvalidParameterError("kv_offloading_path", "the disk is full")

        with monkeypatch.context() as full:
            full.setattr(worker, "open_store", refuse)
            with pytest.raises(InvalidParameterError, match="the disk is full"):
                engine.load_weights(str(other))
        assert run(engine, prompts) == expected
        assert run(engine, [[5, *one] for one in prompts]) != expected
        engine.load_weights(str(other))
        assert run(engine, prompts) != expected


@pytest.mark.slow
def test_an_engine_that_is_killed_finds_its_blocks(tmp_path):
    settings = SETTINGS | dict(kv_offloading_size=0.05, kv_offloading_path=str(tmp_path / "kv"))
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("live", "replay")]
    settings["kv_events_config"] = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoints[0], replay_endpoint=endpoints[1]
    )
    prompts = conversations(6, 5, turns=2)
    with closing_engine(make_engine("process", **settings)) as engine:
        with closing(Subscriber(*endpoints)) as subscriber:
            expected = run(engine, prompts)
            subscriber.catch_up()
            stored = {known for known in subscriber.known if known[0] == DISK}
            assert len(stored) > 20
            os.kill(engine.client.engine_pid, signal.SIGKILL)
            run(engine, prompts[-1:])
            subscriber.read_until(2**40)
            subscriber.catch_up()
            assert stored <= subscriber.known
            assert {medium for medium, _, _ in subscriber.known} == {DISK, GPU}
            assert run(engine, prompts) == expected
            assert reloaded(engine) > 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offloading_size": -1}, "kv_offloading_size: must be a number, at least 0"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_offloading_path": "/tmp"}, "kv_offloading_path: needs kv_offloading_size"),
        ({"kv_offloading_size": 1e-6}, "kv_offloading_size: no block of .* bytes fits"),
        ({"kv_offloading_size": 1e6}, "kv_offloading_size: .* bytes of memory are wanted"),
        ({"kv_offloading_size": 1e-2, "kv_offloading_path": "/proc/x"}, "kv_offloading_path: no"),
        ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "kv_offloading_backend"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(InvalidParameterError, match=message):
        LLM(engine="inproc", **msgspec.to_builtins(SETTINGS | settings))
