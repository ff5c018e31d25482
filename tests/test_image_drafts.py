"""Drafts for prompts with images: of a head for multi-token prediction, which reads rows of images
and positions with three components, against the same in torch; no draft changes a bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.core.engine_core import EngineCore
from quire.kernels.ops import ABSENT
from quire.tests.bundled_model import heads
from quire.tests.executor.models.test_mtp_heads import assert_those_of, watch_runner
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.mtp_checkpoints import TorchHead, save_with_head
from quire.tests.test_images import answers, configure, parts_of, request_of, start
from quire.tests.tiny_models import save_tiny_model
from quire.tests.tiny_vision import (
    HIDDEN,
    IMAGE_TOKEN,
    save_tiny_vision_model,
    transformers_inputs,
    transformers_rows,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

KIND = "qwen3_5"
FILE, CONFIG = "model.safetensors", "config.json"
DRAFTING = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}


def save_seeing_head(directory: Path, is_right: bool) -> None:
    """Writes the text model with its head to `text`, and with an encoder to `whole`."""
    save_with_head(directory / "text", "qwen3_5_text", is_right=is_right)
    save_tiny_vision_model(directory / "whole", KIND)
    tensors = load_file(directory / "whole" / FILE)
    own = load_file(directory / "text" / FILE)
    tensors |= {name.replace("model.", "model.language_model.", 1): t for name, t in own.items()}
    save_file(tensors, directory / "whole" / FILE, metadata={"format": "pt"})
    config = json.loads((directory / "whole" / CONFIG).read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (directory / "whole" / CONFIG).write_text(json.dumps(config))


class SeeingHead(TorchHead):
    """The head after a prompt with images."""

    def __init__(self, directory: Path, prompt: list[int], images: list[Tensor]):
        from transformers import AutoModelForImageTextToText

        super().__init__(directory / "text")
        auto = AutoModelForImageTextToText
        self.whole = auto.from_pretrained(directory / "whole", dtype=torch.float32).eval()
        self._images = images
        self._rows = [transformers_rows(self.whole, KIND, one) for one in images]
        tokens = [*prompt, *range(1, 60)]  # positions of what follows depend on no token
        inputs = transformers_inputs(self.whole, KIND, tokens, images)
        names = "input_ids", "image_grid_thw", "mm_token_type_ids"
        place = self.whole.model.get_rope_index
        self._positions = place(**{name: inputs[name] for name in names})[0]

    @torch.no_grad()
    def hidden(self, token_ids: list[int]) -> Tensor:
        inputs = transformers_inputs(self.whole, KIND, token_ids, self._images)
        return self.whole.model(use_cache=False, **inputs).last_hidden_state[0]

    def embed(self, token_ids: list[int]) -> Tensor:
        embedded = super().embed(token_ids)
        places = torch.tensor(token_ids) == IMAGE_TOKEN
        if places.any():  # the first token may be one, which the head does not read
            embedded[places] = torch.cat(self._rows)[-int(places.sum()) :]
        return embedded

    def _rotated(self, x: Tensor) -> Tensor:
        """By transformers' angles of three components."""
        positions = self._positions[..., : len(x)]
        cos, sin = self.whole.model.language_model.rotary_emb(x, positions)
        turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
        first, second = turned.chunk(2, -1)
        swapped = torch.cat([-second, first], -1)
        return torch.cat([turned * cos[0, :, None] + swapped * sin[0, :, None], rest], -1)


def test_a_head_reads_rows_of_images(tmp_path, monkeypatch):
    """In chunks that cut through images, of which the shortest could wait for the next drafts."""
    save_seeing_head(tmp_path, is_right=False)
    core = start(tmp_path / "whole", max_num_batched_tokens=13, speculative_config=DRAFTING)
    seen = watch_runner(core.executor.runner, monkeypatch)
    for name in ("last", "several"):
        seen.clear()
        parts = parts_of(KIND)[name]
        request = request_of(core, name, parts, max_tokens=14, ignore_eos=True)
        answers(core, request)
        images = [part for part in parts if not isinstance(part, list)]
        assert_those_of(SeeingHead(tmp_path, request.prompt_token_ids, images), seen)


def test_a_head_of_the_last_stage_reads_rows_of_images(tmp_path, monkeypatch):
    """Ranks of both stages encode the images. Tokens are those of one process."""
    save_seeing_head(tmp_path, is_right=False)
    settings: dict[str, Any] = {"max_num_batched_tokens": 13, "speculative_config": DRAFTING}
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    ranks = RankThreads(configure(tmp_path / "whole", **settings, **sizes))
    core = EngineCore(ranks.config, ranks, check_every_step=True)
    alone = start(tmp_path / "whole", **settings)
    seen = watch_runner(ranks.ranks[-1].runner, monkeypatch)
    parts = parts_of(KIND)["several"]
    request = request_of(core, "several", parts, max_tokens=14, ignore_eos=True)
    assert answers(core, request) == answers(alone, request)
    ranks.shutdown()
    images = [part for part in parts if not isinstance(part, list)]
    assert_those_of(SeeingHead(tmp_path, request.prompt_token_ids, images), seen)


