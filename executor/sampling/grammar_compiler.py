"""From what a request says its output must be to a matcher of llguidance's, under limits of size,
time and memory.

Must not know: torch, slots, steps, or which process it runs in (the engine's, and the one of
grammar_check.py).

The dialects are llguidance's: JSON schema (draft 2020-12; a keyword it does not implement is an
error, never ignored), Rust's `regex` without look-around, word boundaries and back-references (the
whole output matches, with anchors or without), Lark with llguidance's extensions, or GBNF. A choice
is a regex of escaped characters.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ...ipc.errors import InvalidParameterError, ModelLoadError
from ...ipc.json_schemas import closed_schema
from ...ipc.models.gguf import is_gguf
from ...ipc.params import StructuredOutputsParams
from .schema_drafts import without_ignored
from .schema_merging import merged
from .schema_rewriting import MAX_WAYS, in_ways
from .schema_values import TooManyError, UnsayableError, escape

MAX_GRAMMAR_BYTES = 512 * 1024  # of a schema, a regex, a grammar, or all choices together, in UTF-8
MAX_GRAMMAR_SOURCE_BYTES = 128 * 1024  # of a grammar, which Python parses line by line
# of one thread's time; 10 to 50 us are usual, the first mask of a schema takes some milliseconds
MAX_MASK_S = 0.1
# of schemas with oneOf, the first of which that is not too large is tried
NUMBERS_OF_WAYS = (MAX_WAYS, 4, 1)
MAX_REWRITTEN = 200_000  # characters that a schema may grow by, where there are fewer ways
MERGED_FIRST = 20_000  # characters by which a schema grows that llguidance may merge for seconds
NUM_WALKS, WALK_TOKENS = 3, 12  # random walks that try a new grammar
NO_SUCH_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
# llguidance's own limits except for the states, of 1 to 2 kB each: the matcher of one request can
# grow to about 100 MB.
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
# Before the name of an added token: a code point that Unicode assigns to no character.
NO_TEXT = "\U0010ffff"
# End-of-sequence tokens by name, for a model whose configuration states none.
EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>")
# The name of a token in Lark, or a string, a regular expression or a comment, which may look like
# one. An unterminated one reaches to the end, so that the search is linear.
LARK_NAME = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|(?:\#|//)[^\n]*|/(?:\\.|[^/\\])*/?|(<[^<>\s]+>)', re.DOTALL
)


def refusal(problem: str) -> InvalidParameterError:
    return InvalidParameterError("structured_outputs", problem)


def normalize(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Returns `params` with its schema as text.

    Raises InvalidParameterError for a dict that is not JSON, for text that is not valid UTF-8, and
    for text over the size limit.
    """
    if isinstance(params.json, dict):
        try:
            params = msgspec.structs.replace(
                params, json=json.dumps(params.json, ensure_ascii=False)
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameterError(
                "structured_outputs.json", f"must be a JSON schema: {error}"
            ) from None
    for name in ("json", "regex", "choice", "grammar", "whitespace_pattern"):
        value = getattr(params, name) or ""
        limit = MAX_GRAMMAR_SOURCE_BYTES if name == "grammar" else MAX_GRAMMAR_BYTES
        try:
            size = len("".join(value).encode())
        except UnicodeEncodeError:
            raise InvalidParameterError(
                f"structured_outputs.{name}",
                "must be text that UTF-8 can hold, not half characters",
            ) from None
        if size > limit:
            raise InvalidParameterError(
                f"structured_outputs.{name}", f"must have at most {limit} bytes, got {size}"
            )
    return params


def to_llguidance(params: StructuredOutputsParams) -> str:
    """Converts normalized `params` to llguidance's grammar format.

    Raises InvalidParameterError for what cannot be converted; the compiler reports the rest.
    """
    try:
        if params.json is not None or params.json_object:
            schema: Any = params.json if params.json is not None else '{"type": "object"}'
            if schema.strip() == "true":
                schema = "{}"  # the same, and it can hold options
            if params.disable_additional_properties and params.json is not None:
                schema = json.dumps(closed_schema(json.loads(schema)), ensure_ascii=False)
            # llguidance.JsonCompileOptions, which exists in its stubs only
            options: Any = params.json_options(own_options(schema))
            return LLMatcher.grammar_from_json_schema(schema, overrides=options)
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            return LLMatcher.grammar_from_regex("|".join(map(escape, params.choice)))
        text = params.grammar or ""
        is_json = text.lstrip().startswith("{")
        return llguidance.grammar_from("llguidance" if is_json else "grammar", text)
    except Exception as error:  # GBNF's reader raises any exception
        raise refusal(f"cannot be read: {shorten(str(error))}") from None


def _of_its_draft(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """`params` without what the schema's draft ignores, where llguidance would apply it."""
    assert isinstance(params.json, str)  # they are normalized
    if '"$ref"' not in params.json or "draft-0" not in params.json:
        return params  # so that most schemas are not read twice
    try:
        read = json.loads(params.json)
        made = without_ignored(read)
    except (ValueError, RecursionError):  # as llguidance says, too
        return params
    if made == read:
        return params
    if params.disable_additional_properties:
        made = closed_schema(made)
    return _with_schema(params, json.dumps(made, ensure_ascii=False))


class Said(NamedTuple):
    """What llguidance shall read."""

    params: StructuredOutputsParams
    # in which a branch of oneOf excludes the others; None: as many as there are
    max_ways: int | None


def _rewritten(params: StructuredOutputsParams, error: str) -> Iterator[Said]:
    """`params` with their schema in llguidance's keywords, and merged by us, for what llguidance
    cannot merge. error: llguidance's, without that.

    Raises InvalidParameterError for what no grammar can say.
    """
    assert isinstance(params.json, str)  # they are normalized
    try:
        schema = json.loads(params.json)
        if params.disable_additional_properties:
            schema = closed_schema(schema)
        for text, max_ways in _texts(schema, len(params.json)):
            yield Said(_with_schema(params, text), max_ways)
    except UnsayableError as unsayable:
        raise refusal(f"cannot be compiled: {shorten(str(unsayable))}") from None
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as failure:
        # It is malformed, as llguidance says. The second name tells where it is not.
        name = type(failure).__name__
        raise refusal(f"cannot be compiled: {shorten(error)} (rewriting: {name})") from None


def _texts(schema: Any, size: int) -> Iterator[tuple[str, int | None]]:
    """A schema of `size` characters in llguidance's keywords, each time beside the same merged, in
    fewer and fewer ways as long as that leaves some out.

    Raises UnsayableError if nothing was left to try because of it, and as `rewritten` does.
    """
    before, problem = None, None
    for max_ways in NUMBERS_OF_WAYS:
        try:
            made, leaves_out = in_ways(schema, max_ways)
            text = json.dumps(made, ensure_ascii=False)
            is_last = max_ways == NUMBERS_OF_WAYS[-1]
            if text == before or (len(text) > size + MAX_REWRITTEN and not is_last):
                continue
            before, problem = text, None
            ways = max_ways if leaves_out else None
            is_large = len(text) > size + MERGED_FIRST
            if is_large:
                try:
                    short = json.dumps(merged(made), ensure_ascii=False)
                except UnsayableError as error:
                    problem = error
                else:
                    yield short, ways
            if '"notMultipleOf"' not in text:  # which only merging takes away
                yield text, ways
            if not is_large:
                yield json.dumps(merged(made), ensure_ascii=False), ways
        except TooManyError as error:
            problem = error
    if problem is not None:
        raise problem


def _with_schema(params: StructuredOutputsParams, text: str) -> StructuredOutputsParams:
    return msgspec.structs.replace(params, json=text, disable_additional_properties=False)


def own_options(schema: str) -> dict[str, Any]:
    """What a schema says to llguidance itself."""
    if "x-guidance" not in schema:  # so that large schemas are not read twice
        return {}
    read = json.loads(schema)
    own = read.get("x-guidance") if isinstance(read, dict) else None
    return own if isinstance(own, dict) else {}


def with_token_ids(grammar: str, added_tokens: Mapping[str, int]) -> str:
    """Returns a grammar, in Lark or in llguidance's JSON, with ids in place of the names of tokens.

    Lark names a token as <name>, outside of strings, regular expressions and comments.
    """

    def with_id(match: re.Match) -> str:
        token_id = added_tokens.get(match[1] or "")
        return match[0] if token_id is None else f"<[{token_id}]>"

    if not grammar.lstrip().startswith("{"):
        return LARK_NAME.sub(with_id, grammar)
    read = json.loads(grammar)
    grammars = read.get("grammars") if isinstance(read, dict) else None
    for one in grammars if isinstance(grammars, list) else []:
        if isinstance(one, dict) and isinstance(lark := one.get("lark_grammar"), str):
            one["lark_grammar"] = LARK_NAME.sub(with_id, lark)
    return json.dumps(read, ensure_ascii=False)


def without_added_texts(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The contents of a tokenizer.json whose added tokens are found in no text, under the same ids.

    llguidance tokenizes text that a grammar forces as the tokenizer would, which takes an added
    token where the text looks like one: "a<end>" with a token <end>. To llguidance added tokens are
    not text, so it then refuses the token; if it is the end-of-sequence token, it ends the output.
    Here no text can contain what these tokens are called. Nothing is cut off or filled up, either.
    """
    added = tokenizer.get("added_tokens") or []
    renamed = [{**token, "content": NO_TEXT + token["content"]} for token in added]
    model, vocabulary = dict(tokenizer["model"]), tokenizer["model"]["vocab"]
    is_scored = not isinstance(vocabulary, dict)  # pieces of a Unigram model with their scores
    texts = {token["content"] for token in added}
    texts &= {piece for piece, _ in vocabulary} if is_scored else vocabulary.keys()
    new_names = {text: NO_TEXT + text for text in texts}
    if new_names and is_scored:
        model["vocab"] = [[new_names.get(text, text), score] for text, score in vocabulary]
    elif new_names:
        model["vocab"] = {new_names.get(text, text): i for text, i in vocabulary.items()}
        if unknown := model.get("unk_token"):
            model["unk_token"] = new_names.get(unknown, unknown)
        merges = model.get("merges") or []  # those of an added token write no other token
        model["merges"] = [merge for merge in merges if texts.isdisjoint(_texts_of(merge))]
    unused = {"truncation": None, "padding": None, "post_processor": None}
    return {**tokenizer, **unused, "added_tokens": renamed, "model": model}


def _texts_of(merge: str | list[str]) -> tuple[str, str, str]:
    """Both parts of a merge of BPE, and their union."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first, second, first + second


def shorten(error: str) -> str:
    """Shortens an error of llguidance, which repeats the user's grammar."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= 300 else f"{text[:300]}…"


def is_dead_end(matcher: LLMatcher) -> bool:
    """For a matcher in error: whether nothing can follow and the grammar is not at an end.

    Otherwise a limit was exceeded.
    """
    return matcher.get_error().startswith("NoExtension")


def _tokenizer_json(path: Path) -> bytes:
    """tokenizer.json of a model's directory, or of a GGUF file."""
    if not is_gguf(path):
        return (path / "tokenizer.json").read_bytes()
    from ...ipc.models.gguf_tokenizer import tokenizer_json

    return tokenizer_json(path)


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    `tokenizer_directory` holds the tokenizer.json, or is a GGUF file; `vocab_size` is the model's:
    ids beyond the tokenizer are never allowed. Thread-safe. The first thread that needs the
    tokenizer loads it (0.02 s with 2,000 tokens, 1 s with 152,000); it stays loaded.
    """

    def __init__(self, tokenizer_directory: str, vocab_size: int, eos_token_id: int | None):
        self.tokenizer_directory = tokenizer_directory
        self.vocab_size = vocab_size
        # the model's first; None: llguidance finds one by its name
        self.eos_token_id = eos_token_id
        self.limits = LLParserLimits(**LIMITS)
        self._tokenizer: LLTokenizer | None = None
        self._added_tokens: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def num_mask_words(self) -> int:
        return -(-self.vocab_size // 32)

    @property
    def tokenizer(self) -> LLTokenizer:
        """Raises InvalidParameterError for a tokenizer that llguidance does not support, and
        OSError if its file cannot be read for now.
        """
        with self._lock:
            if self._tokenizer is None:
                path = Path(self.tokenizer_directory)
                try:
                    self._tokenizer = self._load(msgspec.json.decode(_tokenizer_json(path)))
                except (*NO_SUCH_FILE, ValueError, TypeError, KeyError, ModelLoadError) as error:
                    raise refusal(
                        f"is not possible with this model's tokenizer: {shorten(str(error))}"
                    ) from None
            return self._tokenizer

    def _load(self, contents: dict[str, Any]) -> LLTokenizer:
        """`contents` of tokenizer.json."""
        self._added_tokens = {
            token["content"]: token["id"] for token in contents.get("added_tokens") or []
        }
        eos = self.eos_token_id
        if eos is None:
            eos = next((i for text, i in self._added_tokens.items() if text in EOS_NAMES), None)
        text = msgspec.json.encode(without_added_texts(contents)).decode()
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)

    def compile(self, params: StructuredOutputsParams) -> LLMatcher:
        """Returns a matcher before its first token.

        The text of an added token in a grammar means its characters, which other tokens write; Lark
        can name the token itself. Takes about a millisecond, mostly without the GIL, and needs a
        deep stack (see grammar.py). Compile only what grammar_check.py has accepted: time and
        memory are not limited here. Raises InvalidParameterError.
        """
        return self.compile_said(params)[0]

    def compile_said(self, params: StructuredOutputsParams) -> tuple[LLMatcher, Said]:
        """`compile`, and `params` with the schema that llguidance has read: the same, without what
        its draft ignores (schema_drafts.py), or rewritten (schema_rewriting.py, schema_merging.py).
        """
        if params.json is not None:
            params = _of_its_draft(params)
        said, matcher, problem = Said(params, None), self._matcher(params), None
        if matcher.is_error() and params.json is not None:
            for said in _rewritten(params, matcher.get_error()):
                problem = None
                try:
                    matcher = self._matcher(said.params)
                except InvalidParameterError as error:  # it nests too deeply; merged it may not
                    problem = error
                if problem is None and not matcher.is_error():
                    break
            if problem is not None:
                raise problem
        if matcher.is_error():
            raise refusal(f"cannot be compiled: {shorten(matcher.get_error())}")
        return matcher, said

    def _matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        """Raises InvalidParameterError for what cannot be read; other errors are the matcher's."""
        tokenizer, grammar = self.tokenizer, to_llguidance(params)
        if params.grammar is not None:
            try:
                grammar = with_token_ids(grammar, self._added_tokens)
            except (ValueError, RecursionError) as error:
                raise refusal(f"cannot be read: {shorten(str(error))}") from None
        return LLMatcher(tokenizer, grammar, log_level=0, limits=self.limits)

    def try_out(self, matcher: LLMatcher) -> None:
        """Takes a few tokens with a fresh matcher, in a reproducible random walk.

        Raises InvalidParameterError if its masks take too long or exceed llguidance's limits, and
        if it accepts nothing at all.
        """
        draw = random.Random(0)
        for _ in range(NUM_WALKS):
            copy = matcher.deep_copy()
            for index in range(WALK_TOKENS):
                allowed = self._timed_mask(copy)
                if copy.is_error() and not is_dead_end(copy):
                    raise refusal(f"is too complex: {shorten(copy.get_error())}")
                if index == 0 and (copy.is_error() or not len(allowed)):
                    raise refusal("accepts no output at all")
                others = allowed[allowed != self.tokenizer.eos_token]
                if copy.is_error() or not len(others):
                    break
                copy.consume_token(int(draw.choice(others)))

    def _timed_mask(self, matcher: LLMatcher) -> np.ndarray:
        """The token ids that may come next."""
        words = np.zeros(self.num_mask_words, np.int32)
        start = time.thread_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        seconds = time.thread_time() - start
        if seconds > MAX_MASK_S:
            raise refusal(
                f"is too complex: finding the tokens that may come next took {seconds:.1f} s"
            )
        return np.flatnonzero(
            np.unpackbits(words.view(np.uint8), bitorder="little")[: self.vocab_size]
        )
