"""jinja2's sandbox with allow-lists and limits: whatever a template does ends within its limits.

Must not know: messages, tokens, the origin of a template.

A template reaches only the filters, tests, functions, methods and kinds of nodes that are listed
here. Each of their calls is bounded, because every value that a template makes is: its length, and
for a list or dict its weight, which counts shared parts as often as they would be written. Between
two operations that take more than microseconds the clock is checked. So nothing that a template
does needs to be interrupted, and it may run beside other work. Nothing is computed when a template
is compiled; its size limits what that takes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, filters, meta, nodes, pass_context, pass_environment, tests
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import EscapeFormatter, Markup, escape, soft_str

MAX_LENGTH = 2**25  # characters of a text, weight of a list or dict: more than any context holds
MAX_MADE = 2**29  # bytes that a rendering makes in all
MAX_SOURCE = 2**17  # characters of a template; the longest of a published model has 2**14
MAX_NODES = 10_000  # of a parsed template; the most of a published one are 2,000
MAX_DEPTH = 200  # of nested lists and dicts
MAX_SORTED = 2**16  # elements
MAX_WRITTEN_AT_ONCE = 2**16  # weight of JSON: with the largest indent MAX_LENGTH characters
MAX_BITS = 10_000  # of an integer
MAX_WIDTH = 9999  # of a field in a format
MAX_PATH = 128  # characters of an attribute's name, with the names of its own attributes
MAX_DIGITS = 400  # that a number is rounded to
MAX_REASON = 1000  # characters of the template's own error
ELEMENT = 32  # weight of an element beside its text
MAX_ELEMENTS = MAX_LENGTH // ELEMENT
_CHECKED_EACH = 8  # operations between two checks of the clock
_LARGE = 4096  # length from which a text is counted
_ESCAPED = 6  # times the length that a Markup may write of another text
# a key, which may be unclosed, a width and a precision; nothing is read twice
_FIELD = re.compile(r"%(\([^()]*\)?)?[#0\- +]*(\*|\d*)(?:\.(\*|\d+))?")

# ---------------------------------------------------------------- what templates reach


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXT_METHODS = _words(
    """capitalize casefold center count endswith find format index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isspace istitle isupper join ljust
    lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition
    rsplit rstrip split splitlines startswith strip swapcase title upper zfill"""
)
LOOP_NAMES = _words(
    """changed cycle depth depth0 first index index0 last length nextitem previtem revindex
    revindex0"""
)
ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, TEXT_METHODS),
    (dict, _words("get items keys values")),
    (list, _words("count index")),
    (tuple, _words("count index")),
    (LoopContext, LOOP_NAMES),
    (Macro, _words("arguments caller catch_kwargs catch_varargs name")),
)
_SCOPES = ("_loop_vars", "_block_vars")  # jinja2's own arguments of a call
_DICT_NAMES = frozenset(dir(dict))
NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.NSRef, nodes.Const),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Keyword, nodes.Filter),
    *(nodes.Test, nodes.Compare, nodes.Operand, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not),
    *(nodes.BinExpr, nodes.UnaryExpr, nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict),
    *(nodes.Pair, nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.Macro, nodes.CallBlock),
    *(nodes.FilterBlock, nodes.Assign, nodes.AssignBlock, nodes.With, nodes.Scope),
    nodes.ExprStmt,
)


class TemplateLimitError(TemplateError):
    """The template exceeds a limit on time or length."""


class TemplateTimeError(TemplateLimitError):
    """The template exceeds its time limit."""


# ---------------------------------------------------------------- the budget of a rendering


@dataclass
class _Budget(threading.local):
    """Each thread has its own."""

    deadline: float = float("inf")  # in time.thread_time()
    limit_s: float = 0.0
    unchecked: int = 0  # operations until the clock is checked
    num_made: int = 0  # bytes
    # weight and depth of lists and dicts by their ids, which the reference keeps valid
    weights: dict[int, tuple[Any, int, int]] = field(default_factory=dict)


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
    _budget.num_made, _budget.weights = 0, {}
    try:
        return _join(compile_template(template).generate(variables))
    finally:
        _budget.weights = {}


@lru_cache(maxsize=32)
def compile_template(template: str) -> Template:
    """Raises jinja2.TemplateSyntaxError, and TemplateLimitError if the template is too large."""
    try:
        return _environment().from_string(template)
    except MemoryError:  # of Python's parser, which has a stack of its own
        raise TemplateLimitError("is nested too deeply") from None


def variables_of(template: str) -> frozenset[str]:
    """The names that the template looks up among its variables; none if it is invalid."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except (TemplateError, RecursionError):
        return frozenset()


