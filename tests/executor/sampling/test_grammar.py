"""Grammar masks of requests in slots: the tokens they allow, whatever happened between two steps.
Also checks and their cache.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import psutil
import pytest
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.sampling import grammar
from quire.executor.sampling.grammar import Grammars
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.token_stages import make_stages
from quire.ipc.errors import InvalidParameterError
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.ipc.step_messages import NewRequestData, RowRefusal
from quire.kernels import registry
from quire.tests.executor.driver import make_config
from quire.tests.fake_engine import wait_until
from quire.tests.structured.generator import numbered
from quire.tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, save_tiny_model
from tokenizers import Tokenizer

OPS = registry.select("cpu", torch.float32)
MASKED = float("-inf")
OTHER_EOS = 300


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(directory) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


class Bench:
    """Slots with requests of one prompt token, and one row of flat logits for each."""

    def __init__(self, directory, tokenizer: Tokenizer, **arguments):
        self.tokenizer = tokenizer
        self.grammars = Grammars(make_config(directory, **arguments), OPS, VOCAB_SIZE)
        self.batch = InputBatch(8, 64, 16, make_stages(OPS, VOCAB_SIZE, 8, 64, (), self.grammars))

    def enter(self, slot: int, output: str = "", eos: list[int] | None = None, **params) -> None:
        kinds = {
            name: params.pop(name) for name in ("regex", "choice", "grammar") if name in params
        }
        if kinds:
            params["structured_outputs"] = StructuredOutputsParams(**kinds)
        sampling = SamplingParams(seed=0, temperature=0.0, **params)
        token_ids = [5, *self.tokenizer.encode(output).ids]
        self.batch.add(
            NewRequestData(
                slot,
                f"r{slot}",
                token_ids,
                1,
                sampling,
                eos_token_ids=[EOS_TOKEN_ID] if eos is None else eos,
            )
        )

    def append(self, slot: int, text: str) -> None:
        for token_id in self.tokenizer.encode(text).ids:
            self.batch.append_tokens(np.array([slot]), np.array([token_id]))

    def step(self, *slots: int, begin: bool = True) -> tuple[list[set[str]], dict[int, str]]:
        """Return the texts that each slot's row allows, and errors by row."""
        if begin:
            self.grammars.start(np.array(slots), self.batch)
        logits = torch.zeros(len(slots), VOCAB_SIZE)
        errors = self.batch.stages(logits, np.array(slots), self.batch)
        texts = {row: str(error) for row, error in errors.items()}
        return [self._texts(row) for row in logits.numpy()], texts

    def _texts(self, row: np.ndarray) -> set[str]:
        allowed = np.flatnonzero(row != MASKED).tolist()
        return (
            {self.tokenizer.id_to_token(i) or f"<{i}>" for i in allowed}
            if len(allowed) < VOCAB_SIZE
            else {"everything"}
        )


@pytest.fixture
def bench(directory, tokenizer) -> Iterator[Bench]:
    bench = Bench(directory, tokenizer)
    yield bench
    bench.grammars.shutdown()


END = "<|im_end|>"


def test_rows_without_a_grammar_are_unchanged_and_cost_nothing(bench):
    bench.enter(0)
    assert bench.step(0) == ([{"everything"}], {})
    assert bench.grammars._mask_pool is None and not bench.batch.stages.num_slots


def test_a_row_follows_its_tokens_and_ends_with_end_of_sequence(bench):
    bench.enter(0)
    bench.enter(1, choice=["xy", "xyz"])
    assert bench.step(0, 1) == ([{"everything"}, {"x"}], {})
    bench.append(1, "x")
    assert bench.step(1)[0] == [{"y"}]
    bench.append(1, "y")
    assert bench.step(1)[0] == [{"z", END}]
    bench.append(1, "z")
    assert bench.step(1)[0] == [{END}]


@pytest.mark.parametrize("begin", [True, False], ids=["started", "not started"])
def test_rows_may_come_in_any_order_and_choice(bench, begin):
    for slot, text in enumerate(["ab", "cd", "ef"]):
        bench.enter(slot, choice=[text])
    assert bench.step(2, 0, begin=begin)[0] == [{"e"}, {"a"}]
    bench.append(0, "a")
    assert bench.step(1, 0, 2, begin=begin)[0] == [{"c"}, {"b"}, {"e"}]


