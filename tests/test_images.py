"""Images in the places of prompt tokens: tokens of transformers' whole models, and the same bits
however a prompt is cut, beside others, after a preemption, and from a cache.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from quire.core.engine_core import EngineCore
from quire.executor.executor import make_executor
from quire.frontend.engine_args import EngineArgs
from quire.ipc.config import EngineConfig
from quire.ipc.errors import InvalidParameterError
from quire.ipc.lora import LoRARequest
from quire.ipc.messages import Array, EngineCoreRequest, ImageItem, digest_of
from quire.ipc.models.vision_config import VisionConfig, grid_of
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import Answer, run
from quire.tests.core.test_loras import finish
from quire.tests.executor.on_device import LateCopies, keep_on_device
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.lora_adapters import adapted_weights, merge, random_pairs, write_peft
from quire.tests.tiny_vision import (
    IMAGE_TOKEN,
    OTHER_KINDS,
    WHOLE_KINDS,
    make_images,
    save_tiny_vision_model,
    transformers_tokens,
)

NUM_TOKENS = 6


@pytest.fixture(scope="module", params=WHOLE_KINDS)
def saved(request, tmp_path_factory):
    """The kind, transformers' model and the directory of its checkpoint."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, save_tiny_vision_model(directory, request.param), directory


def configure(directory, **arguments) -> EngineConfig:
    defaults = {"max_model_len": 512, "num_threads": 1, "num_gpu_blocks_override": 200}
    defaults |= {"dtype": "float32", "max_num_seqs": 8, "encoder_cache_tokens": 500}
    defaults |= {"state_checkpoint_interval": 16}  # prefixes of hybrids are found at their ends
    return EngineArgs(str(directory), **{**defaults, **arguments}).create_engine_config()


def start(directory, **arguments) -> EngineCore:
    config = configure(directory, **arguments)
    return EngineCore(config, make_executor(config), check_every_step=True)


def item_of(pixels: torch.Tensor, first: int, vision: VisionConfig) -> ImageItem:
    grid = grid_of(vision, *pixels.shape[:2])
    array = Array("u1", tuple(pixels.shape), pixels.numpy().tobytes())
    spans = [(first, grid[0] * grid[1])]
    return ImageItem(array, spans, grid, digest_of(array, grid))


