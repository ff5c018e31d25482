"""Images from users to the model, with tiny random models: the same picture in every form and over
every API gives the same tokens.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from PIL import Image
from quire import LLM, AsyncLLM, EngineArgs, InvalidParameterError, PoolingParams, SamplingParams
from quire.frontend.cli.generate import main as generate
from quire.frontend.diagnosis.model import check_model
from quire.ipc.params import RequestOutputKind
from quire.tests.client_forms import make_async_engine
from quire.tests.frontend.cli.command import QUIRE
from quire.tests.frontend.server.conftest import running_server
from quire.tests.pictures import encoded
from quire.tests.seeing_models import MARKS, save_seeing_model
from quire.tests.tiny_vision import transformers_inputs

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
RAW = PoolingParams(use_activation=False)
UNCHANGED = {"qwen3_5": (64, 40), "gemma3": (24, 24)}  # sizes of pictures that are not resized
WHAT = {"type": "text", "text": "What?"}


def picture(seed: int, width: int = 64, height: int = 40) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def url_of(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


@pytest.fixture(scope="module", params=MARKS)
def seeing(request, tmp_path_factory) -> Iterator[tuple[str, LLM]]:
    directory = save_seeing_model(tmp_path_factory.mktemp(request.param), request.param)
    settings = {"max_model_len": 512, "num_threads": 1, "dtype": "float32"}
    with LLM(str(directory), engine="inproc", **settings) as llm:
        yield request.param, llm


def ask(llm: LLM, *parts: Any) -> list[int]:
    [output] = llm.chat([{"role": "user", "content": [*parts, WHAT]}], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.sampled(step=2)
def test_forms_of_a_picture(seeing, tmp_path) -> None:
    _, llm = seeing
    image = picture(0)
    path = tmp_path / "a.png"
    path.write_bytes(encoded(image))
    first = ask(llm, {"type": "image", "image": image})
    for part in (
        {"type": "image", "image": np.asarray(image)},
        {"type": "image", "image": encoded(image)},
        {"type": "image", "image": path},
        {"type": "image_url", "image_url": {"url": url_of(image)}},
        {"type": "image_url", "image_url": url_of(image)},
    ):
        assert ask(llm, part) == first
    llm.sleep()
    llm.wake_up()
    assert ask(llm, {"type": "image", "image": image}) == first
    others = [ask(llm), ask(llm, {"type": "image", "image": picture(1)})]
    if seeing[0] == "qwen3_5":  # the other model writes one token again and again
        assert first not in others and others[0] != others[1]


def test_a_prompt_is_the_same_as_text_ids_and_chat(seeing) -> None:
    kind, llm = seeing
    images = [picture(0), picture(3, 40, 64)]
    parts = [{"type": "image", "image": image} for image in images]
    [chat] = llm.chat([{"role": "user", "content": [*parts, WHAT]}], PARAMS, use_tqdm=False)
    _, written = MARKS[kind]
    text = f"<|im_start|>user\n{2 * written}What?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.prompt == text
    data = {"multi_modal_data": {"image": images}}
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    for prompt in ({"prompt": text}, {"prompt_token_ids": ids}):
        [output] = llm.generate(prompt | data, PARAMS, use_tqdm=False)
        assert output.outputs[0].token_ids == chat.outputs[0].token_ids
        assert output.prompt_token_ids == chat.prompt_token_ids
    several = llm.generate(
        [{"prompt": text} | data, "What?"],
        SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True),
        use_tqdm=False,
    )
    assert all(len(one.token_ids) == 6 for output in several for one in output.outputs)


def test_embeddings(seeing) -> None:
    kind, llm = seeing
    text = f"{MARKS[kind][1]}What?"
    prompts = [
        "What?",
        *({"prompt": text, "multi_modal_data": {"image": picture(i)}} for i in (0, 1, 0)),
    ]
    plain, first, other, again = (o.outputs.data for o in llm.embed(prompts, use_tqdm=False))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other) and not np.array_equal(first, plain)
    image = picture(0, *UNCHANGED[kind])
    prompt = {"prompt": text, "multi_modal_data": {"image": image}}
    [by_token] = llm.encode(prompt, RAW, pooling_task="token_embed", use_tqdm=False)
    pixels = torch.from_numpy(np.array(image))
    hidden = hidden_states(llm, kind, by_token.prompt_token_ids, pixels)
    torch.testing.assert_close(torch.tensor(by_token.outputs.data), hidden, atol=2e-4, rtol=2e-4)
    [whole] = llm.embed(prompt, use_tqdm=False)
    expected = torch.nn.functional.normalize(hidden[-1], dim=0)
    torch.testing.assert_close(torch.tensor(whole.outputs.data), expected, atol=2e-4, rtol=2e-4)


@torch.inference_mode()
def hidden_states(llm: LLM, kind: str, tokens: list[int], pixels: torch.Tensor) -> torch.Tensor:
    """[T, hidden_size]: transformers' last hidden states of a prompt with an image."""
    from transformers import AutoModelForImageTextToText

    config = llm.llm_engine.config.model_config
    whole = AutoModelForImageTextToText.from_pretrained(config.model, dtype=torch.float32).eval()
    inputs = transformers_inputs(whole, kind, tokens, [pixels], config.vision.image_token_id)
    return whole.model(use_cache=False, **inputs).last_hidden_state[0]


