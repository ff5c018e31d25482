"""A conversation: its turns, the engine that answers the last turn, and the removal of old turns
when the context is full.

Must not know: terminals, commands, where a turn comes from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...ipc.errors import InvalidParameterError
from ...ipc.lora import LoRARequest
from ...ipc.params import RequestOutputKind, SamplingParams
from .terminal import Interrupts

if TYPE_CHECKING:
    from ...ipc.messages import ImageItem
    from ..answer_format import AnswerParser
    from ..llm_engine import LLMEngine

Message = dict[str, Any]  # its content is text, or parts if it has images
LEAST_ROOM = 256  # tokens reserved for an answer, at most a quarter of the context


class Display(Protocol):
    """The destination of an answer."""

    def write(self, text: str) -> None:
        """Shows the next piece of the answer."""

    def write_reasoning(self, text: str) -> None:
        """Shows the next piece of the reasoning before the answer."""

    def end(self) -> None:
        """Ends the answer, which is complete."""

    def notice(self, text: str) -> None:
        """Shows a sentence that is not part of the answer."""

    def error(self, text: str) -> None: ...


@dataclass
class Stats:
    """Holds the counts, in tokens unless named otherwise, and times."""

    num_turns: int = 0
    num_dropped_turns: int = 0
    num_prompt_tokens: int = 0  # of the last turn: the whole conversation
    num_cached_tokens: int = 0  # of these, tokens found in the prefix cache
    num_generated: int = 0  # of all turns
    seconds: float = 0.0  # of all turns, from the input to the end of the answer
    first_token_s: float = 0.0  # of the last turn

    def lines(self, context: int) -> list[str]:
        rate = self.num_generated / self.seconds if self.seconds else 0.0
        return [
            f"turns: {self.num_turns}, dropped: {self.num_dropped_turns}",
            f"context: {self.num_prompt_tokens:,} of {context:,} tokens, "
            f"{self.num_cached_tokens:,} from the prefix cache",
            f"generated: {self.num_generated:,} tokens, {rate:.1f} tokens/s, first token after "
            f"{1000 * self.first_token_s:.0f} ms",
        ]


class Conversation:
    """`sampling`: arguments of SamplingParams, which may change between turns.

    Reasoning is shown, and is not part of the conversation.
    """

    def __init__(
        self,
        engine: LLMEngine,
        sampling: dict[str, Any],
        system: str | None,
        lora_request: LoRARequest | None = None,
    ):
        from ..answer_format import detect  # 40 ms, which --help does not need

        self.engine = engine
        self.sampling = dict(sampling)
        self.system = system
        self._lora_request = lora_request
        self.stats = Stats()
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        self._format = detect(
            tokenizer.chat_templates.get("default"), tool_call_parser="none", tokenizer=tokenizer
        )
        # alternating user and assistant, without the system message
        self.messages: list[Message] = []
        self._images = engine.images
        self._attached: list[dict[str, Any]] = []  # images of the next turn, as parts

    @property
    def reads_images(self) -> bool:
        return self._images.reads_images

    def attach(self, part: dict[str, Any]) -> None:
        """Adds an image to the next turn."""
        self._attached.append(part)

    def clear(self) -> None:
        self.messages, self._attached = [], []

    def restore(self, system: str | None, messages: list[Message]) -> None:
        """Continues a conversation that was saved."""
        self.system, self.messages = system, messages

    def set_system(self, text: str | None) -> None:
        self.system = text

    def set_parameter(self, name: str, value: Any) -> None:
        """Sets an argument of SamplingParams for later turns."""
        self.sampling = {**self.sampling, name: value}

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        return self.engine.config.model_config.max_model_len or 0

    def say(self, text: str, display: Display) -> None:
        """Adds the user's turn, with the images that are attached, and shows the answer.

        A turn that is rejected raises InvalidParameterError and leaves the conversation unchanged;
        its images are dropped.
        """
        content: Any = text
        if self._attached:
            content = [*self._attached, *([{"type": "text", "text": text}] if text else [])]
            self._attached = []
        self._answer([*self.messages, {"role": "user", "content": content}], display)

    def regenerate(self, display: Display) -> None:
        """Answers the last turn again. Raises InvalidParameterError if there is no turn."""
        if not self.messages:
            raise InvalidParameterError("/regenerate", "there is no answer yet")
        self._answer(self.messages[:-1], display)

    def _answer(self, asked: list[Message], display: Display) -> None:
        from ..requests.prompts import IMAGES, PreparedImages

        params = self._format.adapt(
            SamplingParams(**self.sampling, output_kind=RequestOutputKind.DELTA)
        )
        kept, prompt, items = self._fit(asked, params)
        self.stats.num_turns += 1
        request_id = f"turn-{self.stats.num_turns}"
        started = time.perf_counter()
        self.engine.add_request(
            request_id,
            {"prompt_token_ids": prompt, IMAGES: PreparedImages(items)},
            params,
            lora_request=self._lora_request,
        )
        if num_dropped := (len(asked) - len(kept)) // 2:
            self.stats.num_dropped_turns += num_dropped
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            display.notice(f"the context is full: the oldest {turns} dropped")
        with Interrupts() as interrupts:
            parser = self._format.parser(prompt_text=self._text(prompt))
            answer = self._stream(request_id, parser, interrupts, display, started)
        self.stats.seconds += time.perf_counter() - started
        self.messages = [*kept, {"role": "assistant", "content": answer}]

    def _fit(
        self, asked: list[Message], params: SamplingParams
    ) -> tuple[list[Message], list[int], list[ImageItem]]:
        """Returns the newest turns that fit and leave room for an answer, their tokens and images.

        The last turn is always kept. The engine rejects it if it alone is too long.
        """
        room = min(params.max_tokens or LEAST_ROOM, LEAST_ROOM, self.context // 4)
        while True:
            prompt, items = self._render(asked)
            if len(prompt) + room <= self.context or len(asked) < 3:
                return asked, prompt, items
            asked = asked[2:]

    def _render(self, messages: list[Message]) -> tuple[list[int], list[ImageItem]]:
        """Returns the tokens of messages, and their images."""
        from ..requests.prompts import GivenImages

        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        opening = [{"role": "system", "content": self.system}] if self.system else []
        text, images = tokenizer.render_chat(
            [*opening, *messages], self._images.placeholder, add_generation_prompt=True
        )
        if images:
            return self._images.prepare(text, GivenImages(images, add_special_tokens=False))
        return tokenizer.encode(text, add_special_tokens=False), []

    def _text(self, token_ids: list[int]) -> str:
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer.decode(token_ids)

    def _stream(
        self,
        request_id: str,
        parser: AnswerParser,
        interrupts: Interrupts,
        display: Display,
        started: float,
    ) -> str:
        """Shows the answer as it arrives and returns it. Ctrl-C ends it and keeps the text so
        far.
        """
        from ..answer_format import Content, Reasoning

        answer, error, was_cut, is_first = "", None, False, True
        try:
            while self.engine.has_unfinished_requests():
                is_over, engine = interrupts.requested, self.engine
                for output in engine.abort_request(request_id) if is_over else engine.step():
                    if is_first:
                        self.stats.first_token_s = time.perf_counter() - started
                        self.stats.num_prompt_tokens = len(output.prompt_token_ids or ())
                        self.stats.num_cached_tokens = output.num_cached_tokens or 0
                        is_first = False
                    completion = output.outputs[0]
                    self.stats.num_generated += len(completion.token_ids)
                    parts = parser.feed(completion.text)
                    if completion.finish_reason is not None:
                        parts += parser.finish()
                    for part in parts:
                        if isinstance(part, Content):
                            answer += part.text
                            display.write(part.text)
                        elif isinstance(part, Reasoning):
                            display.write_reasoning(part.text)
                    error = output.error or error
                    was_cut = completion.finish_reason == "length"
        finally:
            display.end()
        if error:
            display.error(error)
        if was_cut:
            display.notice("the answer ended at max_tokens or at the end of the context")
        return answer
