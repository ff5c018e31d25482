"""Heads that draft against the same in plain torch, through their files and the whole engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quire import LLM, SamplingParams
from quire.frontend import bundled_model
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.kernels.cpu.native.calls import Op
from quire.kernels.cpu.native.replay import Program
from quire.kernels.ops import ABSENT
from quire.tests.bundled_model import heads
from quire.tests.engine_device import engine_device
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

BUNDLED = Path(bundled_model.__file__).parent
CONFIG = json.loads((BUNDLED / "config.json").read_text())
LAYERS = [0, 3, 4]


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


def make_head(kind: str, target: Any) -> heads.MTPHead | heads.Eagle3Head:
    embedding = target.get_input_embeddings().weight.detach()
    return heads.random_head(kind, CONFIG, embedding, LAYERS)


@torch.no_grad()
def greedy_drafts(head: Any, target: Any, token_ids: list[int], count: int) -> list[int]:
    """What the head drafts behind token_ids, computed from nothing."""
    result = target(torch.tensor([token_ids]), output_hidden_states=True)
    *layer_inputs, hidden = result.hidden_states
    state = head.first_state(layer_inputs, hidden)[:, :-1]
    tokens, drafts = token_ids[1:], []
    for _ in range(count):
        logits, states = head(torch.tensor([tokens]), state, torch.arange(len(tokens)))
        drafts.append(int(logits[0, -1].argmax()))
        # the next position reads the head's own state
        tokens, state = [*tokens, drafts[-1]], torch.cat([state, states[:, -1:]], 1)
    return drafts


def make_llm(kind: str, directory: Path, **settings: Any) -> LLM:
    config = {"method": kind, "model": str(directory), "num_speculative_tokens": 4}
    return LLM(
        engine="inproc",
        speculative_config=config | {"adaptive": False},
        **{"dtype": "float32", "num_threads": 1, "max_model_len": 512} | settings,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", [{}, {"sample_tokens": "reference", "rms_norm": "reference"}])
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_drafts_are_those_of_the_same_head_in_torch(kind, kernels, target, tmp_path, monkeypatch):
    head = make_head(kind, target)
    heads.save(head, tmp_path, torch.float32)
    text = "Once upon a time there was a little dog who liked to play with a red ball."
    with make_llm(kind, tmp_path, kernels=kernels, max_num_batched_tokens=13) as llm:
        runner = llm.llm_engine.client._engine.core.executor.runner
        drafter, seen = runner.speculation.drafter, []

        def watch(slots: Any, counts: Any, room: int) -> Any:
            drafts = draft(slots, counts, room)
            known = [
                runner.batch.token_ids[s, : runner.batch.num_tokens[s]].tolist() for s in slots
            ]
            seen.extend((k, d.tolist()) for k, d in zip(known, drafts) if len(d))
            return drafts

        draft = drafter.draft
        monkeypatch.setattr(drafter, "draft", watch)
        params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        llm.generate([text, text[:30]], params, use_tqdm=False)
    assert len(seen) > 8 and sum(len(drafts) for _, drafts in seen) > 24
    for known, drafts in seen:
        assert drafts == greedy_drafts(head, target, known, len(drafts))


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_tokens_outside_the_head_are_never_drafted(kind, target, tmp_path):
    head = make_head(kind, target)
    heads.save(head, tmp_path, torch.float32)
    with make_llm(kind, tmp_path) as llm:
        model = drafting_passes(llm).model
        hidden = torch.randn(3, 256, device=model.state.device)
        logits = model.compute_logits(hidden)
    is_absent = logits == ABSENT
    assert is_absent.sum(1).tolist() == 3 * [0 if kind == "mtp" else logits.shape[1] - 900]


def drafting_passes(llm: LLM) -> Any:
    return llm.llm_engine.client._engine.core.executor._draft.drafter.passes


def test_a_heads_own_vocabulary_has_any_order(target, tmp_path):
    """The output head has a row for each token of draft_vocab_size, in whatever order d2t maps them
    to the model's, and the program has its logits.
    """
    head = make_head("eagle3", target)
    heads.save(head, tmp_path / "ascending", torch.float32)
    shutil.copytree(tmp_path / "ascending", tmp_path / "mixed")

    def mix(tensors: dict[str, torch.Tensor]) -> None:
        order = torch.randperm(900, generator=torch.Generator().manual_seed(1))
        tokens = torch.arange(900) + tensors["d2t"]
        tensors["d2t"] = tokens[order] - torch.arange(900)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()

    mutilate(tmp_path / "mixed", mix)
    hidden, found = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)), []
    for name in ("ascending", "mixed"):
        with make_llm("eagle3", tmp_path / name) as llm:
            passes = drafting_passes(llm)
            assert passes.model.own_head.shards == {"lm_head": 900}
            calls = passes.run.calls if isinstance(passes.run, Program) else []
            assert not calls or [c.op for c in calls].count(Op.SPREAD_LOGITS) == 1
            found.append(passes.model.compute_logits(hidden.to(engine_device())).cpu())
    expected = torch.full_like(found[0], ABSENT)
    expected[:, head.known] = head.lm_head(hidden)
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(*found)


def mutilate(directory: Path, change: Any) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("mtp", lambda t: t.pop(heads.MIMO + "input_proj.weight"), "has no head for multi-token"),
        ("mtp", lambda t: t.pop(heads.MIMO + "mlp.up_proj.weight"), "no file has the"),
        ("eagle3", lambda t: t.pop("norm.weight"), "lacks the tensor norm.weight"),
        ("eagle3", lambda t: t.update(d2t=t["d2t"] + 5000), "tokens that the model lacks"),
        (
            "eagle3",
            lambda t: t.update(d2t=-torch.arange(900)),
            "d2t maps two tokens",
        ),
        ("eagle3", lambda t: t.update(d2t=t["d2t"][:800]), r"shape \[900\], as draft_vocab_size"),
        ("eagle3", lambda t: t.pop("d2t"), "lacks the tensor d2t, which maps"),
        (
            "eagle3",
            lambda t: t.update({"lm_head.weight": torch.ones(800, 256)}),
            r"shape \[900, 25",
        ),
        ("eagle3", lambda t: t.update({"norm.weight": torch.ones(3)}), "must have the shape"),
    ],
)
def test_bad_files_are_refused_by_name(kind, change, words, target, tmp_path):
    heads.save(make_head(kind, target), tmp_path)
    with pytest.raises(ModelLoadError, match=words):
        make_llm(kind, mutilate(tmp_path, change))


def test_what_heads_do_not_go_with(target, tmp_path):
    heads.save(make_head("eagle3", target), tmp_path)
    with pytest.raises(InvalidParameterError, match="enable_lora=False"):
        make_llm("eagle3", tmp_path, enable_lora=True)
    config = json.loads((tmp_path / "config.json").read_text())
    shutil.copy(tmp_path / "config.json", tmp_path / "kept.json")
    for change, words in (
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "three different layers"),
        ({"hidden_size": 128, "head_dim": 64}, "hidden_size must be the model's"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises((InvalidParameterError, ModelLoadError), match=words):
            make_llm("eagle3", tmp_path)


def test_a_head_may_be_among_the_models_own_weights(target, tmp_path):
    """Without speculation it is not read."""
    heads.save(make_head("mtp", target), tmp_path / "head", torch.float32)
    model = tmp_path / "model"
    shutil.copytree(BUNDLED, model)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    save_file(load_file(model / "model.safetensors") | tensors, model / "model.safetensors")
    params, answers = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), []
    for config in (None, {"method": "mtp", "adaptive": False}):
        with LLM(str(model), engine="inproc", speculative_config=config) as llm:
            outputs = llm.generate(["Once upon a time"], params, use_tqdm=False)
            answers.append(outputs[0].outputs[0].token_ids)
            num_drafts = llm.get_metrics()["num_drafts"]
    assert answers[0] == answers[1] and num_drafts > 0