def test_several_tokens_between_two_steps_or_none(bench):
    bench.enter(0, choice=["abcd"])
    assert bench.step(0)[0] == bench.step(0)[0] == [{"a"}]  # a sample that was dropped
    bench.append(0, "abc")
    assert bench.step(0)[0] == [{"d"}]


def test_a_preempted_request_resumes_with_its_output(bench):
    bench.enter(0, choice=["abcd", "axyz"])
    bench.step(0)
    bench.batch.remove(0)
    bench.enter(0, choice=["zz"])  # another request has the slot in the meantime
    bench.enter(3, output="ax", choice=["abcd", "axyz"])
    assert bench.step(0, 3)[0] == [{"z"}, {"y"}]


def test_the_prompt_is_not_part_of_the_output(bench):
    bench.tokenizer.encode("a")
    params = SamplingParams(seed=0, structured_outputs=StructuredOutputsParams(choice=["abc"]))
    prompt = bench.tokenizer.encode("abab").ids
    bench.batch.add(
        NewRequestData(0, "r", prompt, len(prompt), params, eos_token_ids=[EOS_TOKEN_ID])
    )
    assert bench.step(0)[0] == [{"a"}]


def test_a_request_ends_with_its_own_end_of_sequence_tokens(bench):
    bench.enter(0, output="a", choice=["a"], eos=[OTHER_EOS, EOS_TOKEN_ID, VOCAB_SIZE + 7])
    bench.enter(1, output="a", choice=["a"], eos=[OTHER_EOS])
    assert bench.step(0, 1)[0] == [{"<|endoftext|>", END}, {"<|endoftext|>"}]


def test_tokens_after_the_end_are_ignored(bench):
    """A step may be submitted before the end of the request is known."""
    bench.enter(0, choice=["a"])
    bench.enter(1, choice=["b"])
    bench.append(0, f"a{END}")
    assert bench.step(0, 1) == ([{END}, {"b"}], {})
    bench.append(0, "qqq")
    assert bench.step(0, 1) == ([{END}, {"b"}], {})


def test_min_tokens_beyond_the_grammars_end_fails_the_request(bench):
    bench.enter(0, output="a", choice=["a"], min_tokens=4)
    bench.enter(1, output="a", choice=["ab"], min_tokens=4)
    texts, errors = bench.step(0, 1)
    assert list(errors) == [0] and "min_tokens" in errors[0] and texts[1] == {"b"}


def test_a_token_that_the_grammar_forbids_fails_the_request(bench):
    bench.enter(0, choice=["ab"])
    bench.enter(1, choice=["cd"])
    bench.append(0, "x")
    texts, errors = bench.step(0, 1)
    assert (
        list(errors) == [0] and errors[0].startswith("structured_outputs: ") and texts[1] == {"c"}
    )
    assert list(bench.step(0, 1)[1]) == [0]


def test_limits_exceeded_later_fail_the_request(bench):
    bench.enter(0, regex="((a{1,100}){1,100}){1,100}", max_tokens=1000)
    bench.enter(1, choice=["cd"])
    bench.batch.token_ids = np.pad(bench.batch.token_ids, ((0, 0), (0, 2000)))
    bench.append(0, "a" * 1500)
    texts, errors = bench.step(0, 1)
    assert list(errors) == [0] and "too many expressions" in errors[0] and texts[1] == {"c"}


def test_the_message_of_a_dead_end(bench):
    bench.enter(0, output="a", grammar='start: "a" T\nT: /b/ & /c/')
    assert "dead end" in bench.step(0)[1][0]


def test_an_invalid_unchecked_grammar_fails_the_request(bench):
    bench.enter(0, regex="a(")
    bench.enter(1, choice=["cd"])
    texts, errors = bench.step(0, 1)
    assert "unclosed group" in errors[0] and texts[1] == {"c"}


class Faulty:
    """A matcher that fails in one way."""

    def __init__(self, matcher, **faults):
        self._matcher, self._faults = matcher, faults

    def __getattr__(self, name):
        return self._faults.get(name) or getattr(self._matcher, name)


