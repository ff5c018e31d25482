"""Heads for multi-token prediction, of models with states, experts or latent attention: their
logits against the same in torch, and the files that have them.
"""

from __future__ import annotations

import json
import re
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from quire import LLM, SamplingParams
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.kernels.cpu.native.library import library
from quire.tests.gguf_hybrids import write_hybrid_gguf
from quire.tests.mtp_checkpoints import INDEXED, NEMOTRON, QWEN, TorchHead, save_with_head
from quire.tests.quantized_checkpoints import write_quantized
from quire.tests.tiny_models import save_tiny_model
from safetensors.torch import load_file, save_file

KINDS = (*QWEN, "deepseek_v3", *INDEXED, "glm4_moe_lite", "glm4_moe", NEMOTRON)
DRAFTING = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(start, end))} for start, end in ((20, 60), (90, 101))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_with_head(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of


def make_llm(directory: Path, **settings: Any) -> LLM:
    own = {"dtype": "float32", "num_threads": 1, "max_model_len": 256}
    return LLM(str(directory), engine="inproc", speculative_config=DRAFTING, **own | settings)


class Drafts(NamedTuple):
    """What a head has drafted once, and what it is compared with."""

    known: list[int]  # the tokens before
    own: list[int]
    logits: torch.Tensor  # of the first draft


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Drafts]:
    """The list grows with each of the head's drafts."""
    return watch_runner(llm.llm_engine.client._engine.core.executor.runner, monkeypatch)


