"""LoRARequests of calls: paths, types, reloads; through an engine in this process."""

import asyncio
from pathlib import Path

import pytest
from quire import AsyncLLM, InvalidParameterError, LLMEngine, LoRARequest, SamplingParams
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.llm import LLM
from quire.frontend.requests.lora_requests import placed, to_reload
from quire.tests.fake_loras import adapter_digest
from quire.tests.fakes import FakeExecutor, expected_output, make_config
from quire.tests.round_trip import RoundTripClient

PROMPT = {"prompt_token_ids": [1, 2, 3]}
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=5)


def make_llm(**arguments) -> LLM:
    config = make_config(enable_lora=True, max_loras=2, max_cpu_loras=2, **arguments)
    client = RoundTripClient(config, executor=FakeExecutor(config))
    llm = LLM.__new__(LLM)
    from quire.frontend.clients.guard import Guard

    llm.llm_engine = LLMEngine(config, client)
    llm.session, llm._num_requests, llm._turn = llm.llm_engine.session, 0, Guard(waits=True)
    return llm


def expected(adapter: LoRARequest | None) -> list[int]:
    digest = 0 if adapter is None else adapter_digest(adapter.lora_path)
    return expected_output([1, 2, 3], GREEDY, [], make_config(), digest)[0]


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_paths_of_this_process_become_absolute(tmp_path, monkeypatch) -> None:
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert placed(LoRARequest("a", 1, "sql")).lora_path == str(tmp_path / "sql")
    assert placed(LoRARequest("a", 1, "~/sql")).lora_path == str(tmp_path / "sql")
    assert placed(LoRARequest("a", 1, "of-the-daemon")).lora_path == "of-the-daemon"
    with pytest.raises(InvalidParameterError, match="lora_request: must be a LoRARequest, got"):
        placed({"lora_name": "a"})


def test_each_adapter_is_reloaded_once() -> None:
    again, plain = LoRARequest("a", 1, "/a", True), LoRARequest("b", 2, "/b")
    assert to_reload([again, None, plain, again]) == [again]


def test_one_for_all_or_one_per_prompt() -> None:
    a, b = LoRARequest("a", 1, "/adapters/a"), LoRARequest("b", 2, "/adapters/b")
    llm = make_llm()
    found = llm.generate([PROMPT] * 3, GREEDY, False, lora_request=[a, None, b])
    assert tokens(found) == [expected(a), expected(None), expected(b)]
    found = llm.generate([PROMPT] * 2, GREEDY, False, lora_request=a)
    assert tokens(found) == [expected(a)] * 2
    assert llm.list_loras() == {1, 2}
    with pytest.raises(InvalidParameterError, match="lora_request: must be one for all or one per"):
        llm.generate([PROMPT] * 2, GREEDY, False, lora_request=[a])
    with pytest.raises(InvalidParameterError, match="lora_request: must be a LoRARequest, got"):
        llm.generate(PROMPT, GREEDY, False, lora_request="a")
    llm.close()


def test_calls_about_adapters() -> None:
    llm, a = make_llm(), LoRARequest("a", 1, "/adapters/a")
    assert llm.add_lora(a) is True and llm.list_loras() == {1}
    assert llm.pin_lora(1) is True and llm.remove_lora(1) is True and llm.remove_lora(1) is False
    with pytest.raises(InvalidParameterError, match="lora_request: /missing/a is not there"):
        llm.add_lora(LoRARequest("a", 1, "/missing/a"))
    # with one prompt, what only the engine can find raises
    with pytest.raises(InvalidParameterError, match="lora_request: /missing/a is not there"):
        llm.generate(PROMPT, GREEDY, False, lora_request=LoRARequest("a", 1, "/missing/a"))
    llm.close()


def test_load_inplace_reads_the_files_again(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    path.write_text("first")
    llm, adapter = make_llm(), LoRARequest("a", 1, str(path))
    first = expected(adapter)
    assert tokens(llm.generate(PROMPT, GREEDY, False, lora_request=adapter)) == [first]
    path.write_text("second")
    assert tokens(llm.generate(PROMPT, GREEDY, False, lora_request=adapter)) == [first]
    again = LoRARequest("a", 1, str(path), load_inplace=True)
    found = llm.generate([PROMPT] * 3, GREEDY, False, lora_request=again)
    assert tokens(found) == [expected(adapter)] * 3 != [first] * 3
    llm.close()


def test_without_enable_lora() -> None:
    config = make_config()
    engine = LLMEngine(config, InprocClient(config, executor=FakeExecutor(config)))
    adapter = LoRARequest("a", 1, "/a")
    with pytest.raises(InvalidParameterError, match="lora_request: needs an engine that was start"):
        engine.add_request("r", PROMPT, GREEDY, lora_request=adapter)
    engine.shutdown()


def test_asyncio(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    path.write_text("first")

    async def run() -> None:
        config = make_config(enable_lora=True, max_cpu_loras=1)
        client = await InprocClient.start(config, print, executor=FakeExecutor(config))
        llm = AsyncLLM(config, client)
        adapter = LoRARequest("a", 1, str(path))
        assert await llm.add_lora(adapter) and await llm.list_loras() == {1}

        async def last(adapter: LoRARequest) -> list[int]:
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=5)
            request_id = str(adapter)
            async for output in llm.generate(PROMPT, params, request_id, lora_request=adapter):
                found = list(output.outputs[0].token_ids)
            return found

        assert await last(adapter) == expected(adapter)
        path.write_text("second")
        again = LoRARequest("a", 1, str(path), load_inplace=True)
        assert await last(again) == expected(adapter)
        assert await llm.pin_lora(1) and await llm.remove_lora(1)
        await llm.shutdown_async()

    asyncio.run(run())
