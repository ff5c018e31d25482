"""Writes the tables of docs/models.md from the tables in code: `python -m quire.tests.model_table`.

tests/test_model_table.py checks that they are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from quire.frontend.answer_format.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.models.encoders import ENCODERS, FALLBACK_ENCODERS
from quire.ipc.models.fallback_architectures import FALLBACKS, REFUSED, WITH_CONV1D
from quire.ipc.models.gguf_architectures import GGUF_ARCHITECTURES, VARIANTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- {}: tests/model_table.py -->", "<!-- end -->"
QUANTIZED = "AWQ, GPTQ, AutoRound, compressed-tensors, FP8"
# Of a model type whose well-known checkpoints share a chat format: tool calls; reasoning
PARSERS = {
    "llama": ("llama3_json, pythonic", "think"),
    "mistral": ("mistral, mistral_v11", ""),
    "qwen2": ("hermes", "think"),
    "qwen3": ("hermes", "think"),
    "phi3": ("phi4_mini", ""),
    "smollm3": ("hermes", "think"),
    "olmo3": ("olmo3", "think"),
    "granite": ("granite", ""),
    "ministral3": ("mistral_v11", "mistral"),
    "mixtral": ("mistral", ""),
    "qwen3_moe": ("hermes, qwen3_coder", "think"),
    "gpt_oss": ("harmony", "harmony"),
    "glm4_moe": ("glm45", "think"),
    "granitemoe": ("granite", ""),
    "minimax_m2": ("minimax_m2", "think"),
    "seed_oss": ("seed_oss", "seed_oss"),
    "qwen3_next": ("hermes", "think"),
    "qwen3_5": ("qwen3_coder", "think"),
    "qwen3_5_text": ("qwen3_coder", "think"),
    "qwen3_5_moe": ("qwen3_coder", "think"),
    "qwen3_5_moe_text": ("qwen3_coder", "think"),
    "gemma4": ("gemma4", "gemma4"),
    "gemma4_text": ("gemma4", "gemma4"),
    "gemma4_unified": ("gemma4", "gemma4"),
    "gemma4_unified_text": ("gemma4", "gemma4"),
    "lfm2": ("lfm2", "think"),
    "lfm2_moe": ("lfm2", "think"),
    "lfm3": ("lfm2", "think"),
    "granitemoehybrid": ("hermes", ""),
    "nemotron_h": ("qwen3_coder", "think"),
    "deepseek_v3": ("deepseek_v3, deepseek_v31", "think"),
    "deepseek_v32": ("deepseek_v32", "think"),
    "deepseek_v4": ("deepseek_v4", "think"),
    "glm4_moe_lite": ("glm47", "think"),
    "cohere2": ("cohere", "cohere"),
    "cohere2_moe": ("cohere", "cohere_text"),
    "apertus": ("apertus", "apertus"),
}


def supported() -> Iterator[str]:
    gguf = {
        (known.architecture, known.model_type): f"GGUF (`{name}`)"
        for name, known in [*GGUF_ARCHITECTURES.items(), *VARIANTS.items()]
    }
    yield "| architecture | model_type | code | formats | parsers | compared with |"
    yield "|---|---|---|---|---|---|"
    for architecture, known in ARCHITECTURES.items():
        formats = [
            "safetensors",
            f"{QUANTIZED}, MXFP4" if known.model_type == "gpt_oss" else QUANTIZED,
            *([gguf[row]] if (row := (architecture, known.model_type)) in gguf else []),
        ]
        yield (
            f"| `{architecture}` | `{known.model_type}` | Quire | {'; '.join(formats)} | "
            f"{_parsers(known.model_type)} | "
            f"transformers, `tests/executor/test_models.py` |"
        )
    of_pages = {known.model_type for known in ARCHITECTURES.values()}
    for model_type, fallback in FALLBACKS.items():
        architecture = fallback.architecture
        if model_type not in of_pages:
            formats = ["safetensors", *([] if model_type in WITH_CONV1D else [QUANTIZED])]
            formats += [gguf[row]] if (row := (architecture, model_type)) in gguf else []
            yield (
                f"| `{architecture}` | `{model_type}` | transformers | {'; '.join(formats)} | "
                f"{_parsers(model_type)} | "
                f"transformers, `pytest -m all_models` |"
            )


def encoders() -> Iterator[str]:
    """The form of a name with a page: BertModel is also BertForSequenceClassification."""
    yield "| architecture | model_type | other forms |"
    yield "|---|---|---|"
    for architecture, known in ENCODERS.items():
        family = architecture.removesuffix("Model")
        forms = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
        yield (
            f"| `{architecture}` | `{known.model_type}` | "
            f"{', '.join(f'`{family}{form}`' for form in forms)} |"
        )


def encoders_in_transformers() -> Iterator[str]:
    yield "| architecture | model_type |"
    yield "|---|---|"
    for model_type, known in FALLBACK_ENCODERS.items():
        yield f"| `{known.architecture}` | `{model_type}` |"


def _parsers(model_type: str) -> str:
    tools, reasoning = PARSERS.get(model_type, ("", ""))
    kinds = {"tools": tools, "reasoning": reasoning}
    return "; ".join(f"{kind}: {names}" for kind, names in kinds.items() if names)


def refused() -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    of_pages = {known.model_type for known in ENCODERS.values()}
    for model_type, reason in REFUSED.items():
        if model_type in of_pages | FALLBACK_ENCODERS.keys():
            continue
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


TABLES = {
    "supported": supported,
    "encoders": encoders,
    "encoders in transformers": encoders_in_transformers,
    "refused": refused,
    "parsers": parsers,
}


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