def watch_runner(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[Drafts]:
    drafter, seen, passes = runner.speculation.drafter, [], []

    def watch_pass(inputs: Any) -> Any:
        results = forward(inputs)
        passes.append((inputs.slots.tolist(), results[1].clone()))
        return results

    def watch_drafts(slots: Any, counts: Any, room: int) -> Any:
        batch = runner.batch
        known = [batch.token_ids[slot, : batch.num_tokens[slot]].tolist() for slot in slots]
        passes.clear()
        drafts = draft(slots, counts, room)
        for slot, tokens, own in zip(slots, known, drafts):
            if len(own):
                of_first_pass, logits = passes[0]
                row = logits[of_first_pass.index(slot)]
                seen.append(Drafts(tokens, own.tolist(), row))
        return drafts

    forward, draft = drafter.passes.forward, drafter.draft
    monkeypatch.setattr(drafter.passes, "forward", watch_pass)
    monkeypatch.setattr(drafter, "draft", watch_drafts)
    return seen


def assert_those_of(head: TorchHead, seen: list[Drafts]) -> None:
    assert len(seen) > 10
    for known, drafts, logits in seen:
        expected, of_first = head.drafts(known, len(drafts))
        torch.testing.assert_close(logits.cpu(), of_first, rtol=1e-4, atol=3e-4)
        assert drafts == expected


def num_right(head: TorchHead, seen: list[Drafts], answers: list[list[int]]) -> int:
    """How many of the drafts that `head` makes where those in `seen` were made are accepted, if
    these are the answers to PROMPTS.
    """
    texts = [prompt["prompt_token_ids"] + answer for prompt, answer in zip(PROMPTS, answers)]
    total = 0
    for known, own, _ in seen:
        drafts, _ = head.drafts(known, len(own))
        [rest] = (text[len(known) :] for text in texts if text[: len(known)] == known)
        agrees = [draft == token for draft, token in zip(drafts, rest)]
        total += (*agrees, False).index(False)
    return total


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_drafts_are_those_of_the_same_head_in_torch(kind, checkpoint, monkeypatch):
    """Of two requests in chunks, beside each other."""
    directory = checkpoint(kind)
    with make_llm(directory, max_num_batched_tokens=13) as llm:
        seen = watch(llm, monkeypatch)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_those_of(TorchHead(directory), seen)


CHAINS = [("deepseek_v3", 3), ("glm4_moe", 2), ("qwen3_5_text", 2), (NEMOTRON, 4)]


@pytest.mark.sampled(step=8)
@pytest.mark.parametrize(
    ("kind", "num_heads", "is_right"), [(*c, r) for r in (False, True) for c in CHAINS]
)
def test_heads_in_a_chain(kind, num_heads, is_right, tmp_path, monkeypatch):
    """Each makes a draft, and the last one those that are left: the drafts and the number of
    accepted ones are those of the same heads in torch. Two requests in chunks, of which often few
    drafts or none are wanted, so that heads hold states until they have no room for more.
    """
    directory = save_with_head(tmp_path / "m", kind, is_right=is_right, num_heads=num_heads)
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2)
        for count in (40, 23)
    ]
    settings = dict(dtype="float32", num_threads=1, max_model_len=256, engine="inproc")
    with LLM(str(directory), **settings) as llm:
        expected = contents(llm.generate(PROMPTS, params, use_tqdm=False))
    with make_llm(directory, max_num_batched_tokens=13) as llm:
        drafter = llm.llm_engine.client._engine.core.executor.runner.speculation.drafter
        assert len(drafter.heads) == min(num_heads, 3)
        draft, most = drafter.draft, cycle((3, 1, 3, 0, 2, 0, 0, 0, 3))

        def draft_few(slots: Any, counts: Any, room: int) -> Any:
            return draft(slots, [min(count, next(most)) for count in counts], room)

        monkeypatch.setattr(drafter, "draft", draft_few)
        seen = watch(llm, monkeypatch)
        assert contents(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
        num_accepted = llm.get_metrics()["num_accepted_tokens"]
    head = TorchHead(directory)
    assert_those_of(head, seen)
    assert {len(one.own) for one in seen} == {1, 2, 3}
    assert num_accepted == num_right(head, seen, [tokens for tokens, _ in expected])
    assert num_accepted >= 5 * is_right


# with a regular expression of the layers of the head that stay plain, and options of the format
QUANTIZED = [
    ("qwen3_5_text", "awq", r"mtp\.", {}),
    ("qwen3_5_text", "gptq", "$", {}),
    ("qwen3_5_moe_text", "fp8", r"mtp\.fc", {}),
    ("qwen3_5_moe_text", "pack-quantized", r"mtp\.", {"group_size": 16}),
    ("glm4_moe", "awq", "$", {}),
    ("glm4_moe_lite", "pack-quantized", r"model\.layers\.3\.eh_proj", {"group_size": 8}),
    ("deepseek_v3", "fp8", r"model\.layers\.3\.", {}),
    (NEMOTRON, "fp8", r"mtp\.layers\.0\.", {}),
]
SIZES = {  # AWQ and GPTQ have words of eight rows
    "qwen3_5_text": {"linear_num_value_heads": 8},
    "glm4_moe": {"n_routed_experts": 8},
}


@pytest.mark.sampled(step=16)
@pytest.mark.parametrize(
    ("kind", "format", "unnamed", "options", "is_right"),
    [(*case, right) for right in (False, True) for case in QUANTIZED],
)
def test_heads_of_quantized_checkpoints(
    kind, format, unnamed, options, is_right, tmp_path, monkeypatch
):
    """Answers have the same bits as without drafts, and what is accepted is what a head in torch
    drafts with the weights that the files stand for.
    """
    plain = save_with_head(tmp_path / "plain", kind, is_right=is_right, **SIZES.get(kind, {}))
    directory = tmp_path / "quantized"
    meant = write_quantized(directory, plain, format, unnamed=unnamed, **options)
    save_file({n: t.contiguous() for n, t in meant.items()}, plain / "model.safetensors")
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    for dtype in ("bfloat16", "float32") if library is not None else ("float32",):
        settings = dict(dtype=dtype, num_threads=1, max_model_len=256, engine="inproc")
        with LLM(str(directory), **settings) as llm:
            expected = contents(llm.generate(PROMPTS, params, use_tqdm=False))
        with make_llm(directory, dtype=dtype) as llm:
            seen = watch(llm, monkeypatch)
            assert contents(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
            num_accepted = llm.get_metrics()["num_accepted_tokens"]
    head = TorchHead(plain)
    assert_those_of(head, seen)
    assert num_accepted == num_right(head, seen, [tokens for tokens, _ in expected])
    assert num_accepted >= 5 * is_right


def contents(outputs: list[Any]) -> list[Any]:
    return [(row.outputs[0].token_ids, row.outputs[0].logprobs) for row in outputs]


def answers(directory: Path, **settings: Any) -> tuple[list[list[int]], int]:
    with make_llm(directory, **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return [row.outputs[0].token_ids for row in outputs], llm.get_metrics()["num_drafts"]


def changed(directory: Path, to: Path, change: Any) -> Path:
    """A copy of a checkpoint, whose tensors `change` replaces."""
    shutil.copytree(directory, to)
    tensors = load_file(to / "model.safetensors")
    save_file(change(tensors), to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_experts_of_a_head_may_lie_in_one_tensor(checkpoint, tmp_path):
    def stack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        start = "mtp.layers.0.mlp.experts."
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(start)}

        def all_of(part: str) -> torch.Tensor:
            return torch.stack([own[f"{start}{i}.{part}.weight"] for i in range(len(own) // 3)])

        both = torch.cat([all_of("gate_proj"), all_of("up_proj")], 1)
        return tensors | {f"{start}gate_up_proj": both, f"{start}down_proj": all_of("down_proj")}

    directory = checkpoint("qwen3_5_moe_text")
    stacked = changed(directory, tmp_path / "stacked", stack)
    assert answers(stacked) == answers(directory)


def test_a_multimodal_checkpoint_has_a_head_beside_its_text_part(checkpoint, tmp_path):
    directory = checkpoint("qwen3_5_text")

    def place(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            re.sub(r"^model\.", "model.language_model.", name): tensor
            for name, tensor in tensors.items()
        } | {"model.visual.patch_embed.weight": torch.ones(3, 3)}

    whole = changed(directory, tmp_path / "whole", place)
    text = json.loads((whole / "config.json").read_text())
    architectures = ["Qwen3_5ForConditionalGeneration"]
    config = {"architectures": architectures, "model_type": "qwen3_5", "text_config": text}
    (whole / "config.json").write_text(json.dumps(config))
    expected, num_drafts = answers(directory)
    assert answers(whole) == (expected, num_drafts)
    assert num_drafts > 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name: not name.startswith("mtp."), "has no head for multi-token prediction"),
        (lambda name: "layers.0.mlp.up_proj" not in name or "mtp" not in name, "no file has the"),
    ],
)
def test_files_that_lack_a_head_are_refused(change, words, checkpoint, tmp_path):
    def keep(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if change(name)}

    with pytest.raises(ModelLoadError, match=words):
        make_llm(changed(checkpoint("qwen3_5_text"), tmp_path / "model", keep))


@pytest.mark.parametrize("kind", ["lfm2", "gemma3_text"])
def test_models_whose_heads_are_unknown_are_refused_by_name(kind, tmp_path):
    directory = save_tiny_model(tmp_path / kind, kind)
    with pytest.raises(
        InvalidParameterError, match=f"method mtp is not offered for {kind}"
    ) as found:
        make_llm(directory)
    assert found.value.parameter == "speculative_config"


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_gguf_file_has_the_same_head(kind, checkpoint, tmp_path):
    path = tmp_path / "m.gguf"
    write_hybrid_gguf(path, checkpoint(kind))
    found = answers(path)
    assert found == answers(checkpoint(kind)) and found[1] > 4


def test_a_gguf_file_without_a_head_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_hybrid_gguf(path, save_tiny_model(tmp_path / "model", "qwen3_5_text"))
    with pytest.raises(ModelLoadError, match=r"no head for .* \(blk\.4\.nextn\.eh_proj\.weight"):
        make_llm(path)
