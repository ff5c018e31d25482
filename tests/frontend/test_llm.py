"""LLM over a scripted client: order, refusals, aborts, progress, chat."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from quire import (
    LLM,
    EngineDeadError,
    EngineUsageError,
    InvalidParameterError,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
)
from quire.frontend import llm as llm_module
from quire.tests.frontend.scripted_client import ScriptedClient
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer


def echo(request) -> list[int]:
    """Return the prompt reversed. Longer prompts take longer, so requests end in another order than
    they arrived.
    """
    return request.prompt_token_ids[::-1]


def make_llm(monkeypatch, answer=echo, **options) -> LLM:
    def from_engine_args(args, engine):
        config = text_config(max_model_len=64)
        return LLMEngine(config, ScriptedClient(config, answer, **options))

    monkeypatch.setattr(llm_module.LLMEngine, "from_engine_args", from_engine_args)
    return LLM()


PARAMS = SamplingParams(max_tokens=None)


def test_outputs_come_in_the_order_of_the_prompts(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    prompts = [[10, 11, 12], "ab", {"prompt_token_ids": [5]}, {"prompt": "abcd"}]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [
        [10, 11, 12],
        tiny_tokenizer().encode("ab"),
        [5],
        tiny_tokenizer().encode("abcd"),
    ]
    assert [o.outputs[0].token_ids for o in outputs] == [o.prompt_token_ids[::-1] for o in outputs]
    assert [o.prompt for o in outputs] == [None, "ab", None, "abcd"]
    assert len({o.request_id for o in [*outputs, *llm.generate("x", PARAMS, use_tqdm=False)]}) == 5
    assert all(
        r.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        for r in llm.llm_engine.client.requests
    )
    assert llm.generate([], PARAMS) == []


def test_one_prompt_of_any_form(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    for prompt in ("abc", tiny_tokenizer().encode("abc"), {"prompt": "abc"}):
        [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
        assert output.outputs[0].text == "cba"


def test_parameters_and_priorities_for_all_or_each(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    outputs = llm.generate(["abc", "abc"], each, use_tqdm=False, priority=[4, 5])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2]
    assert [r.priority for r in llm.llm_engine.client.requests] == [4, 5]
    # SamplingParams' own default
    assert len(llm.generate(["a" * 20], use_tqdm=False)[0].outputs[0].token_ids) == 16
    for arguments, name in (
        ({"sampling_params": each}, "sampling_params"),
        ({"priority": [1]}, "priority"),
    ):
        with pytest.raises(InvalidParameterError, match=f"{name}: .* for 3 prompts"):
            llm.generate(["a", "b", "c"], **arguments)


def test_one_bad_prompt_refuses_the_list_before_anything_is_sent(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    with pytest.raises(
        InvalidParameterError,
        match=r"prompt: must not be empty \(in request 1 of 3, counted from 0\)",
    ):
        llm.generate(["a", "", "c"], PARAMS)
    with pytest.raises(InvalidParameterError, match=r"n: .*\(in request 2 of 3"):
        llm.generate(["a", "b", "c"], [PARAMS, PARAMS, SamplingParams(n=2, temperature=0)])
    with pytest.raises(InvalidParameterError, match="prompt: must not be empty$"):
        llm.generate("")
    for prompts, words in ((5, "prompts: must be"), ("a", "params: must be SamplingParams")):
        with pytest.raises(InvalidParameterError, match=words):
            llm.generate(prompts, {"temperature": 0})
    assert llm.llm_engine.client.requests == []


def test_a_failed_request_does_not_affect_others(monkeypatch) -> None:
    llm = make_llm(monkeypatch, lambda r: "broken" if r.prompt_token_ids == [7] else echo(r))
    bad, good = llm.generate([[7], [8, 9]], PARAMS, use_tqdm=False)
    assert (bad.outputs[0].finish_reason, bad.error) == ("error", "broken")
    assert (good.outputs[0].token_ids, good.error) == ([9, 8], None)


def test_an_exception_during_the_run_aborts_and_leaves_the_llm_usable(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    client = llm.llm_engine.client
    get_output, num_calls = client.get_output, []

    def interrupted():
        num_calls.append(1)
        if len(num_calls) == 2:
            raise KeyboardInterrupt
        return get_output()

    client.get_output = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "abcdef"], PARAMS, use_tqdm=False)
    assert client.aborted == [r.request_id for r in client.requests]
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate("abc", PARAMS, use_tqdm=False)[0].outputs[0].text == "cba"


def test_a_dead_engine_raises(monkeypatch) -> None:
    llm = make_llm(monkeypatch, dies_after=2)
    with pytest.raises(EngineDeadError, match="scripted engine"):
        llm.generate(["abc", "abcdef"], PARAMS, use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate("abc", PARAMS, use_tqdm=False)


def test_generate_is_refused_while_other_requests_run(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    llm.llm_engine.add_request("mine", "abc", PARAMS)
    with pytest.raises(RuntimeError, match="or a stream are unfinished"):
        llm.generate("abc", PARAMS)
    assert llm.llm_engine.get_num_unfinished_requests() == 1


def test_a_stream_gives_what_is_new_and_ends_when_it_is_left(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    engine = llm.llm_engine
    outputs = list(llm.stream("abcd", PARAMS))
    [whole] = llm.generate("abcd", PARAMS, use_tqdm=False)
    assert len(outputs) > 1 and [o.finished for o in outputs] == [
        *[False] * (len(outputs) - 1),
        True,
    ]
    token_ids = [token_id for o in outputs for token_id in o.outputs[0].token_ids]
    text = "".join(o.outputs[0].text for o in outputs)
    assert (token_ids, text) == (whole.outputs[0].token_ids, whole.outputs[0].text)
    for _ in llm.stream("abcd", PARAMS):
        with pytest.raises(RuntimeError, match="or a stream are unfinished"):
            llm.generate("ab", PARAMS, use_tqdm=False)
        assert engine.get_num_unfinished_requests() == 1
        break
    assert not engine.has_unfinished_requests() and len(engine.client.aborted) == 1
    never_read = llm.stream("abcd", PARAMS)
    assert llm.generate("ab", PARAMS, use_tqdm=False)[0].finished
    never_read.close()
    with pytest.raises(InvalidParameterError, match="prompt"):
        llm.stream([])
    with pytest.raises(TypeError, match="must be SamplingParams"):
        llm.stream("a", {"max_tokens": 1})
    reader = ThreadPoolExecutor(1)  # as web frameworks read iterators
    stream = llm.stream("abcd", PARAMS)
    assert next(stream).outputs and reader.submit(next, stream).result(60).outputs
    reader.submit(stream.close).result(60)
    assert llm.generate("ab", PARAMS, use_tqdm=False)[0].finished


def test_enqueued_prompts_are_waited_for_together(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    assert llm.wait_for_completion(use_tqdm=False) == []
    ids = llm.enqueue(["abcd", "a"], PARAMS) + llm.enqueue([7, 8], PARAMS, priority=2)
    client = llm.llm_engine.client
    assert [r.request_id.split("-")[0] for r in client.requests] == ids == ["0", "1", "2"]
    assert [request.priority for request in client.requests] == [0, 0, 2]
    with pytest.raises(RuntimeError, match="enqueue or a stream are unfinished"):
        llm.generate("ab", PARAMS, use_tqdm=False)
    with pytest.raises(InvalidParameterError, match="prompt"):
        llm.enqueue([[]], PARAMS)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert outputs[2].outputs[0].token_ids == [8, 7]
    assert [o.prompt for o in outputs] == ["abcd", "a", None]
    assert llm.generate("ab", PARAMS, use_tqdm=False)[0].finished
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_text_alone_is_a_conversation_of_one_message(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    options = {"chat_template": template, "use_tqdm": False}
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
    prompts = [
        [output.prompt for output in llm.chat(messages, PARAMS, **options)]
        for messages in ("ab", ["ab", "c"], ["ab", conversation], [conversation])
    ]
    one = "<user>ab"
    assert prompts == [[one], [one, "<user>c"], [one, "<system>s<user>ab"], ["<system>s<user>ab"]]


@pytest.mark.parametrize("messages", [None, 5, [5], {"role": "user", "content": "hi"}])
def test_what_is_no_conversation_is_refused(messages, monkeypatch) -> None:
    with pytest.raises(InvalidParameterError, match="messages: must be a text, a list of messages"):
        make_llm(monkeypatch).chat(messages, PARAMS)


def test_what_is_printed_of_an_llm_names_its_model(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    config = llm.llm_engine.config.model_config
    name = config.served_model_name or config.model
    settings = f"model={name!r}, dtype={config.dtype!r}, max_model_len=64)"
    assert (repr(llm), repr(llm.llm_engine)) == (f"LLM({settings}", f"LLMEngine({settings}")


def test_progress_counts_requests_and_tokens(monkeypatch, capsys) -> None:
    class Bar:
        def __init__(self, **options):
            self.options, self.updates, self.postfix, self.closed = options, 0, "", False
            bars.append(self)

        def set_postfix_str(self, text, refresh):
            self.postfix = text

        def update(self, n):
            self.updates += n

        def close(self):
            self.closed = True

    bars = []
    llm = make_llm(monkeypatch)
    llm.generate(["abc", "ab"], PARAMS, use_tqdm=Bar)
    [bar] = bars
    assert (bar.options["total"], bar.options["desc"], bar.updates, bar.closed) == (
        2,
        "Processed prompts",
        2,
        True,
    )
    assert (
        bar.postfix.startswith("est. speed input: ")
        and ", output: " in bar.postfix
        and bar.postfix.endswith(" toks/s")
    )
    assert capsys.readouterr().err == ""
    llm.generate("abc", PARAMS)
    assert "Processed prompts" in capsys.readouterr().err
    llm.generate("abc", PARAMS, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_chat_renders_and_generates(monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    hi, bye = ([{"role": "user", "content": text}] for text in ("hi", "bye"))
    [output] = llm.chat(hi, PARAMS, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == tiny_tokenizer().apply_chat_template(
        hi, add_generation_prompt=True
    )
    outputs = llm.chat(
        [hi, bye],
        [PARAMS, SamplingParams(max_tokens=1)],
        use_tqdm=False,
        add_generation_prompt=False,
    )
    assert [o.prompt for o in outputs] == [
        f"<|im_start|>user\n{text}<|im_end|>\n" for text in ("hi", "bye")
    ]
    kwargs = {
        "chat_template": "{{ word }}{{ messages[0].content }}",
        "chat_template_kwargs": {"word": "say "},
    }
    assert llm.chat(hi, PARAMS, use_tqdm=False, **kwargs)[0].prompt == "say hi"
    continued = [*hi, {"role": "assistant", "content": "well"}]
    [output] = llm.chat(
        continued, PARAMS, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt.endswith("assistant\nwell")
    assert llm.chat([], PARAMS) == []
    with pytest.raises(InvalidParameterError, match="messages"):
        llm.chat([[]], PARAMS)


def test_close_and_context_manager(monkeypatch) -> None:
    with make_llm(monkeypatch) as llm:
        assert llm.get_tokenizer().decode(5) == tiny_tokenizer().decode(5)
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.get_metrics()["called"] == "get_metrics"
        assert llm.reset_prefix_cache() == {"called": "reset_prefix_cache"}
        with pytest.raises(EngineUsageError, match="restart_engines needs"):
            llm.restart_engines()
    assert llm.llm_engine.client.num_shutdowns >= 1
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate("abc", PARAMS, use_tqdm=False)


def test_errors_of_engine_arguments_name_the_argument() -> None:
    with pytest.raises(InvalidParameterError, match="max_model_length: .*max_model_len"):
        LLM(max_model_length=5)