def _spend(size: int = 0) -> None:
    """Called where an operation, on values of this size, begins or ends."""
    budget = _budget
    budget.unchecked -= 1 + (size >> 10)
    if budget.unchecked < 0:
        budget.unchecked = _CHECKED_EACH
        if time.thread_time() > budget.deadline:
            raise TemplateTimeError(f"takes more than {budget.limit_s:g} s of processor time")


def _too_long() -> TemplateLimitError:
    return TemplateLimitError(f"makes more than {MAX_LENGTH:,} characters or elements")


def _check_length(length: int) -> None:
    """Called before a value of this length is made."""
    if length > MAX_LENGTH:
        raise _too_long()


def _made(value: Any) -> Any:
    """`value`, which the template has made, counted."""
    if isinstance(value, str):
        if (length := len(value)) > _LARGE:
            _check_length(length)
            _count(length if value.isascii() else 4 * length)
        return value
    if isinstance(value, (list, tuple, dict)):
        _weigh(value)
        _count(ELEMENT * len(value))
    return value


def _count(num_bytes: int) -> None:
    _budget.num_made += num_bytes
    if _budget.num_made > MAX_MADE:
        raise TemplateLimitError(f"makes more than {MAX_MADE:,} bytes in all")
    _spend(num_bytes)


def _weigh(value: Any) -> tuple[int, int]:
    """The weight of a value, every part as often as it is in it, and its depth."""
    if isinstance(value, str):
        return ELEMENT + len(value), 0
    is_view = type(value) in _VIEWS
    if not is_view and not isinstance(value, (list, tuple, dict)):
        return ELEMENT, 0
    if (known := _budget.weights.get(id(value))) is not None:
        return known[1], known[2]
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    weight, depth = ELEMENT, 0
    for part in parts:
        part_weight, part_depth = _weigh(part)
        weight, depth = weight + part_weight, max(depth, part_depth)
    return _keep_weight(value, weight, depth + 1)


_VIEWS = (type({}.items()), type({}.keys()), type({}.values()))


def _keep_weight(value: Any, weight: int, depth: int) -> tuple[int, int]:
    _check_length(weight)
    if depth > MAX_DEPTH:
        raise TemplateLimitError(f"makes lists nested in more than {MAX_DEPTH} others")
    _budget.weights[id(value)] = (value, weight, depth)
    return weight, depth


def _join(pieces: Iterable[str]) -> str:
    length, kept = 0, []
    for piece in pieces:
        length += len(piece)
        if length > MAX_LENGTH:
            raise _too_long()
        if len(piece) > _LARGE:
            _spend(len(piece))
        kept.append(piece)
    return _made("".join(kept))


# ---------------------------------------------------------------- checks in a parsed template


@pass_context
def _limited(context: Any, iterable: Any) -> Iterator[Any]:
    return _ticked(iterable)


