"""`quire chat`: a conversation in the terminal, or over standard input with one turn per line.

Must not know: how an engine is reached, tensors, how a template is written.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InvalidParameterError
from ...ipc.params import RequestOutputKind, SamplingParams
from .flags import Flag, given
from .parser import Parser
from .session import add_session_flags, check_sampling, default_sampling, open_engine, request_flags
from .sources import naming_sources
from .terminal import Dim, Interrupts

if TYPE_CHECKING:
    from ..llm_engine import LLMEngine

USAGE = "quire chat [--system TEXT] [sampling flags] [engine flags]"
DESCRIPTION = "Talks with the model. /clear starts over, /exit or Ctrl-D leaves, Ctrl-C stops the answer. From a pipe: one turn per line."
COMMON_SAMPLING = ("temperature", "top_p", "max_tokens", "stop")
SYSTEM = Flag("system", str | None, None, "What the model is told before the first turn.")
DEFAULTS = {"max_tokens": None}  # an answer may fill the context


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("quire chat", USAGE, DESCRIPTION, show_all="--help-all" in argv)
    parser.add_flags("conversation", [SYSTEM], ("system",))
    parser.add_flags("sampling", request_flags(**DEFAULTS), COMMON_SAMPLING)
    add_session_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    sampling = given(args, request_flags())
    with naming_sources(args.settings):
        check_sampling(sampling)
        if sampling.get("n", 1) != 1:
            raise InvalidParameterError("n", "a conversation has one answer per turn")
        if getattr(args, "skip_tokenizer_init", False):
            raise InvalidParameterError("skip_tokenizer_init", "a conversation needs the tokenizer")
    with open_engine(args) as engine:
        conversation = Conversation(
            engine,
            {**default_sampling(engine, **DEFAULTS), **sampling},
            getattr(args, "system", None),
        )
        return (
            talk_interactively(conversation)
            if sys.stdin.isatty()
            else talk_line_by_line(conversation)
        )


class Conversation:
    """The messages so far and the engine that answers the last one."""

    def __init__(self, engine: LLMEngine, sampling: dict[str, Any], system: str | None):
        self.engine = engine
        self.params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
        self.opening = [{"role": "system", "content": system}] if system else []
        self.num_turns = 0
        self.clear()

    def clear(self) -> None:
        self.messages: list[dict[str, str]] = list(self.opening)

    def say(self, text: str) -> None:
        """Adds the user's turn and streams the answer to standard output.

        A refused turn (too long) raises and leaves no trace.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.engine.tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        self.num_turns += 1
        self.engine.add_request(f"turn-{self.num_turns}", {"prompt_token_ids": prompt}, self.params)
        with Interrupts() as interrupts:
            answer = self._stream(f"turn-{self.num_turns}", interrupts)
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _stream(self, request_id: str, interrupts: Interrupts) -> str:
        """Prints the answer as it comes and returns what was printed; Ctrl-C ends it, and what was
        said stays said.
        """
        answer = ""
        while self.engine.has_unfinished_requests():
            outputs = (
                self.engine.abort_request(request_id)
                if interrupts.requested
                else self.engine.step()
            )
            for output in outputs:
                text = output.outputs[0].text
                answer += text
                print(text, end="", flush=True)
                if output.error:
                    print(f"\nquire: {output.error}", end="", file=sys.stderr, flush=True)
        print(flush=True)
        return answer


def talk_interactively(conversation: Conversation) -> int:
    import readline  # noqa: F401  (line editing and history for input())

    dim = Dim(sys.stdout)
    print(dim("/clear starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"))
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print(dim("\n(Ctrl-D leaves)"))
            continue
        if line == "/exit":
            return 0
        if line == "/clear":
            conversation.clear()
            print(dim("(a new conversation)"))
        elif line:
            try:
                conversation.say(line)
            except InvalidParameterError as error:
                print(f"quire: {error}", file=sys.stderr)


def talk_line_by_line(conversation: Conversation) -> int:
    """Turns from a pipe. A refused turn is reported, the others go on, and the exit code is 2."""
    code = 0
    for line in sys.stdin:
        line = line.strip()
        if line == "/exit":
            break
        if line == "/clear":
            conversation.clear()
        elif line:
            try:
                conversation.say(line)
            except InvalidParameterError as error:
                print(f"quire: {error}", file=sys.stderr)
                code = 2
    return code