def prompt_of(parts: list[Any], vision: VisionConfig) -> tuple[list[int], list[ImageItem]]:
    """parts: tokens, and pixels between them."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
        else:
            images.append(item_of(part, len(tokens), vision))
            tokens += [IMAGE_TOKEN] * images[-1].num_rows
    return tokens, images


def request_of(core: EngineCore, name: str, parts: list[Any], **fields) -> EngineCoreRequest:
    vision = core.config.model_config.vision
    assert vision is not None
    prompt, images = prompt_of(parts, vision)
    params = {"temperature": 0.0, "seed": 0, "max_tokens": NUM_TOKENS, **fields}
    return EngineCoreRequest(name, prompt, SamplingParams(**params), images=images)


def answers(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[int]]:
    for request in requests:
        core.add_request(request)
    found = finish(core)
    errors = {name: answer.error for name, answer in found.items() if answer.error}
    assert not errors
    return {name: answer.tokens for name, answer in found.items()}


def parts_of(kind: str) -> dict[str, list[Any]]:
    """Prompts with no image, one, and several."""
    images = make_images(kind)
    others = make_images(kind, seed=1)
    text = [[10 + (7 * i) % 200 for i in range(n)] for n in (40, 9, 5, 12)]
    return {
        "none": [text[0]],
        "one": [text[1], images[0], text[2]],
        "first": [images[-1], text[3]],
        "last": [text[0], others[0]],
        "several": [text[1], images[0], text[2], others[-1], text[3], images[0], text[2]],
    }


@pytest.mark.sampled
@pytest.mark.parametrize("most", [512, 16])
def test_tokens_equal_those_of_transformers(saved, most):
    kind, model, directory = saved
    core = start(directory, max_num_batched_tokens=most)
    for name, parts in parts_of(kind).items():
        pictures = [part for part in parts if not isinstance(part, list)]
        request = request_of(core, name, parts)
        wanted = transformers_tokens(model, kind, request.prompt_token_ids, pictures, NUM_TOKENS)
        assert answers(core, request) == {name: wanted}, name


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_tokens_of_other_families_equal_those_of_transformers(kind, tmp_path):
    model = save_tiny_vision_model(tmp_path, kind)
    core = start(tmp_path, max_num_batched_tokens=16)
    for name in ("one", "several"):
        parts = parts_of(kind)[name]
        pictures = [part for part in parts if not isinstance(part, list)]
        request = request_of(core, name, parts)
        wanted = transformers_tokens(model, kind, request.prompt_token_ids, pictures, NUM_TOKENS)
        assert answers(core, request) == {name: wanted}, name


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
# whatever these settings change, no bit is another one
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks that cut images": {"max_num_batched_tokens": 16},
    "little room for rows": {"encoder_cache_tokens": 100, "max_encoder_tokens": 1},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
    "preempted": {"preemption_mode": "recompute"},
    "swapped": {"preemption_mode": "swap", "enable_prefix_caching": False},
    "overlapped": {"async_scheduling": True, "max_num_batched_tokens": 32},
    "one pass a step": {"num_scheduler_steps": 1},
    "drafts": {"speculative_config": NGRAM},
    "operation by operation": {"kernels": {"argmax": "reference"}},
}

FULL = "preempted", "swapped"
# room for one sequence and some more tokens
FEW_BLOCKS = {"gemma3": 50}


def requests_of(core: EngineCore, kind: str) -> list[EngineCoreRequest]:
    drawn = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    return [
        request_of(core, name, parts, seed=seed, n=2 if name == "several" else 1, **drawn)
        for seed, (name, parts) in enumerate(parts_of(kind).items())
    ]


@pytest.fixture(scope="module")
def alone(saved) -> dict[str, list[int]]:
    """The answers to each request in an engine of its own, whose prompt is computed at once."""
    kind, _, directory = saved
    found: dict[str, list[int]] = {}
    for number in range(len(parts_of(kind))):
        core = start(directory, dtype="bfloat16", max_model_len=256)
        found |= answers(core, requests_of(core, kind)[number])
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_changes_a_bit(saved, alone, name):
    kind, _, directory = saved
    settings = SETTINGS[name]
    if name in FULL:
        settings = settings | {"num_gpu_blocks_override": FEW_BLOCKS.get(kind, 19)}
    core = start(directory, dtype="bfloat16", max_model_len=256, **settings)
    requests = requests_of(core, kind)
    assert answers(core, *requests) == alone
    counters = core.observer.get_metrics()
    assert (counters["num_preemptions"] > 0) == (name in FULL)
    assert (counters["num_blocks_swapped_in"] > 0) == (name == "swapped")
    again = [msgspec.structs.replace(one, request_id=f"again {one.request_id}") for one in requests]
    found = answers(core, *again)
    assert sorted(map(tuple, found.values())) == sorted(map(tuple, alone.values()))


def test_another_engine_continues_an_answer(saved, alone):
    """The frontend sends the message again, with the pixels and the tokens so far."""
    kind, _, directory = saved
    core = start(directory, dtype="bfloat16", max_model_len=256, max_num_batched_tokens=32)
    for count, request in enumerate(requests_of(core, kind)):
        if request.num_completions == 1:
            wanted = alone[request.request_id]
            known = wanted[: count + 1]
            core.add_request(msgspec.structs.replace(request, resume_tokens=known))
            answer = Answer(tokens=list(known))
            run(core, {0: {request.request_id: answer}})
            assert answer.tokens == wanted


@pytest.mark.parametrize("with_graphs", [False, True])
def test_steps_of_a_gpu_give_the_same_bits(saved, alone, monkeypatch, with_graphs):
    kind, _, directory = saved
    keep_on_device(monkeypatch, LateCopies(), with_graphs=with_graphs)
    settings = {"async_scheduling": True, "max_num_batched_tokens": 32}
    core = start(directory, dtype="bfloat16", max_model_len=256, **settings)
    assert answers(core, *requests_of(core, kind)) == alone


def test_a_second_question_about_an_image_runs_no_encoder(saved):
    kind, _, directory = saved
    core, (pixels, *_) = start(directory), make_images(kind)
    head, tails = [7 + i for i in range(40)], ([50] * 9, [60] * 9)
    first, second, other = (
        request_of(core, f"{i}", [head, pixels, tail]) for i, tail in enumerate((*tails, tails[1]))
    )
    answers(core, first)
    before = core.observer.get_metrics()
    assert (before["num_images_encoded"], before["mm_cache_queries"]) == (1, 1)
    cached = answers(core, second)["1"]
    after = core.observer.get_metrics()
    assert after["num_images_encoded"] == 1
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] >= 32
    assert cached == answers(start(directory, enable_prefix_caching=False), other)["2"]


def test_another_image_is_no_hit(saved):
    kind, _, directory = saved
    core, (pixels, *_) = start(directory), make_images(kind)
    (changed, *_) = make_images(kind, seed=9)
    head, tail = [7 + i for i in range(24)], [50] * 40
    found = [
        answers(core, request_of(core, f"{i}", [head, image, tail]))[f"{i}"]
        for i, image in enumerate((pixels, changed))
    ]
    fresh = start(directory, enable_prefix_caching=False)
    assert answers(fresh, request_of(fresh, "1", [head, changed, tail]))["1"] == found[1]
    assert core.observer.get_metrics()["prefix_cache_hits"] == 16  # the block before the image


def test_texts_have_the_bits_that_they_have_without_an_encoder(saved, alone):
    kind, _, directory = saved
    core = start(directory, dtype="bfloat16", max_model_len=256, language_model_only=True)
    params = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": 0}
    request = EngineCoreRequest("none", parts_of(kind)["none"][0], SamplingParams(**params))
    assert answers(core, request) == {"none": alone["none"]}


# the first stage has the layers that add rows; windows are equal in all stages
_FULL = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
_WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
LAYERS: dict[str, dict[str, Any]] = {"gemma3": _WINDOWS, "qwen3_vl": _FULL, "qwen3_5": {}}


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [("qwen3_vl", 2, 1), ("qwen3_vl", 1, 2), ("gemma3", 2, 2), ("qwen3_5", 2, 2)],
)
def test_ranks_and_stages(kind, size, num_stages, tmp_path):
    """Each rank of the first stage encodes whole images, and positions reach every stage."""
    model = save_tiny_vision_model(tmp_path, kind, text=LAYERS[kind])
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    ranks = RankThreads(configure(tmp_path, max_num_batched_tokens=48, **sizes))
    core = EngineCore(ranks.config, ranks, check_every_step=True)
    requests = {name: request_of(core, name, parts) for name, parts in parts_of(kind).items()}
    found = answers(core, *requests.values())
    ranks.shutdown()
    for name, parts in parts_of(kind).items():
        pictures = [part for part in parts if not isinstance(part, list)]
        prompt = requests[name].prompt_token_ids
        assert found[name] == transformers_tokens(model, kind, prompt, pictures, NUM_TOKENS), name


def test_the_first_stage_has_the_layers_that_add_rows(tmp_path):
    save_tiny_vision_model(tmp_path, "qwen3_vl")
    with pytest.raises(InvalidParameterError, match="at most 2 .* 2 layers add rows of images"):
        configure(tmp_path, pipeline_parallel_size=3)
    configure(tmp_path, pipeline_parallel_size=3, language_model_only=True)


def test_adapters_beside_images(tmp_path):
    """Tokens of each adapter are those of transformers with merged weights. All share the rows of
    an image, and none finds the blocks of another.
    """
    kind, base = "qwen3_vl", tmp_path / "base"
    models = [save_tiny_vision_model(base, kind)]
    weights = {n: w for n, w in adapted_weights(base).items() if "language_model" in n}
    adapters: list[LoRARequest | None] = [None]
    for number in (1, 2):
        pairs = random_pairs(weights, seed=number)
        path = write_peft(tmp_path / f"{number}", pairs)
        adapters.append(LoRARequest(f"{number}", number, str(path)))
        merged = merge(base, tmp_path / f"merged {number}", pairs)
        models.append(type(models[0]).from_pretrained(merged, dtype=torch.float32).eval())
    core = start(base, enable_lora=True, max_loras=2, max_num_batched_tokens=16)
    parts = parts_of(kind)["several"]
    pictures = [part for part in parts if not isinstance(part, list)]
    request = request_of(core, "0", parts)
    for number, (adapter, model) in enumerate(zip(adapters, models)):
        own = msgspec.structs.replace(request, request_id=f"{number}", lora_request=adapter)
        wanted = transformers_tokens(model, kind, request.prompt_token_ids, pictures, NUM_TOKENS)
        assert answers(core, own) == {f"{number}": wanted}
    counters = core.observer.get_metrics()
    assert counters["num_images_encoded"] == 2  # three places in each prompt
    assert counters["prefix_cache_hits"] == 0