def _ticked(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _spend()
        yield item


def _concatenated(*values: Any) -> str:
    _spend()
    return _join(map(str, values))


def _compared(value: Any) -> Any:
    _spend()
    return value


class _Limits(NodeTransformer):
    """Inserts the checks into a parsed template."""

    def __init__(self) -> None:
        self.num_nodes = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise TemplateLimitError(f"has more than {MAX_NODES:,} parts")
        if not isinstance(node, NODES):
            kind = type(node).__name__.lower()
            raise TemplateSyntaxError(f"{kind!r} is not allowed here", node.lineno)
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call_filter("quire_limited", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_filter("quire_concatenated", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_constant(node) else _call_filter("quire_made", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        is_kept = node.ctx != "load" or _is_constant(node)
        return node if is_kept else _call_filter("quire_made", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call_filter("quire_made", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call_filter("quire_made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        is_short = _is_short(node.expr, *(operand.expr for operand in node.ops))
        self.generic_visit(node)
        return node if is_short else _call_filter("quire_compared", node)


def _call_filter(name: str, first: nodes.Node, *others: nodes.Node) -> nodes.Filter:
    return nodes.Filter(first, name, list(others), [], None, None, lineno=first.lineno)


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _is_short(left: nodes.Expr, *others: nodes.Expr) -> bool:
    """Whether a comparison looks at no more than a constant of the template."""
    if len(others) != 1:
        return False
    is_pair = isinstance(left, nodes.Const) or isinstance(others[0], nodes.Const)
    is_text = isinstance(left, nodes.Const) and not _is_constant(others[0])  # "a" in text
    return _is_constant(others[0]) or (is_pair and not is_text)


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


class _CodeGenerator(CodeGenerator):
    """Computes nothing at compile time, where no limits apply."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible()
        return super()._output_child_to_const(node, frame, finalize)


# ---------------------------------------------------------------- checks while it runs


class _PlainNamespace(Namespace):
    """A namespace without private attributes. Python looks up names such as __html__ on any object,
    outside the sandbox.
    """

    def __init__(*args: Any, **values: Any) -> None:
        if any(not isinstance(value, Mapping) for value in args[1:]):
            raise SecurityError("a namespace takes names with their values")
        for name in dict(*args[1:], **values):
            _refuse_private(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # it may hold others many times, or itself
        return "<Namespace>"


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace must not hold the private name {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    concat = staticmethod(_join)
    code_generator_class = _CodeGenerator

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"has more than {MAX_SOURCE:,} characters")
        return super()._parse(source, name, filename)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Limits().visit(source), *args, **options)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, _PlainNamespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in ATTRIBUTES)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            _spend(_weigh(argument)[0])
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        is_method = isinstance(value, (MethodType, BuiltinMethodType))
        if not is_method or value.__name__ != "format" or not isinstance(value.__self__, str):
            return None
        return partial(_format, self, value.__self__)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend()
        scope = {name: kwargs.pop(name) for name in _SCOPES if name in kwargs}
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            return _made(_call_text_method(__obj, owner, args, kwargs))
        if isinstance(__obj, LoopContext) and args:
            args = (_ticked(args[0]), *args[1:])
        weight = 0
        for value in (*args, *kwargs.values()):
            if not isinstance(value, (str, int)):
                weight += _weigh(value)[0]
        _check_length(weight)  # a macro gets them together, as `varargs`
        if isinstance(owner, (list, tuple)):
            _spend(_weigh(owner)[0])
        return super().call(__context, __obj, *args, **kwargs, **scope)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            length = len(left) + len(right)
            if length <= _LARGE:
                return left + right
            _check_length(length)
            return _made(left + right)
        _spend()
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            return _sum(left, right)
        elif operator == "*":
            for count, value in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(value, (str, list, tuple)):
                    return _repeated(value, count)
        return _made(self.binop_table[operator](left, right))


def _check_bits(operator: str, left: int, right: int) -> None:
    bits = max(left.bit_length(), right.bit_length())
    if operator == "**":
        bits = left.bit_length() * max(right, 1) if bits <= MAX_BITS else bits
    elif operator == "*":
        bits = left.bit_length() + right.bit_length()
    if bits > MAX_BITS:
        raise TemplateLimitError(f"makes an integer of more than {MAX_BITS:,} bits")


def _sum(left: Any, right: Any) -> Any:
    if isinstance(left, str) or not isinstance(right, type(left)):
        if isinstance(right, str):
            _check_length(_ESCAPED * (len(left) + len(right)))
        return _made(left + right)
    (left_weight, left_depth), (right_weight, right_depth) = _weigh(left), _weigh(right)
    _check_length(left_weight + right_weight)
    total = left + right
    _keep_weight(total, left_weight + right_weight, max(left_depth, right_depth))
    return _made(total)


def _repeated(value: Any, count: int) -> Any:
    _check_length(max(count, 0) * (len(value) if isinstance(value, str) else _weigh(value)[0]))
    return _made(value * count)


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Checks a text for the operator %."""
    num_fields = 0
    for found in _FIELD.finditer(text):
        num_fields += 1
        key, *sizes = found.groups()
        if key and not key.endswith(")"):
            raise TemplateError("a field's name in a format has parentheses or does not end")
        for size in filter(None, sizes):
            _check_width(size)
    longest = max((_ESCAPED * _weigh(value)[0] for value in values), default=0)
    _check_length(len(text) + num_fields * max(longest, MAX_WIDTH))


def _check_width(digits: str) -> None:
    """Checks a width or a precision: digits, which may begin with zeros, or "*"."""
    if digits == "*" or len(digits) > MAX_DIGITS or int(digits) > MAX_WIDTH:
        raise _too_long()


class _Formatter(SandboxedFormatter):
    length = 0

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        _check_path(field_name)
        return super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        for digits in re.findall(r"\d+", format_spec):
            _check_width(digits)
        text = super().format_field(value, format_spec)
        self.length += len(text)
        _check_length(self.length)
        _spend(len(text))
        return text


class _MarkupFormatter(_Formatter, EscapeFormatter):
    """Escapes the values."""


def _format(environment: _Environment, text: str, *args: Any, **kwargs: Any) -> str:
    if isinstance(text, Markup):
        formatter = _MarkupFormatter(environment, escape=text.escape)
        return _made(type(text)(formatter.vformat(text, args, kwargs)))
    return _made(_Formatter(environment).vformat(text, args, kwargs))


def _check_path(attribute: Any) -> None:
    if isinstance(attribute, str) and len(attribute) > MAX_PATH:
        raise TemplateLimitError(f"names an attribute with more than {MAX_PATH} characters")


_COMPARING_EACH = _words("strip lstrip rstrip rfind rindex rpartition rsplit")


def _call_text_method(
    method: Callable[..., Any], text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls one of TEXT_METHODS, but for `format`."""
    name, growth = method.__name__, 1 if type(text) is str else _ESCAPED
    _spend(len(text))
    # methods that search from the right, or for a set of characters, compare each character of
    # the text with all of these
    if name in _COMPARING_EACH:
        texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        _check_length(len(text) * max(map(len, texts), default=0) >> 7)
    if name in ("ljust", "rjust", "center", "zfill"):
        _check_length(args[0] if args and isinstance(args[0], int) else 0)
    elif name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        _check_length(growth * (len(text) + text.count(args[0]) * len(args[1])))
    elif name == "join" and len(args) == 1:
        items = list(_ticked(args[0]))
        lengths = sum(len(item) for item in items if isinstance(item, str))
        _check_length(growth * (lengths + len(text) * len(items)))
        return method(items, **kwargs)
    elif name in ("split", "rsplit"):
        return _split(method, *args, **kwargs)
    elif name == "splitlines":
        _check_length(4 * len(text))
    return method(*args, **kwargs)


def _split(method: Callable[..., Any], sep: str | None = None, maxsplit: int = -1) -> list[str]:
    most = MAX_ELEMENTS if maxsplit < 0 else min(maxsplit, MAX_ELEMENTS)
    pieces = method(sep, most)
    _check_length(ELEMENT * len(pieces))
    return pieces


# ---------------------------------------------------------------- functions, filters and tests


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message)[:MAX_REASON])


def _strftime_now(format: str) -> str:
    if len(format) > 200 or re.search(r"%[^A-Za-z%]*\d", format):
        raise TemplateLimitError("formats the time with more than 200 characters or a width")
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without the HTML escapes of jinja2's own filter."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > 64:
        raise TemplateLimitError("indents by more than 64 characters")
    if separators is not None and any(len(separator) > 64 for separator in separators):
        raise TemplateLimitError("separates by more than 64 characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if _weigh(value)[0] <= MAX_WRITTEN_AT_ONCE:
        _spend()
        return _made(encoder.encode(value))
    return _join(_ticked(encoder.iterencode(value)))


@pass_environment
def _join_filter(environment: _Environment, value: Any, d: str = "", attribute: Any = None) -> str:
    items = list(_ticked(value))
    if attribute is not None:
        _check_path(attribute)
        items = list(map(filters.make_attrgetter(environment, attribute), items))
    delimiter = str(d)
    texts, length = [], 0
    for item in items:
        texts.append(str(item))
        length += len(texts[-1]) + len(delimiter)
        _check_length(length)
        _spend(len(texts[-1]))
    return _made(delimiter.join(texts))


def _text_method(name: str) -> Callable[..., Any]:
    """A filter that calls a method of the value as text."""

    call = getattr(str, name)

    def apply(value: Any, *args: Any) -> Any:
        if type(value) is str and not args and len(value) <= _LARGE:
            return call(value)
        text = soft_str(value)
        return _made(_call_text_method(getattr(text, name), text, args, {}))

    return apply


def _replace_filter(s: str, old: str, new: str, count: int | None = None) -> str:
    text, options = str(s), () if count is None else (count,)
    return _made(_call_text_method(text.replace, text, (str(old), str(new), *options), {}))


def _center_filter(value: str, width: int = 80) -> str:
    text = soft_str(value)
    return _made(_call_text_method(text.center, text, (width,), {}))


def _indent_filter(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    each = len(width) if isinstance(width, str) else width
    text = s if isinstance(s, str) else str(s)
    _check_length(4 * len(text))  # it may have as many lines
    _check_length(_ESCAPED * (len(text) + each * (2 + len(text.splitlines()))))
    return _made(filters.do_indent(text, width, first, blank))


@pass_environment
def _format_filter(environment: _Environment, value: str, *args: Any, **kwargs: Any) -> str:
    text = soft_str(value)
    _check_format(text, (*args, *kwargs.values()))
    return _made(filters.do_format(text, *args, **kwargs))


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > MAX_BITS:
        raise TemplateLimitError(f"makes an integer of more than {MAX_BITS:,} digits")
    return filters.do_int(value, default, base)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > MAX_DIGITS:
        raise TemplateLimitError(f"rounds to more than {MAX_DIGITS} digits")
    return filters.do_round(value, precision, method)


@pass_environment
def _sum_filter(
    environment: _Environment, iterable: Any, attribute: Any = None, start: Any = 0
) -> Any:
    _check_path(attribute)
    get = filters.make_attrgetter(environment, attribute) if attribute is not None else None
    total = start
    for item in _ticked(iterable):
        number = get(item) if get else item
        if not isinstance(total, (int, float)) or not isinstance(number, (int, float)):
            raise TemplateError("sum adds numbers")
        total = environment.call_binop(None, "+", total, number)
    return total


def _eager(filter: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
    """A filter that returns all of its results at once. jinja2's own is a generator: nested in
    others it would run outside of the checks.
    """

    @pass_context
    def apply(context: Any, value: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for path in (kwargs.get("attribute"), *args[:1]):
            _check_path(path)
        return iter(list(filter(context, value and _ticked(value), *args, **kwargs)))

    return apply


def _few(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter for a list with at most MAX_SORTED elements."""

    @pass_environment
    def apply(environment: _Environment, value: Any, *args: Any, **kwargs: Any) -> Any:
        for path in (*args, *kwargs.values()):
            _check_path(path)
        items = list(_ticked(value))
        if len(items) > MAX_SORTED:
            raise TemplateLimitError(f"sorts more than {MAX_SORTED:,} elements")
        return _made(filter(environment, items, *args, **kwargs))

    return apply


def _dictsort(value: Any, *args: Any, **kwargs: Any) -> Any:
    if len(value) > MAX_SORTED:
        raise TemplateLimitError(f"sorts more than {MAX_SORTED:,} elements")
    _spend(ELEMENT * len(value))
    return _made(filters.do_dictsort(value, *args, **kwargs))


@pass_environment
def _unique(environment: _Environment, value: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    for path in (*args, *kwargs.values()):
        _check_path(path)
    return iter(list(filters.sync_do_unique(environment, _ticked(value), *args, **kwargs)))


def _title(value: Any) -> str:
    """Checks the length first, because jinja2 splits the text at its words."""
    text = soft_str(value)
    _check_length(ELEMENT * len(text))
    return _made(filters.do_title(text))


def _list(value: Any) -> list[Any]:
    return _made(list(_ticked(value)))


def _counted(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter for one value whose result is not much longer."""

    def apply(value: Any, *args: Any) -> Any:
        _spend(len(value) if isinstance(value, str) else ELEMENT)
        return _made(filter(value, *args))

    return apply


FILTERS: dict[str, Callable[..., Any]] = {
    **{name: filters.FILTERS[name] for name in ("abs", "count", "d", "default", "first", "items")},
    **{name: filters.FILTERS[name] for name in ("last", "length")},
    **{name: _text_method(name) for name in ("capitalize", "lower", "upper")},
    **{name: _few(filters.FILTERS[name]) for name in ("max", "min", "sort")},
    **{
        name: _eager(filters.FILTERS[name])
        for name in ("map", "reject", "rejectattr", "select", "selectattr")
    },
    "center": _center_filter,
    "dictsort": _dictsort,
    "e": _counted(escape),
    "escape": _counted(escape),
    "format": _format_filter,
    "indent": _indent_filter,
    "int": _int,
    "join": _join_filter,
    "list": _list,
    "float": _counted(filters.do_float),
    "replace": _replace_filter,
    "reverse": _counted(filters.do_reverse),
    "round": _round,
    "safe": _counted(Markup),
    "string": _counted(soft_str),
    "sum": _sum_filter,
    "title": _title,
    "tojson": _tojson,
    "trim": _text_method("strip"),
    "unique": _unique,
    "quire_compared": _compared,
    "quire_concatenated": _concatenated,
    "quire_limited": _limited,
    "quire_made": _made,
}


def _spending(test: Callable[..., bool]) -> Callable[..., bool]:
    def apply(*args: Any) -> bool:
        _spend()
        return test(*args)

    return apply


def _integers(test: Callable[..., bool]) -> Callable[..., bool]:
    def apply(*numbers: Any) -> bool:
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise TemplateError("odd, even and divisibleby test numbers")
        return test(*numbers)

    return apply


_COMPARISONS = _words(
    "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper"
)
TESTS: dict[str, Callable[..., bool]] = {
    **{name: tests.TESTS[name] for name in ("boolean", "defined", "false", "float", "integer")},
    **{name: tests.TESTS[name] for name in ("iterable", "mapping", "none", "number", "sameas")},
    **{name: tests.TESTS[name] for name in ("sequence", "string", "true", "undefined")},
    **{name: _integers(tests.TESTS[name]) for name in ("divisibleby", "even", "odd")},
    **{name: _spending(tests.TESTS[name]) for name in _COMPARISONS},
}


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    """The environment that templates on the hub expect, as far as transformers' has it."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
    )
    environment.filters = FILTERS
    environment.tests = TESTS
    environment.globals = {
        "namespace": _PlainNamespace,
        "raise_exception": _raise_exception,
        "range": environment.globals["range"],
        "strftime_now": _strftime_now,
    }
    return environment