def raising(*_):
    raise MemoryError("a fault for the test")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "faults",
    [
        dict(consume_tokens=raising),
        dict(consume_tokens=lambda token_ids: False),
        dict(unsafe_compute_mask_ptr=raising),
        dict(unsafe_compute_mask_ptr=lambda *_: None, is_error=lambda: True),
        dict(is_accepting=raising),
        dict(compute_ff_tokens=raising),
    ],
    ids=["take", "refuse", "mask", "error", "end", "force"],
)
def test_a_row_whose_grammar_cannot_go_on_is_an_error_and_allows_no_token(
    bench, caplog, faults, temperature
):
    """Whatever fails, and whatever else the request asks for: no token is sampled without a
    mask.
    """
    for slot, text in enumerate(["xbc1 ", "cd"]):
        bench.enter(slot, choice=[text, text + "z"])
    bench.batch.temperature[:2] = temperature
    bench.step(0, 1)
    broken = bench.grammars._slots[0]
    broken.matcher = Faulty(broken.matcher, **faults)
    bench.append(0, "xbc1 " if "is_accepting" in faults else "x")
    if "compute_ff_tokens" in faults:
        assert bench.grammars.jump(np.array([0]), bench.batch) == {}
    bench.grammars.start(np.array([0, 1]), bench.batch)
    sampled = Sampler(OPS)(torch.zeros(2, VOCAB_SIZE), bench.batch, np.array([0, 1]))
    assert list(sampled.errors) == [0] and not bench.grammars._bitmask[0].any()
    assert bench.tokenizer.id_to_token(int(sampled.token_ids[1])) == "c"
    if "MemoryError" in str(sampled.errors[0]):
        assert isinstance(sampled.errors[0], str) and "a fault for the test" in caplog.text
    else:
        assert isinstance(sampled.errors[0], RowRefusal)


def test_an_end_that_a_grammar_names_ends_the_output(bench):
    bench.enter(0, grammar=f'start: ("x" | "y") "a{END}" {END} "b"')
    bench.step(0)
    bench.append(0, "x")
    assert jump(bench, 0) == {0: f"a{END}{END}"}  # the first is written as characters
    assert EOS_TOKEN_ID not in bench.batch.token_ids[0, : bench.batch.num_tokens[0] - 1]
    assert bench.step(0) == ([{END}], {})


def test_the_time_of_each_matcher_is_measured(bench):
    """Of a grammar whose cost grows with the text, and of a usual one beside it."""
    bench.batch.token_ids = np.pad(bench.batch.token_ids, ((0, 0), (0, 2000)))
    bench.enter(0, grammar='start: s\ns: s s s | s "a" | "a" | ""', max_tokens=1000)
    bench.enter(1, regex="a*", max_tokens=1000)
    for slot in (0, 1):
        bench.append(slot, "a" * 100)
    bench.step(0, 1)
    costs = bench.grammars.take_costs([0, 1, 5])
    assert costs[0] > 20 * costs.get(1, 0.001) and bench.grammars.take_costs([0, 1]) == {}


def test_equal_grammars_are_compiled_once_and_have_separate_states(bench, monkeypatch):
    compiled = []
    compile_ = bench.grammars.compiler.compile
    monkeypatch.setattr(
        bench.grammars.compiler,
        "compile",
        lambda params: compiled.append(params) or compile_(params),
    )
    bench.enter(0, choice=["abc"])
    assert bench.step(0)[0] == [{"a"}]  # in one step, two threads may be equally fast
    bench.enter(1, choice=["abc"])
    bench.append(0, "a")
    assert bench.step(0, 1)[0] == [{"b"}, {"a"}] and len(compiled) == 1