def test_the_encoder_can_be_left_out(seeing) -> None:
    _, llm = seeing
    model = llm.llm_engine.config.model_config.model
    with LLM(model, engine="inproc", max_model_len=512, language_model_only=True) as text_only:
        assert len(ask(text_only)) == PARAMS.max_tokens
        with pytest.raises(InvalidParameterError, match="this model reads text only"):
            ask(text_only, {"type": "image", "image": picture(0)})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("served"), "qwen3_5")


@pytest.fixture(scope="module")
def server(model) -> Iterator[httpx.Client]:
    flags = ("--max-model-len", "512", "--num-threads", "1", "--served-model-name", "tiny")
    with running_server(str(model), *flags) as client:
        yield client


def answers(server: httpx.Client, image: Image.Image) -> dict[str, str]:
    """The answers of all APIs about an image."""
    data, url = base64.b64encode(encoded(image)).decode(), url_of(image)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    greedy = {"model": "tiny", "temperature": 0}
    options = {"num_predict": 6, "temperature": 0}
    ollama = {"model": "tiny", "stream": False, "options": options}

    def post(path: str, **body: Any) -> Any:
        answer = server.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    chat = post(
        "/v1/chat/completions",
        **greedy,
        max_tokens=6,
        messages=[
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, WHAT]}
        ],
    )
    said = post(
        "/v1/messages",
        **greedy,
        max_tokens=6,
        messages=[{"role": "user", "content": [{"type": "image", "source": source}, WHAT]}],
    )
    parts = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "What?"},
    ]
    response = post(
        "/v1/responses",
        **greedy,
        max_output_tokens=6,
        input=[{"role": "user", "content": parts}],
    )
    message = {"role": "user", "content": "What?", "images": [data]}
    return {
        "chat": chat["choices"][0]["message"]["content"],
        "messages": "".join(block["text"] for block in said["content"]),
        "responses": response["output"][0]["content"][0]["text"],
        "ollama": post("/api/chat", **ollama, messages=[message])["message"]["content"],
        "ollama generate": post("/api/generate", **ollama, prompt="What?", images=[data])[
            "response"
        ],
    }


def test_every_api_gives_the_same_answer(server) -> None:
    first, other = answers(server, picture(0)), answers(server, picture(1))
    assert len(set(first.values())) == len(set(other.values())) == 1
    assert first["chat"] != other["chat"]
    assert answers(server, picture(0)) == first
    assert "vision" in server.get("/v1/models").json()["data"][0]["capabilities"]