def test_drafts_change_no_bit(tmp_path):
    """A draft model reads the text alone."""
    save_seeing_head(tmp_path, is_right=True)
    draft = str(save_tiny_model(tmp_path / "draft", "qwen2"))
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 32}
    found, metrics = [], []
    for wanted in (None, DRAFTING, DRAFTING | {"method": "draft_model", "model": draft}):
        core = start(tmp_path / "whole", speculative_config=wanted, **settings)
        requests = [
            request_of(core, name, parts, max_tokens=24, ignore_eos=True)
            for name, parts in parts_of(KIND).items()
        ]
        found.append(answers(core, *requests))
        metrics.append(core.observer.get_metrics())
    assert found[0] == found[1] == found[2]
    assert metrics[1]["num_accepted_tokens"] > 20 and metrics[2]["num_draft_tokens"] > 20


class SeeingEagle:
    """A head of EAGLE-3 for a model that reads images."""

    LAYERS = [1, 3, 5]

    def __init__(self, directory: Path, kind: str):
        layers = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
        self.whole = save_tiny_vision_model(directory, kind, text=layers)
        config = self.whole.config.text_config.to_dict() | {"rope_theta": 1e4}
        config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        self._embedding = self.whole.get_input_embeddings().weight.detach()
        self._head = heads.random_head("eagle3", config, self._embedding, self.LAYERS, 200)
        heads.save(self._head, directory / "head", torch.float32)
        self._kind, self._images, self._read = kind, list[Tensor](), list[Tensor]()
        text = getattr(self.whole.model, "language_model", None) or self.whole.model.text_model
        for layer in text.layers:  # before it, rows of images may be added (Qwen3-VL)
            layer.register_forward_pre_hook(lambda layer, args: self._read.append(args[0]))

    def read(self, images: list[Tensor]) -> None:
        """The prompts that follow have these images. Each of their rows is a token then."""
        rows = [transformers_rows(self.whole, self._kind, one)[:, :HIDDEN] for one in images]
        self._images, self._num_rows = images, sum(map(len, rows))
        self._head.embedding = torch.cat([self._embedding, *rows])

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> tuple[list[int], Tensor]:
        """The head's `count` drafts behind token_ids, and its logits of the first one."""
        inputs = transformers_inputs(self.whole, self._kind, token_ids, self._images)
        self._read.clear()
        self.whole(use_cache=False, **inputs)
        state = self._head.first_state(self._read, self._read[-1])[:, :-1]
        tokens, num_tokens = torch.tensor([token_ids]), len(self._embedding)
        places = (tokens[0] == IMAGE_TOKEN).nonzero()[: self._num_rows, 0]
        tokens[0, places] = torch.arange(num_tokens, num_tokens + self._num_rows)
        tokens, found = tokens[:, 1:], list[Tensor]()
        for _ in range(count):
            logits, states = self._head(tokens, state, torch.arange(tokens.shape[1]))
            found.append(logits[0, -1, :num_tokens])
            tokens = torch.cat([tokens, found[-1].argmax().view(1, 1)], 1)
            state = torch.cat([state, states[:, -1:]], 1)
        of_first = found[0].masked_fill(found[0] == -1e30, ABSENT)
        return [int(one.argmax()) for one in found], of_first


@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [
        ("smolvlm", 1, 3),  # the head reads a layer of each stage
        pytest.param("qwen3_vl", 2, 2, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_a_head_that_reads_layers_of_several_stages(kind, size, num_stages, tmp_path, monkeypatch):
    """Each stage encodes what it has to, and what a head of EAGLE-3 reads travels behind it."""
    head = SeeingEagle(tmp_path, kind)
    wanted = DRAFTING | {"method": "eagle3", "model": str(tmp_path / "head")}
    settings: dict[str, Any] = {"max_num_batched_tokens": 13}
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    ranks = RankThreads(configure(tmp_path, speculative_config=wanted, **sizes, **settings))
    core = EngineCore(ranks.config, ranks, check_every_step=True)
    core.scheduler.limits.least_samples = 1
    alone = start(tmp_path, **settings)
    requests = [
        request_of(core, name, parts, max_tokens=20, ignore_eos=True)
        for name, parts in parts_of(kind).items()
        if name in ("none", "first", "several")
    ]
    seen = watch_runner(ranks.ranks[-1].runner, monkeypatch)
    assert answers(core, *requests) == answers(alone, *requests)
    ranks.shutdown()
    images = [part for part in parts_of(kind)["several"] if not isinstance(part, list)]
    head.read(images)
    prompt = requests[-1].prompt_token_ids
    assert_those_of(head, [one for one in seen if one.known[: len(prompt)] == prompt])
