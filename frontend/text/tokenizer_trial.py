"""Tries out a tokenizer.json in a process of its own, with limits on time and memory.

Must not know: models, requests, where a tokenizer.json comes from.

The library's regular expressions have no limit: to compile one may take time that is exponential in
its length, and to search a text with one may take minutes. Neither can be interrupted. Nor can a
failed allocation, which ends the process.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import tokenizers

from ...ipc.errors import ModelLoadError
from ...ipc.operating_system import SYSTEM

CPU_LIMIT_S = 20  # a file of 35 MB takes 2
MEMORY_LIMIT_BYTES = 2 * 2**30  # and 64 times the file
WALL_LIMIT_S = 300.0  # on a machine that others use
TEXTS = (
    "It's 12:30 — she'd said 1,234,567.89 €; THEY'LL see  (déjà vu)!\r\n\tnaïve_snakeCase.py  ",
    "Привет, мир! 你好,世界。こんにちは 안녕하세요 नमस्ते مرحبا שלום 👩‍🚀",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # https://example.com/a?b=c&d=%20\n\n\n",
    *(character * 256 for character in "aA1 \n\t.-'é你"),
    "ab" * 128 + "!",
    "a " * 128 + "1",
)


def regular_expressions(component: Any) -> set[str]:
    """Those of a normalizer, pre-tokenizer or decoder of tokenizer.json, and of its parts."""
    if isinstance(component, list):
        return set().union(*map(regular_expressions, component))
    if not isinstance(component, dict):
        return set()
    own = component.get("Regex")
    return set().union(*map(regular_expressions, component.values())) | (
        {own} if isinstance(own, str) else set()
    )


# Published expressions of normalizers, which a load applies to all added tokens.
KNOWN_IN_NORMALIZERS = {" {2,}", r"\s+"}  # take time in proportion to the text
_BUNDLED = {r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"}


def are_known(expressions: set[str]) -> bool:
    """Whether these expressions of the other parts are all published, or the bundled model's."""
    if expressions <= _BUNDLED:
        return True
    from ...ipc.models.gguf_pre_tokenizers import PRE_TOKENIZERS

    published = [step for each in PRE_TOKENIZERS.values() for step in each.steps]
    return expressions <= _BUNDLED | regular_expressions(published)


def try_out(path: Path, contents: bytes) -> None:
    """Loads the file and tokenizes a few texts. What the library refuses to load passes: it says
    the same again. Raises ModelLoadError if that fails otherwise or exceeds the limits.
    """
    memory = MEMORY_LIMIT_BYTES + 64 * len(contents)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(CPU_LIMIT_S), str(memory)],
            input=contents,
            capture_output=True,
            timeout=WALL_LIMIT_S,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
            check=False,
        )
        code, problem = done.returncode, done.stderr.decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        code, problem = -1, ""
    except OSError as error:
        raise ModelLoadError(
            f"{path}: its regular expressions cannot be tried out in a process: {error}"
        ) from error
    if code < 0:
        raise ModelLoadError(
            f"{path}: loading it and tokenizing {len(TEXTS)} short texts took more than "
            f"{CPU_LIMIT_S} s or {memory / 2**30:.1f} GiB of memory. Its regular expressions or "
            f"its normalizer are too costly"
        )
    if code > 0:
        raise ModelLoadError(
            f"{path}: loading it or tokenizing a short text failed: "
            f"{problem.splitlines()[-1] if problem else f'exit code {code}':.300}"
        )


def main(cpu_limit_s: int, memory_limit_bytes: int, contents: bytes) -> None:
    SYSTEM.limit_memory(memory_limit_bytes)
    for kind, limit in ((resource.RLIMIT_CPU, cpu_limit_s), (resource.RLIMIT_CORE, 0)):
        most = resource.getrlimit(kind)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))
    try:
        backend = tokenizers.Tokenizer.from_buffer(contents)
    except MemoryError:
        raise
    except Exception:  # the library raises bare Exception
        return
    for text in TEXTS:
        backend.encode(text)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer.read())
