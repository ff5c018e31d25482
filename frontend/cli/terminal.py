"""Terminal output of a command: answers in the order of the prompts, one JSON object per line, and
Ctrl-C as a request to stop.

Must not know: engines, tokenizers, where a request comes from.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any, Self, TextIO


class Interrupts:
    """In `with Interrupts() as interrupts`, the first Ctrl-C only sets `interrupts.requested` to
    the signal's number, so that a step can complete. The second raises KeyboardInterrupt. If SIGINT
    was ignored, it stays ignored. `signals` are further signals that count as Ctrl-C.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.requested = 0
        self._previous: dict[signal.Signals, Any] = dict.fromkeys((signal.SIGINT, *signals))

    def __enter__(self) -> Self:
        for number in self._previous:
            self._previous[number] = previous = signal.getsignal(number)
            if number != signal.SIGINT or previous is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _on_signal(self, signum: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = signum


class Dim:
    """Dims text that is not the model's output, if `stream` is a terminal."""

    def __init__(self, stream: TextIO):
        self.on, self.off = ("\x1b[2m", "\x1b[0m") if stream.isatty() else ("", "")

    def __call__(self, text: str) -> str:
        return f"{self.on}{text}{self.off}"


class TextWriter:
    """Prints completions in the order of their prompts. The first unfinished completion is
    streamed; later ones are buffered.

    `titles[i]` is the text of prompt i, printed before its completions with `echo`. `counts[i]` is
    its number of completions. If there are several completions, each has a headline.
    """

    def __init__(self, titles: list[str], counts: list[int], *, echo: bool, out: TextIO):
        self.titles, self.counts, self.echo, self.out = titles, counts, echo, out
        self.keys = [(i, k) for i, count in enumerate(counts) for k in range(count)]
        self.waiting: dict[tuple[int, int], list[str]] = {key: [] for key in self.keys}
        self.finished: set[tuple[int, int]] = set()
        self.cursor = 0  # index into keys of the completion being printed
        self.started = False  # its headline is printed
        self.at_line_start = True
        self.dim = Dim(out)

    def write(self, index: int, output: Any) -> None:
        """Prints `output`, a RequestOutput of kind DELTA for prompt `index`."""
        for completion in output.outputs:
            key = (index, completion.index)
            self.waiting[key].append(completion.text)
            if completion.finish_reason is not None:
                self.finished.add(key)
        self._pump()

    def refuse(self, index: int, problem: str) -> None:
        """Marks prompt `index` as having no output, so that later prompts can be printed."""
        self.finished.update((index, k) for k in range(self.counts[index]))
        self._pump()

    def end(self) -> None:
        """Moves the cursor to the start of a line, also after an interrupt."""
        if not self.at_line_start:
            self._put("\n")

    def _pump(self) -> None:
        while self.cursor < len(self.keys):
            key = self.keys[self.cursor]
            if self.waiting[key] and not self.started:
                self._put(self._headline(*key))
                self.started = True
            self._put("".join(self.waiting[key]))
            self.waiting[key].clear()
            if key not in self.finished:
                return
            if self.started:
                self.end()
            self.cursor, self.started = self.cursor + 1, False

    def _headline(self, index: int, k: int) -> str:
        number = f"{index + 1}/{len(self.titles)}" + (
            f", {k + 1}/{n}" if (n := self.counts[index]) > 1 else ""
        )
        headline = f"== {number} ==\n" if len(self.keys) > 1 else ""
        return self.dim(headline + (self.titles[index] if self.echo else ""))

    def _put(self, text: str) -> None:
        if text:
            self.out.write(text)
            self.out.flush()
            self.at_line_start = text.endswith("\n")


class JsonWriter:
    """Prints one JSON object per completion and line when its prompt has finished. `index` counts
    prompts, and `completion` counts within n.
    """

    def __init__(self, out: TextIO):
        self.out = out

    def write(self, index: int, output: Any) -> None:
        """Prints `output`, a RequestOutput of kind FINAL_ONLY for prompt `index`."""
        for completion in output.outputs:
            line = {
                "index": index,
                "completion": completion.index,
                "prompt": output.prompt,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "usage": {
                    "prompt_tokens": len(output.prompt_token_ids or ()),
                    "completion_tokens": len(completion.token_ids),
                    "cached_tokens": output.num_cached_tokens or 0,
                },
            }
            if output.error:
                line["error"] = output.error
            if completion.logprobs is not None:
                line["cumulative_logprob"] = completion.cumulative_logprob
                line["logprobs"] = [_logprobs(position) for position in completion.logprobs]
            # the same for all completions
            if output.prompt_logprobs is not None and completion.index == 0:
                line["prompt_logprobs"] = [
                    position and _logprobs(position) for position in output.prompt_logprobs
                ]
            self._put(line)

    def refuse(self, index: int, problem: str) -> None:
        self._put({"index": index, "error": problem})

    def end(self) -> None:
        pass

    def _put(self, line: dict[str, Any]) -> None:
        self.out.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.out.flush()


def _logprobs(position: dict[int, Any]) -> list[dict[str, Any]]:
    """Returns the alternatives at one position, in order of rank."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    return [
        {
            "token_id": token_id,
            "logprob": entry.logprob,
            "rank": entry.rank,
            "token": entry.decoded_token,
        }
        for token_id, entry in ranked
    ]


class Meter:
    """Counts tokens and seconds for one line on stderr, if that is a terminal."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.num_prompt_tokens = self.num_generation_tokens = 0

    def count(self, output: Any) -> None:
        """Counts `output`, a RequestOutput of kind DELTA or FINAL_ONLY."""
        self.num_generation_tokens += sum(
            len(completion.token_ids) for completion in output.outputs
        )
        if output.finished:
            self.num_prompt_tokens += len(output.prompt_token_ids)

    def report(self, err: TextIO = sys.stderr) -> None:
        seconds = time.perf_counter() - self.started
        rate = self.num_generation_tokens / seconds if seconds else 0.0
        if err.isatty():
            print(
                Dim(err)(
                    f"[{self.num_prompt_tokens} tokens in, {self.num_generation_tokens} out, "
                    f"{seconds:.1f} s, {rate:.0f} tokens/s]"
                ),
                file=err,
            )
