"""A template that loops or grows without bound ends with an error. Others render as in jinja2."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from jinja2 import TemplateError
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


SET = "{% set n = namespace(x=[1], t=(1,)) %}"


def repeated(body: str, count: int = 60) -> str:
    return SET + "{% for i in range(COUNT) %}".replace("COUNT", str(count)) + body + "{% endfor %}"


# each once took minutes, gigabytes or the interpreter's stack, or shows what must not be reached
ESCAPES = {
    "bytes": "{{ 'x'.encode() * 10 ** 9 }}",
    "padding of bytes": "{{ 'x'.encode().ljust(10 ** 10) }}",
    "expandtabs by keyword": "{{ '\t'.expandtabs(tabsize=10 ** 10) }}",
    "nested width": "{{ '{:{w}}'.format(1, w=10 ** 10) }}",
    "nested precision": "{{ '{:.{w}f}'.format(1.5, w=10 ** 9) }}",
    "a field many times": "{{ ('{0}' * 2 ** 16).format('a' * 2 ** 20) }}",
    "a field many times by %": "{{ ('%(x)s' * 2 ** 16) % {'x': 'a' * 2 ** 20} }}",
    "many widths by %": "{{ ('%9999d' * 2 ** 15) % ((1,) * 2 ** 15) }}",
    "attributes by format": "{{ '{0.__globals__[os]}'.format(raise_exception).x }}",
    "attributes by format of markup": "{{ ('{0.__globals__[os]}' | e).format(raise_exception) }}",
    "attributes by format of safe text": "{{ ('{0.__class__.__name__}' | safe).format(1) }}",
    "width in markup": "{{ ('{:1000000000}' | safe).format(1) }}",
    "long path in a format": "{{ ('{0' ~ '[0]' * 2 ** 23 ~ '}').format('a') }}",
    "width after a key with parentheses": "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}",
    "unclosed keys by %": "{{ ('%(' * 2 ** 20) % 1 }}",
    "zeros before a precision by %": "{{ '%.0000000001000000000d' % 1 }}",
    "zeros before a width": "{{ '{:>000000000100000000000000}'.format('a') }}",
    "zeros before a precision": "{{ '{:.0000000001000000000f}'.format(1.5) }}",
    "digits of another script": "{{ ('{:>' ~ '\u0660' * 9 ~ '\u0661' ~ '\u0660' * 14 ~ '}')"
    ".format('a') }}",
    "many zeros before a width": "{{ ('{:>' ~ '0' * 9999 ~ '9}').format('a') }}",
    "format_map": "{{ '{a}'.format_map({'a': 1}) }}",
    "indent of JSON": "{{ [1] | tojson(indent=10 ** 10) }}",
    "text as indent of JSON": "{{ [1] | tojson(indent='x' * 10 ** 7) }}",
    "separators of JSON": "{{ [1, 2] | tojson(separators=('x' * 10 ** 7, 'y')) }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "round": "{{ 5 | round(-10 ** 9) }}",
    "round in a condition": "{% if 5.5 | round(10 ** 9, 'floor') %}{% endif %}",
    "lipsum": "{{ lipsum(10 ** 7) }}",
    "cycler": "{{ cycler(1).next() }}",
    "groupby": "{{ [1] | groupby('x') | list }}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "nested select": repeated("{% set n.x = n.x | select %}", 99999) + "{{ n.x | list }}",
    "nested map": repeated("{% set n.x = n.x | map('string') %}", 99999) + "{{ n.x | list }}",
    "many tags": "{{ a }}" * 200_000,
    "many short tags": "{{a}}" * 26_000,
    "many macros": "{% macro f(a) %}{{ a }}{% endmacro %}" * 3000,
    "nested conditions": "{% if a %}" * 6000 + "{% endif %}" * 6000,
    "elifs": "{% if a %}" + "{% elif a %}" * 4000 + "{% endif %}",
    "nested parentheses": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "nested loops": "{% for i in a %}" * 50 + "{% endfor %}" * 50,
    "shared list printed": repeated("{% set n.x = [n.x, n.x] %}") + "{{ n.x }}",
    "shared list compared": repeated("{% set n.x = [n.x, n.x] %}") + "{{ n.x == n.x[:] }}",
    "shared tuple hashed": repeated("{% set n.t = (n.t, n.t) %}") + "{{ {n.t: 1} }}",
    "shared dict as JSON": repeated("{% set n.x = {1: n.x, 2: n.x} %}") + "{{ n.x | tojson }}",
    "shared view": repeated("{% set n.x = {1: n.x, 2: n.x.items() if i else n.x} %}") + "{{ n.x }}",
    "shared by +": repeated("{% set n.x = [n.x] + [n.x] %}") + "{{ n.x }}",
    "shared by *": repeated("{% set n.x = [n.x] * 2 %}") + "{{ n.x }}",
    "shared by dictsort": repeated("{% set n.x = {1: n.x, 2: n.x} | dictsort %}") + "{{ n.x }}",
    "shared by varargs": SET + "{% macro m() %}{% set n.t = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ m(n.t, n.t) }}{% endfor %}{{ n.t }}",
    "deep tuple hashed": repeated("{% set n.t = (n.t,) %}", 99999) + "{{ {n.t: 1} }}",
    "strip of characters": "{{ ('a' * 10 ** 7).strip('b' * 10 ** 7 + 'a') }}",
    "trim of characters": "{{ ('a' * 10 ** 7) | trim('b' * 10 ** 7 + 'a') }}",
    "rfind": "{{ ('a' * 2 ** 22).rfind('ab' ~ 'a' * 2 ** 21) }}",
    "rsplit by keyword": "{{ ('a' * 2 ** 22).rsplit(sep='ab' ~ 'a' * 2 ** 21) }}",
    "rpartition": "{{ ('a' * 2 ** 22).rpartition('ab' ~ 'a' * 2 ** 21) }}",
    "title": "{{ ('a ' * 2 ** 23) | title | length }}",
    "many keys of a sort": "{{ range(60000) | list | sort(attribute='real,' * 99999) }}",
    "keys of a minimum": "{{ range(60000) | list | min(false, 'real.real,' * 99999) }}",
    "long path in map": "{{ (['a'] * 8) | map(attribute='0.' * 2 ** 22) | list }}",
    "long path in selectattr": "{{ (['a'] * 8) | selectattr('0.' * 2 ** 22) | list }}",
    "long path in unique": "{{ (['a'] * 8) | unique(attribute='0.' * 2 ** 22) | list }}",
    "long path in join": "{{ (['a'] * 8) | join('', '0.' * 2 ** 22) }}",
    "long path in sum": "{{ (['a'] * 8) | sum('0.' * 2 ** 22) }}",
    "format as odd": "{{ '%1000000000d' is odd }}",
    "format as divisible": "{{ '%1000000000d' is divisibleby(3) }}",
    "format by map": "{{ ['%1000000000d'] | map('format', 1) | list }}",
    "center by map": "{{ ['x'] | map('center', 10 ** 9) | list }}",
    "width of a time": "{{ strftime_now('%1000000000Y') }}",
    "long format of a time": "{{ strftime_now('%c' * 10 ** 6) }}",
    "digits in base 16": "{{ ('f' * 10 ** 7) | int(base=16) }}",
    "literal number": "{{ 0x" + "f" * 60_000 + " ** 9999 }}",
    "pieces of split": "{{ ('a' * 2 ** 24).split('a') | length }}",
    "lines": "{{ ('ab\n' * 2 ** 23).splitlines() | length }}",
    "indented lines": "{{ ('\n' * 2 ** 24) | indent(64) }}",
    "colliding numbers": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set n.x = n.x + [i * 2305843009213693951] %}{% endfor %}{{ n.x | unique | list }}",
    "long sort": "{{ ((range(99999) | list) * 2) | sort }}",
    "many prints": "{% set a = [1] * 2 ** 19 %}" + "{% if a | string %}{% endif %}" * 1200,
    "many searches": "{% set a = 'x' * 2 ** 24 %}" + "{% if 'y' in a %}{% endif %}" * 1200,
    "many comparisons": "{% set a, b = [1] * 2 ** 19, [1] * 2 ** 19 %}"
    + "{% if a != b %}{% endif %}" * 1200,
    "many slices": "{% set a = 'x' * 2 ** 24 %}" + "{% if a[1:] %}{% endif %}" * 1200,
    "many reversals": "{% set a = 'x' * 2 ** 24 %}" + "{% if a | reverse %}{% endif %}" * 1200,
    "many hashes": "{% set t = (1,) * 2 ** 18 %}" + "{% if {}[t] %}{% endif %}" * 1200,
    "escaped sum": "{{ ('<' * 2 ** 22) | safe + ('<' * 2 ** 24) }}",
    "escaped join": "{{ ('' | safe).join(['<' * 2 ** 20] * 16) }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "import": "{% import 'a' as b %}",
    "inheritance": "{% extends 'a' %}",
    "class": "{{ ().__class__.__mro__ }}",
    "copy": "{{ {}.copy() }}",
    "dict of pairs": "{{ namespace([['a', 1]]) }}",
}
# these end, since each of their operations is bounded, but do nothing that must be refused
ENDING = {"colliding numbers", "shared list compared"}


@pytest.mark.parametrize("name", ESCAPES)
def test_every_escape_is_refused_or_ended(name: str) -> None:
    """CPU time, since other programs may run: a template ends soon after its limit."""
    start = time.thread_time()
    try:
        with time_limit(0.1):
            render(ESCAPES[name], {})
        assert name in ENDING
    except (TemplateError, RecursionError, SyntaxError, ValueError):
        pass
    assert time.thread_time() - start < 3.0


def test_all_that_a_template_makes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of many calls that wait for each other would fill the memory."""
    monkeypatch.setattr(template_sandbox, "MAX_MADE", 2**24)
    held = "{% macro f(k) %}{% set a = 'x' * 2 ** 20 %}{% if k %}{{ f(k - 1) }}{% endif %}"
    held += "{{ a | length }}{% endmacro %}"
    assert render(held + "{{ f(2) }}", {}) == "1048576" * 3
    with pytest.raises(TemplateLimitError, match="makes more than 16,777,216 bytes in all"):
        render(held + "{{ f(50) }}", {})
    assert render(held + "{{ f(2) }}", {}) == "1048576" * 3  # each rendering has its own


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
    "{% if messages | selectattr('role', 'equalto', 'x') %}a generator is true{% endif %}"
    "{{ messages | map(attribute='role') | list }}{{ messages | rejectattr('x') | list | length }}",
    "{{ {'b': 1, 'A': [2]} | dictsort }}{{ {'b': 1}.get('c', 2) }}{{ {'b': 1} | items | list }}",
    "{{ [3, 1, 2] | sort(reverse=true) }}{{ [1, 1, 'a', 'A'] | unique | list }}{{ [1, 2] | sum }}",
    "{{ 'a b  c'.split() }}{{ 'a,b,c'.split(',', 1)[-1] }}{{ 'a,b,c'.rsplit(',', maxsplit=1) }}",
    "{{ ' x '.strip() ~ 'xyx'.strip('x') ~ ('yy' | trim('y')) ~ 'a\nb'.splitlines() }}",
    "{{ '%5.2f|%-4s|%(a)s' | replace('(a)', '') % (1.234, 'x', [1]) }}{{ '{0!r:>9}'.format('a') }}",
    "{{ 2.567 | round(1) }}{{ '0x1f' | int(base=16) }}{{ '1.5' | float }}{{ 7 // 2 }}{{ -7 % 3 }}",
    "{{ (('<a>' | safe) + '<b>') ~ ('<c>' | e) }}{{ 'title case' | title }}{{ 4 is even }}",
    "{{ ('<a>{}{:>3}{x[0]}' | safe).format('<b>', 1, x=['>']) ~ ('%(a)s' | e) % {'a': '<'} }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, [3], b={'c': 4}) }}",
    "{% macro m2() %}{{ caller(1) }}{% endmacro %}{% call(x) m2() %}<{{ x }}>{% endcall %}",
    "{% filter upper %}{{ 'a' }}{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}",
    "{% for m in messages %}{{ loop.previtem is defined }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{{ messages[::-1] | length }}{{ messages[0] == messages[1] }}{{ 'ell' in messages[0].role }}",
    "{{ nothing is defined }}{{ messages is sequence }}{{ messages[0] is mapping }}{{ 1 in [1] }}",
    "{{ messages[0].items() | list }}{{ messages[0]['keys']() | list }}{{ {'items': 1}['items'] }}",
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