def test_the_cache_evicts_the_least_recently_used(bench, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_COMPILED", 2)
    for slot, text in enumerate("abcb"):
        bench.enter(slot, choice=[text])
    bench.step(0, 1, 2, 3)
    assert len(bench.grammars._compiled) == 2
    assert bench.step(0, 1, 2, 3)[0] == [{"a"}, {"b"}, {"c"}, {"b"}]


def test_large_grammars_are_evicted_earlier(bench, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_COMPILED_BYTES", 1000)
    kept = []
    # A step for each: in one step, two threads compile and the order of the cache is theirs.
    for slot, text in enumerate(("a" * 300, "b" * 900, "c" * 2000)):
        bench.enter(slot, choice=[text])
        assert bench.step(slot)[0] == [{text[0]}]
        kept.append(len(bench.grammars._compiled))
    assert kept == [1, 1, 0] and bench.grammars._compiled_bytes == 0


def test_a_refusal_does_not_keep_the_grammar(bench):
    error = bench.grammars.check(StructuredOutputsParams(regex="a(")).exception(60)
    assert isinstance(error, InvalidParameterError) and error.__traceback__ is None


def test_masks_are_computed_in_parallel_with_the_step(bench, monkeypatch):
    """`start` returns while they are being computed; `apply` waits for them."""
    may_go_on = threading.Event()
    find = bench.grammars._find_masks
    monkeypatch.setattr(
        bench.grammars, "_find_masks", lambda work: may_go_on.wait(60) and find(work)
    )
    bench.enter(0, choice=["ab"])
    bench.grammars.start(np.array([0]), bench.batch)
    assert not bench.grammars._masks.done()
    may_go_on.set()
    assert bench.step(0, begin=False)[0] == [{"a"}]


# ---------------------------------------------------------------- forced tokens


def jump(bench: Bench, *slots: int) -> dict[int, str]:
    forced = bench.grammars.jump(np.array(slots), bench.batch)
    for slot, token_ids in forced.items():
        end = bench.batch.num_tokens[slot]
        assert bench.batch.token_ids[slot, end - len(token_ids) : end].tolist() == token_ids
    return {
        slot: bench.tokenizer.decode(token_ids, skip_special_tokens=False)
        for slot, token_ids in forced.items()
    }


def test_forced_tokens_are_appended_and_masks_continue_after_them(bench):
    bench.enter(0, choice=["xabc1", "xabc2", "y"])
    bench.enter(1, choice=["ab", "cd"])
    bench.enter(2)
    bench.step(0, 1, 2)
    bench.append(0, "x")
    bench.append(1, "c")
    bench.append(2, "q")
    assert jump(bench, 0, 1, 2) == {0: "abc", 1: f"d{END}"}
    assert bench.step(0, 1)[0] == [{"1", "2"}, {END}]
    bench.append(0, "2")
    assert jump(bench, 0, 1) == {0: END}


def test_a_choice_of_end_of_sequence_tokens_is_left_to_the_model(bench):
    bench.enter(0, choice=["ab", "cd"], eos=[EOS_TOKEN_ID, OTHER_EOS])
    bench.step(0)
    bench.append(0, "a")
    assert jump(bench, 0) == {0: "b"}
    assert bench.step(0)[0] == [{"<|endoftext|>", END}]


def test_forced_tokens_of_one_step_are_bounded(bench, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_FORCED_TOKENS", 5)
    bench.enter(0, choice=["abcdefgh", "x"])
    bench.step(0)
    bench.append(0, "a")
    assert jump(bench, 0) == {0: "bcdef"} and bench.step(0)[0] == [{"g"}]


def test_no_tokens_are_forced_beyond_the_context(bench):
    bench.enter(0, choice=["a" + "b" * 100, "c"])
    bench.step(0)
    bench.append(0, "a")
    assert jump(bench, 0) == {0: "b" * 62}  # 64, less the prompt and the sampled token
    assert bench.batch.num_tokens[0] == 64


@pytest.mark.parametrize(
    "params",
    [
        dict(min_tokens=2),
        dict(logprobs=0),
        dict(allowed_token_ids=[1, 2]),
        dict(bad_words_token_ids=[[1]]),
    ],
    ids=str,
)
def test_requests_that_need_every_step_do_not_jump(bench, params):
    bench.enter(0, choice=["ab", "cd"], **params)
    bench.step(0)
    bench.append(0, "a")
    assert jump(bench, 0) == {}
    assert "b" in bench.step(0)[0][0] or bench.step(0)[1]


@pytest.mark.parametrize(
    "settings",
    [dict(enable_jump_forward=False), dict(async_scheduling=True), dict(num_scheduler_steps=2)],
    ids=str,
)
def test_settings_without_jumps(directory, tokenizer, settings):
    bench = Bench(directory, tokenizer, **settings)
    bench.enter(0, choice=["ab", "cd"])
    bench.step(0)
    bench.append(0, "a")
    assert jump(bench, 0) == {} and bench.step(0)[0] == [{"b"}]
    bench.grammars.shutdown()


def test_a_failed_grammar_forces_no_tokens(bench):
    bench.enter(0, choice=["ab", "cd"])
    bench.step(0)
    bench.append(0, "x")
    assert jump(bench, 0) == {}
    assert list(bench.step(0)[1]) == [0]


def allowed_ids(bench: Bench, slot: int) -> list[int]:
    """Without end-of-sequence tokens. Empty if the grammar has ended or failed."""
    logits = torch.zeros(1, VOCAB_SIZE)
    errors = bench.batch.stages(logits, np.array([slot]), bench.batch)
    allowed = np.flatnonzero(logits[0].numpy() != MASKED).tolist()
    return (
        []
        if errors or len(allowed) == VOCAB_SIZE
        else [token_id for token_id in allowed if token_id != EOS_TOKEN_ID]
    )


def test_forced_tokens_equal_those_of_one_token_masks(bench):
    """On random grammars, compare the tokens of `jump` with masks that have one bit."""
    num_forced, draw, batch = 0, random.Random(0), bench.batch
    for seed, params in numbered(30_000, 60):
        for slot in (0, 1):
            bench.enter(slot, structured_outputs=params)
        while (allowed := allowed_ids(bench, 0)) and batch.num_tokens[0] < 40:
            token_id = draw.choice(allowed)
            for slot in (0, 1):
                batch.append_tokens(np.array([slot]), np.array([token_id]))
            jump(bench, 0)
            end = batch.num_tokens[0] - (
                batch.token_ids[0, batch.num_tokens[0] - 1] == EOS_TOKEN_ID
            )
            while batch.num_tokens[1] < end:
                (token_id,) = allowed_ids(bench, 1)
                batch.append_tokens(np.array([1]), np.array([token_id]))
                num_forced += 1
            assert (batch.token_ids[0, :end] == batch.token_ids[1, :end]).all(), (seed, params)
        for slot in (0, 1):
            batch.remove(slot)
    assert num_forced > 50


# ---------------------------------------------------------------- drafts


def draw_drafts(bench: Bench, slot: int, draw: random.Random) -> list[int]:
    """Up to four tokens that may follow, by another matcher."""
    matcher, drafts = bench.grammars._slots[slot].matcher.deep_copy(), []
    while len(drafts) < 4 and not matcher.is_stopped():
        words = np.zeros(bench.grammars.compiler.num_mask_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        allowed = [int(i) for i in np.flatnonzero(bits) if i != EOS_TOKEN_ID]
        if not allowed:
            break
        drafts.append(draw.choice(allowed))
        assert matcher.consume_token(drafts[-1])
    return drafts


def test_masks_after_drafts_are_those_without_drafts(bench):
    """On random grammars: slot 0 looks ahead, and slot 1 takes the same tokens one by one."""
    draw, batch, grammars, num_known = random.Random(1), bench.batch, bench.grammars, 0
    both = np.array([0, 1])

    def append(token_id: int) -> None:
        batch.append_tokens(both, np.array([token_id, token_id]))

    for seed, params in numbered(31_000, 40):
        for slot in (0, 1):
            bench.enter(slot, structured_outputs=params)
        while (allowed := allowed_ids(bench, 1)) and batch.num_tokens[1] < 40:
            drafts = draw_drafts(bench, 1, draw)
            assert grammars.num_allowed(0, np.array(drafts), batch) == len(drafts)
            grammars.start(both, batch)
            grammars.look_ahead([0, 1], [np.array(drafts), np.array([], np.int64)])
            for token_id in drafts[: draw.randint(0, 4)]:
                append(token_id)
                found, expected = (grammars._masks_of(both[i : i + 1], batch) for i in (0, 1))
                assert (found == expected).all(), (seed, params)
                num_known += grammars._slots[0].mask is not None
            if not (allowed := allowed_ids(bench, 1)):
                break
            append(draw.choice(allowed))
            assert allowed_ids(bench, 0) == allowed_ids(bench, 1), (seed, params)
        for slot in (0, 1):
            batch.remove(slot)
    assert num_known > 100


# ---------------------------------------------------------------- checks


def test_a_check_accepts_and_refuses(bench):
    bench.grammars.check(StructuredOutputsParams(json={"type": "object"})).result(60)
    assert bench.grammars._compiled  # so nothing is compiled when it enters
    error = bench.grammars.check(StructuredOutputsParams(regex="a(")).exception(60)
    assert isinstance(error, InvalidParameterError) and error.parameter == "structured_outputs"
    error = bench.grammars.check(StructuredOutputsParams(regex="\ud800")).exception(60)
    assert error.parameter == "structured_outputs.regex"


def test_equal_grammars_share_one_check(bench, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_VERDICTS", 2)
    first = bench.grammars.check(StructuredOutputsParams(json={"type": "object"}))
    assert bench.grammars.check(StructuredOutputsParams(json='{"type": "object"}')) is first
    for text in "ab":
        bench.grammars.check(StructuredOutputsParams(choice=[text])).result(60)
    assert bench.grammars.check(StructuredOutputsParams(json={"type": "object"})) is not first


def test_a_check_that_raised_is_retried(bench, monkeypatch):
    def fail(self, params):
        raise RuntimeError("no process")

    with monkeypatch.context() as patch:
        patch.setattr(grammar.GrammarCheck, "check", fail)
        assert isinstance(
            bench.grammars.check(StructuredOutputsParams(choice=["a"])).exception(60), RuntimeError
        )
    assert bench.grammars.check(StructuredOutputsParams(choice=["a"])).exception(60) is None


def test_without_a_tokenizer_a_grammar_is_refused(directory, tokenizer):
    bench = Bench(directory, tokenizer, skip_tokenizer_init=True)
    error = bench.grammars.check(StructuredOutputsParams(choice=["a"])).exception(1)
    assert "skip_tokenizer_init" in str(error)
    bench.enter(0, choice=["a"])
    assert "skip_tokenizer_init" in str(bench.batch.refusals[0])
    bench.grammars.shutdown()


class FakeCheck:
    """A check that takes as much CPU time as its regex says. After the first ones it waits until
    all have been asked for.
    """

    all_are_asked_for = threading.Event()

    def __init__(self, settings):
        self.spent_s = 0.0

    def check(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        if params.regex not in ("slow0", "slow1"):
            assert self.all_are_asked_for.wait(60)
        time.sleep(0.02)
        self.spent_s += 1.5 if params.regex.startswith("slow") else 0.01
        return params

    def close(self) -> None:
        pass

    end = close


def test_slow_grammars_of_one_owner_delay_no_other(bench, monkeypatch):
    monkeypatch.setattr(grammar, "GrammarCheck", FakeCheck)
    FakeCheck.all_are_asked_for.clear()
    ended: list[str] = []
    slow = [f"slow{i}" for i in range(30)]

    def check(regex: str, owner: str) -> Future:
        future = bench.grammars.check(StructuredOutputsParams(regex=regex), owner=owner)
        future.add_done_callback(lambda _: ended.append(f"{regex} {owner}"))
        return future

    checks = [check(regex, "a") for regex in slow]
    checks[1].result(60)
    checks += [check(f"usual{i}", "b") for i in range(4)]
    # what waits for its turn with one owner has another one with the other
    checks += [check(slow[-1], "c"), check(slow[-2], "c")]
    FakeCheck.all_are_asked_for.set()
    for future in checks:
        future.result(60)
    # two may be checked at once, and either may end first
    assert max(ended.index(f"usual{i} b") for i in range(4)) < 16, ended
    assert max(map(ended.index, (f"{slow[-1]} c", f"{slow[-2]} c"))) < 20, ended


def test_shutdown_leaks_no_thread_or_process(directory, tokenizer):
    threads, children = set(threading.enumerate()), psutil.Process().children()
    bench = Bench(directory, tokenizer)
    bench.enter(0, choice=["a"])
    bench.step(0)
    bench.grammars.check(StructuredOutputsParams(choice=["a"])).result(60)
    assert len(psutil.Process().children()) > len(children)
    bench.grammars.shutdown()
    bench.grammars.shutdown()
    assert psutil.Process().children() == children
    wait_until(lambda: set(threading.enumerate()) <= threads)
