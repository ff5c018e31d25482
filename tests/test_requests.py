"""Request options end to end: the same outputs through every client, alone and beside other
requests.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from quire import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from quire.ipc.params import child_seed
from quire.tests.tiny_models import EOS_TOKEN_ID, save_tiny_model

ARGUMENTS = {"dtype": "float32", "max_model_len": 256, "num_threads": 1}
STORY = "Once upon a time"
# the children's seeds wrap around
FAMILY = {"n": 4, "temperature": 0.9, "seed": 2**63 - 3, "max_tokens": 24}


@pytest.fixture(scope="module", params=["inproc", "process"])
def llm(request):
    with LLM(engine=request.param, **ARGUMENTS) as made:
        yield made


def tokens_of(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_n_completions_equal_n_requests_with_child_seeds(llm) -> None:
    [family] = llm.generate(STORY, SamplingParams(**FAMILY, logprobs=1), use_tqdm=False)
    alone = [
        SamplingParams(**{**FAMILY, "n": 1, "seed": child_seed(FAMILY["seed"], i)}, logprobs=1)
        for i in range(4)
    ]
    singles = llm.generate([STORY] * 4, alone, use_tqdm=False)
    assert tokens_of(family) == [single.outputs[0].token_ids for single in singles]
    assert len({completion.text for completion in family.outputs}) == 4
    for completion, single in zip(family.outputs, singles, strict=True):
        assert (
            completion.text == single.outputs[0].text
            and completion.finish_reason == single.outputs[0].finish_reason
        )
        assert completion.cumulative_logprob == pytest.approx(
            single.outputs[0].cumulative_logprob, abs=1e-3
        )
        assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids


def test_the_first_completion_does_not_depend_on_n(llm) -> None:
    first = [
        tokens_of(llm.generate(STORY, SamplingParams(**{**FAMILY, "n": n}), use_tqdm=False)[0])[0]
        for n in (1, 2, 7)
    ]
    assert first[0] == first[1] == first[2]


def test_each_completion_stops_independently(llm) -> None:
    [plain] = llm.generate(STORY, SamplingParams(**FAMILY), use_tqdm=False)
    word = plain.outputs[1].text.split()[-2]
    [stopped] = llm.generate(STORY, SamplingParams(**FAMILY, stop=[word]), use_tqdm=False)
    for before, after in zip(plain.outputs, stopped.outputs, strict=True):
        assert (
            after.text == before.text.split(word)[0]
            and before.token_ids[: len(after.token_ids)] == after.token_ids
        )
        assert after.finish_reason == ("stop" if word in before.text else before.finish_reason)
    assert stopped.finished and stopped.outputs[1].stop_reason == word


def test_n_completions_beside_others_and_over_asyncio_are_the_same(llm) -> None:
    prompts = [STORY, "One day, a little fox", STORY]
    params = [
        SamplingParams(**FAMILY),
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(**{**FAMILY, "seed": 5}),
    ]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [
        llm.generate(prompt, p, use_tqdm=False)[0]
        for prompt, p in zip(prompts, params, strict=True)
    ]
    assert [tokens_of(output) for output in together] == [tokens_of(output) for output in alone]

    async def stream() -> tuple[list[str], bool]:
        engine = AsyncLLM.from_engine_args(EngineArgs(**ARGUMENTS), engine="inproc")
        texts = [""] * 4
        try:
            delta = SamplingParams(**FAMILY, output_kind=RequestOutputKind.DELTA)
            async for output in engine.generate(STORY, delta, "family"):
                for completion in output.outputs:
                    texts[completion.index] += completion.text
            left = engine.generate(
                STORY, SamplingParams(**{**FAMILY, "max_tokens": 200}, ignore_eos=True), "left"
            )
            await anext(left)
            await left.aclose()  # aborts all four
            while (state := await engine.call_utility("scheduler_state"))["running"]:
                await asyncio.sleep(0.001)
            return texts, engine.has_unfinished_requests() or bool(state["waiting"])
        finally:
            engine.shutdown()

    assert asyncio.run(asyncio.wait_for(stream(), 60)) == (
        [completion.text for completion in alone[0].outputs],
        False,
    )


def test_prompt_logprobs_equal_those_of_sampling(llm) -> None:
    """The log-probability of a prompt token equals that of sampling it, with or without prefix
    cache hits.
    """
    [first] = llm.generate(
        STORY,
        SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True),
        use_tqdm=False,
    )
    tokens = first.prompt_token_ids + first.outputs[0].token_ids
    [scored] = llm.generate(
        {"prompt_token_ids": tokens},
        SamplingParams(max_tokens=1, prompt_logprobs=2),
        use_tqdm=False,
    )
    assert len(scored.prompt_logprobs) == len(tokens) and scored.prompt_logprobs[0] is None
    behind = scored.prompt_logprobs[len(first.prompt_token_ids) :]
    for position, sampled, token_id in zip(
        behind, first.outputs[0].logprobs, first.outputs[0].token_ids, strict=True
    ):
        assert position[token_id].logprob == pytest.approx(sampled[token_id].logprob, abs=1e-3)
        assert position[token_id].rank == sampled[token_id].rank == 1
    assert (
        "".join(p[t].decoded_token for p, t in zip(behind, first.outputs[0].token_ids, strict=True))
        == first.outputs[0].text
    )


def test_the_whole_vocabulary_sums_to_one() -> None:
    with LLM(engine="inproc", max_logprobs=-1, **ARGUMENTS) as llm:
        [output] = llm.generate(
            STORY,
            SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1),
            use_tqdm=False,
        )
    vocab_size = llm.llm_engine.config.model_config.hf_config["vocab_size"]
    for position in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
        assert (
            len(position) == vocab_size
            and len({entry.rank for entry in position.values()}) == vocab_size
        )
        assert torch.tensor(
            [entry.logprob for entry in position.values()]
        ).exp().sum().item() == pytest.approx(1.0, abs=1e-4)


def test_word_lists_and_biases_apply(llm) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [plain] = llm.generate(STORY, greedy, use_tqdm=False)
    word = max(plain.outputs[0].text.split(), key=len).strip(",.")
    [without] = llm.generate(
        STORY,
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words=[word]),
        use_tqdm=False,
    )
    written = [
        llm.get_tokenizer().encode(text, add_special_tokens=False) for text in (word, f" {word}")
    ]
    assert word in plain.outputs[0].text
    for ids in written:
        tokens = without.outputs[0].token_ids
        assert ids not in [tokens[i : i + len(ids)] for i in range(len(tokens))]
    [allowed] = llm.generate(
        STORY, SamplingParams(max_tokens=20, seed=1, allowed_token_ids=[10, 11, 12]), use_tqdm=False
    )
    assert set(allowed.outputs[0].token_ids) <= {10, 11, 12}
    [biased] = llm.generate(
        STORY, SamplingParams(temperature=0, max_tokens=5, logit_bias={77: 100}), use_tqdm=False
    )
    assert biased.outputs[0].token_ids == [77] * 5
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    [once] = llm.generate(
        STORY,
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **penalties),
        use_tqdm=False,
    )
    assert len(set(once.outputs[0].token_ids)) > len(set(plain.outputs[0].token_ids))


# ---------------------------------------------------------------- min_tokens


@pytest.fixture(scope="module")
def ending_model(tmp_path_factory) -> str:
    """Save a tiny model that often samples an end-of-sequence token."""
    from transformers import AutoModelForCausalLM

    directory = save_tiny_model(tmp_path_factory.mktemp("ending"), "qwen2", seed=3)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[EOS_TOKEN_ID] *= 3
    model.save_pretrained(directory)
    return str(directory)


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    "options", [{}, {"num_scheduler_steps": 4}, {"async_scheduling": True}], ids=str
)
def test_nothing_stops_a_request_before_min_tokens(ending_model, options) -> None:
    prompts = [{"prompt_token_ids": list(range(i + 5, i + 15))} for i in range(0, 200, 10)]
    with LLM(ending_model, engine="inproc", dtype="float32", max_model_len=128, **options) as llm:

        def lengths(**params) -> list[int]:
            outputs = llm.generate(
                prompts,
                SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **params}),
                use_tqdm=False,
            )
            for output in outputs:
                completion, min_tokens = output.outputs[0], params.get("min_tokens", 0)
                assert output.error is None and len(completion.token_ids) >= min_tokens
                assert (
                    params.get("ignore_eos")
                    or EOS_TOKEN_ID not in completion.token_ids[:min_tokens]
                )
                assert not {*params.get("stop_token_ids", [])} & {
                    *completion.token_ids[:min_tokens]
                }
            return [len(output.outputs[0].token_ids) for output in outputs]

        for params in (
            {},
            {"temperature": 1.0, "seed": 1},
            {"stop_token_ids": [*range(0, 250, 5)], "temperature": 1.0, "seed": 2},
        ):
            ends = lengths(**params)
            assert min(ends) < 10  # otherwise the rest would prove nothing
            for min_tokens in (10, 40):
                assert min(lengths(min_tokens=min_tokens, **params)) >= min_tokens
        stops = {
            "stop": ["e", "t", "a", "i", "o"],
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": 3,
        }
        assert min(lengths(**stops)) < 10 and min(lengths(min_tokens=10, **stops)) > 10