@pytest.mark.parametrize("template", [NESTED, ESCAPES["many prints"], ESCAPES["many reversals"]])
def test_an_event_loop_is_not_blocked_by_an_endless_template(
    template: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server renders on its loop for INLINE_S, then in a thread, and the loop runs in the
    meantime.
    """
    from quire.frontend.server.turns import chat_turn

    monkeypatch.setattr("quire.frontend.text.chat_template.TIME_LIMIT_S", 0.3)
    assert (
        chat_turn._render_at_once(lambda: render_chat("{{ messages[0].content }}", USER)) == "Hello"
    )
    assert chat_turn._render_at_once(lambda: render_chat(template, USER)) is None

    async def turns_beside_rendering() -> int:
        turns = 0
        rendering = asyncio.ensure_future(asyncio.to_thread(render_chat, template, USER))
        while not rendering.done():
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(InvalidParameterError, match="takes more|bytes in all"):
            await rendering
        return turns

    assert asyncio.run(turns_beside_rendering()) > 10


def test_the_limits_cost_little() -> None:
    """The ratio to jinja2 without limits in CPU time, the best of several runs by turns."""
    template = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m.content }}{% endfor %}"
    variables: dict[str, Any] = {"messages": USER * 2000}
    plain = ImmutableSandboxedEnvironment().from_string(template)

    def seconds(call: Any) -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    template_sandbox.compile_template(template)
    runs = [
        (seconds(lambda: render(template, variables)), seconds(lambda: plain.render(variables)))
        for _ in range(7)
    ]
    limited, unlimited = map(min, zip(*runs, strict=True))
    assert limited / unlimited < 6


def test_the_variables_of_a_template() -> None:
    """Not attributes of the same name, nor names that the template sets itself."""
    source = "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}"
    source += "{% for m in messages %}{{ m.thinking }}{% set n = m %}{% endfor %}"
    assert variables_of(source) == {"effort", "messages"}
    nested = "{% if a %}" * 5000 + "{% endif %}" * 5000
    assert variables_of("{% no Jinja") == variables_of(nested) == frozenset()
