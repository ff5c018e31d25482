"""LLM and AsyncLLM over a scripted client, with images."""

from __future__ import annotations

import asyncio

import pytest
from quire import LLM, InvalidParameterError, LLMEngine, SamplingParams
from quire.frontend import llm as llm_module
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.requests import image_inputs
from quire.ipc.config import EngineConfig
from quire.tests.fake_images import ROWS, FakePreparer, with_vision
from quire.tests.frontend.scripted_client import ScriptedClient
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer

IMAGE = 299
MARK = "<|unused299|>"
PARAMS = SamplingParams(max_tokens=2)
ASKED = [
    {
        "role": "user",
        "content": [{"type": "image", "image": b"pixels"}, {"type": "text", "text": "What?"}],
    }
]


@pytest.fixture
def preparers(monkeypatch) -> list[FakePreparer]:
    """Those that were made."""
    made: list[FakePreparer] = []

    def make(config: EngineConfig, tokenizer: object) -> FakePreparer:
        made.append(FakePreparer(tiny_tokenizer(), IMAGE))
        return made[-1]

    monkeypatch.setattr(image_inputs, "_own_preparer", make)
    return made


def client_of(config: EngineConfig) -> ScriptedClient:
    return ScriptedClient(config, lambda request: [5, 6])


@pytest.fixture
def llm(monkeypatch, preparers) -> LLM:
    config = with_vision(text_config(), IMAGE)

    def from_engine_args(args: object, engine: object) -> LLMEngine:
        return LLMEngine(config, client_of(config))

    monkeypatch.setattr(llm_module.LLMEngine, "from_engine_args", from_engine_args)
    return LLM()


def test_generate(llm, preparers) -> None:
    with_image = {"prompt": f"a{MARK}", "multi_modal_data": {"image": b"pixels"}}
    outputs = llm.generate(
        ["b", with_image], PARAMS, use_tqdm=False, mm_processor_kwargs={"max_pixels": 9}
    )
    text, seen = llm.llm_engine.client.requests
    assert text.images == [] and len(seen.images) == 1
    assert outputs[1].prompt_token_ids[-ROWS:] == [IMAGE] * ROWS
    [preparer] = preparers
    assert preparer.kwargs == {"max_pixels": 9} and preparer.sources[0].value == b"pixels"
    own = {**with_image, "mm_processor_kwargs": {"max_pixels": 5}}
    llm.generate(own, PARAMS, use_tqdm=False, mm_processor_kwargs={"max_pixels": 9, "x": 1})
    assert preparer.kwargs == {"max_pixels": 5, "x": 1}
    [last] = list(llm.stream(with_image, PARAMS))[-1].outputs
    assert last.finish_reason == "length"


def test_chat(llm, preparers) -> None:
    [output] = llm.chat(ASKED, PARAMS, use_tqdm=False)
    assert f"<|im_start|>user\n{MARK}\nWhat?<|im_end|>\n" in output.prompt
    assert output.prompt_token_ids.count(IMAGE) == ROWS
    [request] = llm.llm_engine.client.requests
    assert len(request.images) == 1
    [source] = preparers[0].sources
    assert (source.value, source.parameter) == (b"pixels", "messages[0].content[0].image")
    llm.chat(ASKED, PARAMS, use_tqdm=False, mm_processor_kwargs={"max_pixels": 9})
    assert preparers[0].kwargs == {"max_pixels": 9}


def test_nothing_is_prepared_for_text(llm, preparers) -> None:
    llm.generate(["a", {"prompt": "b", "multi_modal_data": {}}], PARAMS, use_tqdm=False)
    [preparer] = preparers
    assert preparer.kwargs is None


def test_an_error_names_the_request(llm) -> None:
    prompts = ["a", {"prompt": "none", "multi_modal_data": {"image": b""}}]
    with pytest.raises(InvalidParameterError, match=r"placeholder .*in request 1 of 2"):
        llm.generate(prompts, PARAMS, use_tqdm=False)


def test_async_llm(preparers) -> None:
    config = with_vision(text_config(), IMAGE)

    async def run() -> None:
        engine = AsyncLLM(config, client_of(config))
        prompt = {"prompt": f"a{MARK}", "multi_modal_data": {"image": [b"pixels"]}}
        outputs = [output async for output in engine.generate(prompt, PARAMS, "r")]
        assert outputs[-1].prompt_token_ids[-ROWS:] == [IMAGE] * ROWS
        [request] = engine.client.requests  # type: ignore[attr-defined]
        assert len(request.images) == 1
        bad = {"prompt": "a", "multi_modal_data": {"image": [b"pixels"]}}
        with pytest.raises(InvalidParameterError, match="placeholder"):
            [_ async for _ in engine.generate(bad, PARAMS, "s")]
        assert engine.session.num_inputs_refused == 1
        engine.shutdown()

    asyncio.run(run())
