"""Writes the tables of docs/models.md from the tables in code: `python -m quire.tests.model_table`.

tests/test_model_table.py checks that they are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from quire.frontend.answer_format.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.models.fallback_architectures import FALLBACKS, REFUSED, WITH_CONV1D
from quire.ipc.models.gguf_architectures import GGUF_ARCHITECTURES, VARIANTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- {}: tests/model_table.py -->", "<!-- end -->"
QUANTIZED = "AWQ, GPTQ, AutoRound, compressed-tensors, FP8"


def supported() -> Iterator[str]:
    gguf = {
        known.architecture: f"GGUF (`{name}`)"
        for name, known in [*GGUF_ARCHITECTURES.items(), *VARIANTS.items()]
    }
    yield "| architecture | model_type | code | formats | compared with |"
    yield "|---|---|---|---|---|"
    for architecture, known in ARCHITECTURES.items():
        formats = [
            "safetensors",
            f"{QUANTIZED}, MXFP4" if known.model_type == "gpt_oss" else QUANTIZED,
            *([gguf[architecture]] if architecture in gguf else []),
        ]
        yield (
            f"| `{architecture}` | `{known.model_type}` | Quire | {'; '.join(formats)} | "
            f"transformers, `tests/executor/test_models.py` |"
        )
    for model_type, fallback in FALLBACKS.items():
        if (architecture := fallback.architecture) not in ARCHITECTURES:
            formats = ["safetensors", *([] if model_type in WITH_CONV1D else [QUANTIZED])]
            formats += [gguf[architecture]] if architecture in gguf else []
            yield (
                f"| `{architecture}` | `{model_type}` | transformers | {'; '.join(formats)} | "
                f"transformers, `pytest -m all_models` |"
            )


def refused() -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for model_type, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{model_type}`")
    yield "| model types | reason |"
    yield "|---|---|"
    for reason, model_types in by_reason.items():
        yield f"| {', '.join(sorted(model_types))} | {reason} |"


def parsers() -> Iterator[str]:
    names = dict.fromkeys(f"`{row.name}`" for row in TOOL_FORMATS)
    yield "| parsers | names |"
    yield "|---|---|"
    yield f"| tool calls (`--tool-call-parser`) | {', '.join(names)} |"
    yield (
        "| reasoning (`--reasoning-parser`) | "
        f"{', '.join(f'`{name}`' for name in REASONING_FORMATS)} |"
    )


TABLES = {"supported": supported, "refused": refused, "parsers": parsers}


def updated(page: str) -> str:
    """The page with every table as the code has it."""
    for name, table in TABLES.items():
        begin = BEGIN.format(name)
        pattern = re.compile(re.escape(begin) + r".*?" + re.escape(END), re.DOTALL)
        text = "\n".join([begin, "", *table(), "", END])
        page, count = pattern.subn(lambda _, text=text: text, page)
        if count != 1:
            raise ValueError(f"docs/models.md needs one table {name}, it has {count}")
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
