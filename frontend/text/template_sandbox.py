"""jinja2's sandbox with limits: a template that loops or grows without end raises an error.

Must not know: messages, tokens, the origin of a template.

The limits apply to the CPU time of the rendering thread and to the length of every text and list.
Time is checked at loop iterations and calls; length is checked where output, operators or methods
make values longer. A single call of a filter is not interrupted; its input is limited.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, filters, meta, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_LENGTH = 2**25  # characters of a text, elements of a list: more than any context holds
MAX_BITS = 10_000  # of an integer that an operator returns
_CHECKED_EACH = 8  # loop iterations and calls between two checks of the clock
_WIDE = re.compile(r"\d{7,}")  # the width in a format
_WIDENING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})


class TemplateLimitError(TemplateError):
    """The template exceeds a limit on time or length."""


class TemplateTimeError(TemplateLimitError):
    """The template exceeds its time limit."""


class _Budget(threading.local):
    deadline = float("inf")  # in time.thread_time()
    limit_s = 0.0
    ticks = 0


_budget = _Budget()


@contextmanager
def time_limit(seconds: float, *, fresh: bool = False) -> Iterator[None]:
    """Limits the total CPU time of the templates that this thread renders in the block.

    They raise TemplateTimeError. Of nested limits the one that ends first applies; with `fresh` the
    outer ones do not apply.
    """
    before = (_budget.deadline, _budget.limit_s)
    if (deadline := time.thread_time() + seconds) < _budget.deadline or fresh:
        _budget.deadline, _budget.limit_s = deadline, seconds
    try:
        yield
    finally:
        _budget.deadline, _budget.limit_s = before


def render(template: str, variables: dict[str, Any]) -> str:
    """Returns the rendered text. Raises whatever the template raises, and TemplateLimitError."""
    return _join(compile_template(template).generate(variables))


@lru_cache(maxsize=32)
def compile_template(template: str) -> Template:
    """Raises jinja2.TemplateSyntaxError."""
    if len(template) > MAX_LENGTH:
        raise TemplateLimitError(f"a template has at most {MAX_LENGTH:,} characters")
    return _environment().from_string(template)


def variables_of(template: str) -> frozenset[str]:
    """The names that the template looks up among its variables; none if it is invalid."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except (TemplateError, RecursionError):
        return frozenset()


def _tick() -> None:
    budget = _budget
    budget.ticks += 1
    if budget.ticks % _CHECKED_EACH == 0 and time.thread_time() > _budget.deadline:
        raise TemplateTimeError(f"takes more than {_budget.limit_s:g} s of processor time")


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TemplateLimitError(f"makes more than {MAX_LENGTH:,} characters or elements")


def _join(pieces: Iterable[str]) -> str:
    length, kept = 0, []
    for piece in pieces:
        length += len(piece)
        if length > MAX_LENGTH:
            _check_length(length)
        kept.append(piece)
    return "".join(kept)


@pass_context  # prevents constant folding at compile time, where no limits apply
def _limited(context: Any, iterable: Any) -> Iterator[Any]:
    for item in iterable:
        _tick()
        yield item


@pass_context
def _concatenated(context: Any, *values: Any) -> str:
    return _join(map(str, values))


class _Limits(NodeTransformer):
    """Inserts the checks into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "quire_limited", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        name = "quire_concatenated"
        return nodes.Filter(first, name, rest, [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's text for training; here its
    content is rendered unchanged.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _PlainNamespace(Namespace):
    """A namespace without private attributes. Python looks up names such as __html__ on any object,
    outside the sandbox.
    """

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _refuse_private(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace must not hold the private name {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})
    concat = staticmethod(_join)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Limits().visit(source), *args, **options)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _tick()
        if isinstance(text := getattr(__obj, "__self__", None), str):
            _check_text_call(text, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _check_length(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * max(right, 1) if operator == "**" else bits + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimitError(f"makes an integer of more than {MAX_BITS:,} bits")
        elif operator == "*":
            for count, value in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(value, (str, list, tuple)):
                    _check_length(count * len(value))
        return self.binop_table[operator](left, right)


def _check_format(text: str, values: Iterable[Any]) -> None:
    if _WIDE.search(text) or any(isinstance(v, int) and v > MAX_LENGTH for v in values):
        raise TemplateLimitError(f"makes more than {MAX_LENGTH:,} characters or elements")


def _check_text_call(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Checks methods of str that can return a much longer text."""
    if name in _WIDENING:
        width = next((value for value in args if isinstance(value, int)), 0)
        _check_length(width * (text.count("\t") if name == "expandtabs" else 1))
    elif name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        _check_length(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        items = args[0] if hasattr(args[0], "__len__") else ()
        _check_length(sum(len(item) + len(text) for item in items if isinstance(item, str)))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@pass_eval_context
def _join_filter(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    items = list(value)
    if attribute is not None:
        items = list(map(filters.make_attrgetter(context.environment, attribute), items))
    _check_text_call(str(d), "join", (list(map(str, items)),))
    return filters.sync_do_join(context, items, d)


@pass_eval_context
def _replace_filter(context: Any, s: str, old: str, new: str, count: int | None = None) -> str:
    _check_text_call(str(s), "replace", (str(old), str(new)))
    return filters.do_replace(context, s, old, new, count)


def _center_filter(value: str, width: int = 80) -> str:
    _check_length(width)
    return filters.do_center(value, width)


def _indent_filter(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    each = width if isinstance(width, int) else len(width)
    _check_length(len(str(s)) + each * (1 + str(s).count("\n")))
    return filters.do_indent(s, width, first, blank)


def _format_filter(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value), (*args, *kwargs.values()))
    return filters.do_format(value, *args, **kwargs)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    """The environment that templates on the hub expect; the same as transformers'."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters |= {
        "center": _center_filter,
        "format": _format_filter,
        "indent": _indent_filter,
        "join": _join_filter,
        "replace": _replace_filter,
        "tojson": _tojson,
    }
    environment.filters["quire_limited"] = _limited
    environment.filters["quire_concatenated"] = _concatenated
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["namespace"] = _PlainNamespace
    return environment