def test_embeddings_over_http(server) -> None:
    def embed(*parts: Any) -> list[float]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": [*parts, WHAT]}]}
        answer = server.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        [entry] = answer.json()["data"]
        return entry["embedding"]

    first, other = ({"type": "image_url", "image_url": {"url": url_of(picture(i))}} for i in (0, 1))
    assert embed(first) == embed(first)
    assert embed(first) != embed(other) and embed(first) != embed()

    def embed_as_cohere(**what: Any) -> Any:
        answer = server.post("/v2/embed", json={"model": "tiny", **what})
        assert answer.status_code == 200, answer.text
        return answer.json()

    inputs = [{"content": [part, WHAT]} for part in (first, other)] + [{"content": "What?"}]
    found = embed_as_cohere(inputs=inputs)
    assert found["embeddings"]["float"] == [embed(first), embed(other), embed()]
    urls = [url_of(picture(i)) for i in (0, 1)]
    found = embed_as_cohere(images=urls, input_type="image")
    assert found["meta"]["billed_units"]["images"] == 2 and found["texts"] == []
    alone = embed_as_cohere(inputs=[{"content": [first]}, {"content": [other]}])
    assert found["embeddings"] == alone["embeddings"]
    body = {"model": "tiny", "images": [urls[0], "data:image/png;base64,aGk="]}
    answer = server.post("/v2/embed", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "images[1]")


@pytest.mark.slow
def test_the_terminal_gives_it_too(server, model, tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture(0)))
    flags = ["--max-model-len", "512", "--num-threads", "1"]
    flags += ["--temperature", "0", "--max-tokens", "6"]
    for more, lines in (
        (["--image", str(tmp_path / "a.png")], "What?\n"),
        ([], f"/image {tmp_path}/a.png\nWhat?\n"),
    ):
        done = subprocess.run(
            [*QUIRE, "chat", str(model), *flags, *more],
            input=lines,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == answers(server, picture(0))["chat"].strip()


def test_generate_takes_files(model, tmp_path, capfd) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(0)))
    flags = ["--model", str(model), "--max-model-len", "512", "--num-threads", "1"]
    flags += ["--engine", "inproc", "--max-tokens", "2", "--json", "--image", str(path)]
    assert generate(["<|image_pad|>What?", *flags]) == 0
    assert json.loads(capfd.readouterr().out)["usage"]["completion_tokens"] == 2
    assert generate(["What?", *flags]) == 2
    assert "must have <|image_pad|> once for each image: 1 times, got 0" in capfd.readouterr().err


def test_doctor_says_how_images_are_read(model) -> None:
    found = {finding.name: finding for finding in check_model(EngineArgs(str(model)))}
    assert found["images"].status == "pass"
    assert "54 tokens for 1024 x 768 pixels, at most 16" in found["images"].detail
    found = {one.name: one for one in check_model(EngineArgs("bundled"))}
    assert "images" not in found


def test_a_bad_image_ends_its_request_alone(server) -> None:
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [bad]}]}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert answers(server, picture(0))


@pytest.mark.slow
def test_a_killed_engine_continues_an_answer(model) -> None:
    """The frontend sends the pixels to the engine that takes its place."""
    params = SamplingParams(
        temperature=1.0,
        seed=4,
        max_tokens=180,  # many, so that the engine dies before the last one
        ignore_eos=True,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    text = f"{MARKS['qwen3_5'][1]}What?"
    prompt = {"prompt": text, "multi_modal_data": {"image": picture(0)}}

    async def answer(llm: AsyncLLM, name: str, is_killed: bool) -> list[int]:
        found: list[int] = []
        async for output in llm.generate(prompt, params, name):
            found = list(output.outputs[0].token_ids)
            if is_killed and len(found) >= 5:
                is_killed = False
                os.kill(llm.client.engine_pid, signal.SIGKILL)
        return found

    async def run_both() -> None:
        settings = {"model": str(model), "max_model_len": 512, "num_threads": 1}
        llm = make_async_engine("process async", **settings)
        try:
            undisturbed = await answer(llm, "a", is_killed=False)
            assert await answer(llm, "b", is_killed=True) == undisturbed
            assert llm.client.restarts.by_cause.total() == 1
            assert (await llm.get_metrics())["num_images_encoded"] == 1  # by the second engine
        finally:
            await llm.shutdown_async()

    asyncio.run(run_both())
