"""A template that loops or grows without bound ends with an error. Others render as in jinja2."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from quire import InvalidParameterError
from quire.frontend.text import template_sandbox
from quire.frontend.text.chat_template import (
    ChatTemplateTimeError,
    render_chat,
    template_traits,
)
from quire.frontend.text.template_sandbox import (
    MAX_LENGTH,
    TemplateLimitError,
    TemplateTimeError,
    render,
    time_limit,
    variables_of,
)

USER = [{"role": "user", "content": "Hello"}]
NESTED = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
# unbounded time: loops, loops that print, calls, recursion, filters that call
ENDLESS = [
    NESTED,
    "{% for i in range(99999) %}{% for i in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in [[1, 1], [1, 1]] recursive %}{{ loop([[1, 1], [1, 1]]) if loop.depth < 30 }}"
    "{% endfor %}",
    "{% for i in range(99999) %}{% for i in range(9999) if i > 9999 %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(9999) | map('string') | join | length }}{% endfor %}",
]
# unbounded memory
GROWING = [
    "{{ 'x' * 10 ** 9 }}",
    "{{ 10 ** 9 * 'x' }}",
    "{{ ([1] * 10 ** 9) | length }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = ''.join([n.x, n.x]) %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{{ 'x'.ljust(10 ** 9) }}",
    "{{ 'x' | center(10 ** 9) }}",
    "{{ ('x\n' * 99999) | indent(10 ** 6) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_an_endless_template_is_stopped(template: str) -> None:
    with pytest.raises(TemplateTimeError, match=r"takes more than 0\.1 s of processor time"):
        with time_limit(0.1):
            render(template, {})


@pytest.mark.parametrize("template", GROWING)
def test_a_template_that_grows_without_bound_is_stopped(template: str) -> None:
    with pytest.raises(TemplateLimitError, match="makes (more|an integer)"):
        render(template, {})


PLAIN = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }}{{ m.role ~ 1 ~ m }}"
    "{% else %}none{% endfor %}",
    "{% for a in [1, [2, [3]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k }}{{ loop.revindex }}{% endfor %}",
    "{% for x in nothing %}{{ x }}{% else %}empty{% endfor %}{{ nothing ~ none ~ 1.5 }}",
    "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') * 3 }}{{ m('b') ~ 'c' }}",
    "{{ [1, 2] | join(', ') }}{{ messages | join('|', attribute='role') }}{{ 'aXa' | "
    "replace('a', 'bb', 1) }}",
    "{{ 'a\nb' | indent(2, true) }}{{ 'a' | center(9) }}{{ '%s-%05d' | format('x', 7) }}",
    "{{ '%s %d' % ('x', 7) }}{{ '{}:{:>4}'.format(1, 2) }}{{ 'x'.ljust(3) }}{{ ','.join(['a']) }}",
    "{{ 2 ** 10 + 3 * 4 % 5 }}{{ [1] + [2] }}{{ 'a' + 'b' }}{{ [0] * 3 }}{{ -3 * 'x' }}",
    "{% set x %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ x | upper }}",
]


@pytest.mark.parametrize("template", PLAIN)
def test_others_render_as_in_jinja(template: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    variables: dict[str, Any] = {"messages": USER * 3}
    assert render(template, variables) == plain.from_string(template).render(variables)


def test_the_earlier_limit_applies_unless_a_new_one_is_set() -> None:
    with time_limit(0.05), time_limit(100.0), pytest.raises(TemplateTimeError, match="0.05 s"):
        render(NESTED, {})
    with time_limit(0.0), time_limit(0.1, fresh=True):
        with pytest.raises(TemplateTimeError, match=r"0\.1 s"):
            render(NESTED, {})
    long = "{% for i in range(200) %}{{ i }}{% endfor %}"
    with time_limit(0.0):
        other = threading.Thread(target=lambda: done.append(render(long, {})))
        done: list[str] = []
        other.start()
        other.join()
        assert len(done) == 1  # a limit belongs to its thread
    assert render(long, {}) == done[0]


def test_a_conversation_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.text.chat_template.TIME_LIMIT_S", 0.1)
    with pytest.raises(ChatTemplateTimeError, match="the chat template takes more than 0.1 s of"):
        render_chat(NESTED, USER)
    with pytest.raises(InvalidParameterError, match="makes more than 33,554,432 characters"):
        render_chat("{{ messages[0].content * 10 ** 8 }}", USER)
    assert not template_traits(NESTED).takes_tools  # its probes are stopped too
    assert MAX_LENGTH == 33_554_432


def test_an_event_loop_is_not_blocked_by_an_endless_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server renders on its loop for INLINE_S, then in a thread, and the loop runs in the
    meantime.
    """
    from quire.frontend.server.turns import chat_turn

    monkeypatch.setattr("quire.frontend.text.chat_template.TIME_LIMIT_S", 1.0)
    assert (
        chat_turn._render_at_once(lambda: render_chat("{{ messages[0].content }}", USER)) == "Hello"
    )
    assert chat_turn._render_at_once(lambda: render_chat(NESTED, USER)) is None

    async def turns_beside_rendering() -> int:
        turns = 0
        rendering = asyncio.ensure_future(asyncio.to_thread(render_chat, NESTED, USER))
        while not rendering.done():
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(ChatTemplateTimeError):
            await rendering
        return turns

    assert asyncio.run(turns_beside_rendering()) > 10


def test_the_limits_cost_little() -> None:
    """The ratio to jinja2 without limits, the best of several runs."""
    template = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m.content }}{% endfor %}"
    variables: dict[str, Any] = {"messages": USER * 2000}
    plain = ImmutableSandboxedEnvironment().from_string(template)

    def fastest(call: Any) -> float:
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    template_sandbox.compile_template(template)
    ratio = fastest(lambda: render(template, variables)) / fastest(lambda: plain.render(variables))
    assert ratio < 6


def test_the_variables_of_a_template() -> None:
    """Not attributes of the same name, nor names that the template sets itself."""
    source = "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}"
    source += "{% for m in messages %}{{ m.thinking }}{% set n = m %}{% endfor %}"
    assert variables_of(source) == {"effort", "messages"}
    nested = "{% if a %}" * 5000 + "{% endif %}" * 5000
    assert variables_of("{% no Jinja") == variables_of(nested) == frozenset()
