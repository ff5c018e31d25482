"""Prompts with images: their forms, their tokens, and refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from quire import InvalidParameterError, PoolingParams, SamplingParams
from quire.frontend.requests.beam_search import BeamSearch, BeamSearchParams, first_params
from quire.frontend.requests.input_processor import InputProcessor
from quire.frontend.requests.prompts import has_images
from quire.ipc.config import EngineConfig
from quire.ipc.models.pooling import Pooling
from quire.tests.fake_images import ROWS, UNREADABLE, FakePreparer, fake_inputs, with_vision
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer

IMAGE = 299
MARK = "<|unused299|>"


def make(config: EngineConfig | None = None) -> tuple[InputProcessor, FakePreparer]:
    config = config or with_vision(text_config(), IMAGE)
    inputs, preparer = fake_inputs(config, tiny_tokenizer())
    return InputProcessor(config, tiny_tokenizer(), [302], inputs), preparer


def ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": f"a{MARK}b"},
        {"prompt_token_ids": [*ids("a"), IMAGE, *ids("b")]},
        {"prompt": "other", "prompt_token_ids": [*ids("a"), IMAGE, *ids("b")]},
    ],
)
def test_forms(prompt) -> None:
    processor, preparer = make()
    whole = [*ids("a"), *[IMAGE] * ROWS, *ids("b")]
    for images in ("data:x", ["data:x"], ("data:x",)):
        given = {**prompt, "multi_modal_data": {"image": images}}
        assert has_images(given)
        request = processor.process_inputs("r", given, SamplingParams()).core_request
        assert request.prompt_token_ids == whole
        [item] = request.images
        assert item.spans == [(1, ROWS)]
        assert request.sampling_params.max_tokens is not None
        assert request.sampling_params.max_tokens <= 64 - len(whole)
        [source] = preparer.sources
        assert (source.value, source.parameter) == ("data:x", "multi_modal_data.image[0]")
        prepared = asyncio.run(processor.prepared(given))
        assert not has_images(prepared)
        again = processor.process_inputs("r", prepared, SamplingParams()).core_request
        assert (again.prompt_token_ids, again.images) == (whole, request.images)


@pytest.mark.parametrize("more", [{}, {"multi_modal_data": None}, {"multi_modal_data": {}}])
def test_a_prompt_without_images(more) -> None:
    for processor in (make()[0], InputProcessor(text_config(), tiny_tokenizer(), [302])):
        request = processor.process_inputs("r", {"prompt": "a", **more}, SamplingParams())
        assert request.core_request.images == []


def test_what_belongs_to_images() -> None:
    processor, preparer = make()
    prompt = {
        "prompt": f"{MARK}{MARK}",
        "multi_modal_data": {"image": ["data:x", "data:y"]},
        "multi_modal_uuids": {"image": ["u", None]},
        "mm_processor_kwargs": {"max_pixels": 1024},
    }
    request = processor.process_inputs("r", prompt, SamplingParams()).core_request
    assert [item.spans for item in request.images] == [[(0, ROWS)], [(ROWS, ROWS)]]
    assert preparer.kwargs == {"max_pixels": 1024}


def refused(config: EngineConfig | None = None, **prompt: Any) -> InvalidParameterError:
    processor, _ = make(config)
    given = {"prompt": MARK, "multi_modal_data": {"image": "data:x"}, **prompt}
    with pytest.raises(InvalidParameterError) as raised:
        processor.process_inputs("r", given, SamplingParams())
    return raised.value


@pytest.mark.parametrize(
    ("prompt", "parameter", "problem"),
    [
        ({"multi_modal_data": []}, "multi_modal_data", "must be an object"),
        ({"multi_modal_data": {"video": ["v"]}}, "multi_modal_data", "`image` only, got 'video'"),
        ({"multi_modal_data": {"image": [None]}}, "multi_modal_data.image[0]", "by their content"),
        ({"multi_modal_data": {"image": UNREADABLE}}, "multi_modal_data.image[0]", "not base64"),
        ({"multi_modal_uuids": {"image": ["u", "v"]}}, "multi_modal_uuids", "as the images, 1"),
        ({"multi_modal_uuids": {"image": [5]}}, "multi_modal_uuids", "strings or None"),
        ({"mm_processor_kwargs": "max_pixels"}, "mm_processor_kwargs", "must be an object"),
        ({"prompt": "none"}, "prompt", "one placeholder"),
        ({"prompt": f"{MARK}{'word ' * 60}"}, "prompt", "tokens long; with max_model_len=64"),
        ({"prompt_token_ids": [IMAGE] * 64}, "prompt", "tokens long"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids", "between 0"),
    ],
)
def test_refusals(prompt, parameter, problem) -> None:
    error = refused(**prompt)
    assert error.parameter == parameter and problem in error.problem


def test_the_number_of_images_has_a_limit() -> None:
    for num, settings in ((17, {}), (3, {"limit_mm_per_prompt": {"image": 2}})):
        config = with_vision(text_config(), IMAGE, **settings)
        error = refused(config, multi_modal_data={"image": ["data:x"] * num})
        most = settings.get("limit_mm_per_prompt", {}).get("image", 16)
        assert error.parameter == f"multi_modal_data.image[{most}]"
        assert error.problem == (
            f"is one image too many: a prompt can have {most} (limit_mm_per_prompt), this one has "
            f"{num}"
        )


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        (f"a{MARK}", "prompt"),
        ({"prompt": MARK, "multi_modal_data": {"image": []}}, "prompt"),
        ([*ids("a"), IMAGE], "prompt_token_ids"),
    ],
)
def test_a_place_without_an_image_is_refused(prompt, name) -> None:
    """The model would read the placeholder in the place of pixels, and answer."""
    wanted = rf"{name}: has <\|unused299\|> \(the token {IMAGE}\).* but no image comes"
    processor, _ = make()
    with pytest.raises(InvalidParameterError, match=wanted):
        processor.process_inputs("r", prompt, SamplingParams())
    processor.process_inputs("r", "a", SamplingParams())
    of_text_model = InputProcessor(text_config(), tiny_tokenizer(), [302])
    of_text_model.process_inputs("r", prompt, SamplingParams())


def test_a_model_that_reads_text_refuses_images() -> None:
    processor = InputProcessor(text_config(), tiny_tokenizer(), [302])
    prompt = {"prompt": MARK, "multi_modal_data": {"image": "data:x"}}
    with pytest.raises(InvalidParameterError, match="multi_modal_data: .* reads text only"):
        processor.process_inputs("r", prompt, SamplingParams())
    assert not processor.images.reads_images and processor.images.placeholder is None


def test_a_prompt_with_images_is_not_cut() -> None:
    processor, _ = make()
    for prompt in ({"prompt": MARK}, {"prompt_token_ids": [IMAGE]}):
        with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens: must be None"):
            processor.process_inputs(
                "r",
                {**prompt, "multi_modal_data": {"image": "data:x"}},
                SamplingParams(truncate_prompt_tokens=5),
            )


def test_a_beam_search_keeps_the_images() -> None:
    processor, _ = make()
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    prompt = {"prompt": MARK, "multi_modal_data": {"image": "data:x"}}
    request = processor.process_inputs("r", prompt, first_params(params))
    config = with_vision(text_config(), IMAGE)
    search = BeamSearch(request, params, config.model_config)
    step = processor.process_inputs("r", search.step_prompts[0], search.step_params)
    assert step.core_request.images == request.core_request.images != []


def test_requests_that_pool_have_images() -> None:
    pooling = Pooling(tasks=("embed",), default_prompt_name="q", prompts={"q": "b"})
    config = with_vision(text_config(), IMAGE)
    model_config = msgspec.structs.replace(config.model_config, pooling=pooling)
    processor, _ = make(msgspec.structs.replace(config, model_config=model_config))
    prompt = {"prompt": f"a{MARK}", "multi_modal_data": {"image": "data:x"}}
    text, seen = processor.process_batch(["0", "1"], ["a", prompt], PoolingParams())
    assert text.core_request.images == []
    [item] = seen.core_request.images
    assert item.spans == [(len(ids("ba")), ROWS)]
    assert seen.core_request.prompt_token_ids == [*ids("ba"), *[IMAGE] * ROWS]
    with pytest.raises(InvalidParameterError, match=r"multi_modal_data.image\[0\]: .*request 1"):
        bad = {**prompt, "multi_modal_data": {"image": UNREADABLE}}
        processor.process_batch(["0", "1"], ["a", bad], PoolingParams())
    with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens: must be None"):
        processor.process_batch(["0"], [prompt], PoolingParams(truncate_prompt_tokens=5))
