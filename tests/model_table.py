"""Writes the tables of docs/models.md from the tables in code: `python -m quire.tests.model_table`.

tests/test_model_table.py checks that they are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from quire.frontend.answer_format.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.models.encoders import ENCODERS, FALLBACK_ENCODERS
from quire.ipc.models.fallback_architectures import (
    FALLBACKS,
    REFUSED,
    WITH_CONV1D,
    choose_implementation,
)
from quire.ipc.models.gguf_architectures import GGUF_ARCHITECTURES, VARIANTS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- {}: tests/model_table.py -->", "<!-- end -->"
QUANTIZED = "AWQ, GPTQ, AutoRound, compressed-tensors, FP8"
OWN_FORMATS = {"gpt_oss": ", MXFP4", "bitnet": ", BitNet"}
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
    "minimax_m3_vl_text": ("minimax_m3", "minimax_m3"),
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
    "deepseek_v3": ("deepseek_v3, deepseek_v31, kimi_k2", "think"),
    "deepseek_v32": ("deepseek_v32", "think"),
    "deepseek_v4": ("deepseek_v4", "think"),
    "glm4_moe_lite": ("glm47", "think"),
    "glm_moe_dsa": ("glm47", "think"),
    "kimi_linear": ("kimi_k2", ""),
    "cohere2": ("cohere", "cohere"),
    "cohere2_moe": ("cohere", "cohere_text"),
    "apertus": ("apertus", "apertus"),
    "hy_v3": ("hy_v3", "hy_v3"),
}
# Of the model type of a page: the models that people know; what its layers have beyond Llama's
NOTES = {
    "llama": (
        "Llama 2 and 3 and others with this architecture",
        "grouped-query attention, biases",
    ),
    "mistral": ("Mistral 7B", "sliding window"),
    "qwen2": ("Qwen2, Qwen2.5", "sliding window in the later layers"),
    "qwen3": ("Qwen3 (dense)", "norms on queries and keys"),
    "gemma3_text": ("Gemma 3", "sliding window in five of six layers"),
    "phi3": ("Phi-3, Phi-4 and Phi-4-mini", "LongRoPE: see below"),
    "mixtral": ("Mixtral 8x7B and 8x22B", "experts, sliding window"),
    "qwen2_moe": ("Qwen1.5-MoE, Qwen2-MoE", "experts, and one that all tokens share"),
    "qwen3_moe": ("Qwen3-MoE, for example Qwen3-30B-A3B", "experts"),
    "olmoe": ("OLMoE", "experts; norms of queries and keys as a whole"),
    "gpt_oss": (
        "gpt-oss",
        "experts with biases and a clamped SwiGLU; sinks; a window in every other layer",
    ),
    "smollm3": ("SmolLM3", "layers without rotary positions"),
    "olmo2": ("OLMo 2", "norms after each block"),
    "olmo3": ("OLMo 3", "norms after each block, sliding window"),
    "granite": ("Granite 3 (dense)", "multipliers"),
    "ministral3": ("Ministral 3", "YaRN, queries that grow with the position"),
    "qwen2_5_vl_text": ("Qwen2.5-VL", "positions of three components"),
    "qwen3_vl_text": (
        "Qwen3-VL (dense)",
        "positions of three components; the first layers read the image too",
    ),
    "qwen3_vl_moe_text": (
        "Qwen3-VL with experts",
        "positions of three components; the first layers read the image too",
    ),
    "qwen3_next": ("Qwen3-Next", "Gated DeltaNet, gated attention in every fourth layer, experts"),
    "qwen3_5_text": (
        "Qwen3.5, 3.6 and 3.8 (dense)",
        "Gated DeltaNet, gated attention in every fourth layer",
    ),
    "qwen3_5_moe_text": (
        "Qwen3.5, 3.6 and 3.8 with experts",
        "Gated DeltaNet, gated attention in every fourth layer, experts",
    ),
    "gemma3n_text": (
        "Gemma 3n, text",
        "several residual streams (AltUp, Laurel), sparse MLPs in the first layers; sliding "
        "window; layers share keys and values and have embeddings of their own",
    ),
    "gemma4_text": (
        "Gemma 4",
        "sliding window; heads of two sizes; the small sizes share keys and values and have "
        "embeddings per layer, 26B-A4B has experts",
    ),
    "gemma4_unified_text": ("Gemma 4 12B", "sliding window; heads of two sizes"),
    "lfm2": ("LFM2, LFM2.5", "short convolutions"),
    "lfm2_moe": ("LFM2-MoE", "short convolutions, experts"),
    "lfm3": ("LFM3", "short convolutions, gated attention, sliding window"),
    "granitemoehybrid": ("Granite 4", "Mamba 2 in most layers, experts, multipliers"),
    "nemotron_h": ("Nemotron-H, Nemotron 3", "Mamba 2, attention, MLP or experts in each layer"),
    "falcon_h1": ("Falcon-H1", "attention and Mamba 2 side by side in each layer, multipliers"),
    "bamba": ("Bamba", "Mamba 2 in most layers"),
    "mamba2": ("Mamba 2", "no attention; the residual stream is of the model's dtype"),
    "kimi_linear": (
        "Kimi Linear",
        "Kimi Delta Attention, latent attention without rotary positions, experts",
    ),
    "deepseek_v2": ("DeepSeek V2", "latent attention, experts"),
    "deepseek_v3": ("DeepSeek V3 and R1, Kimi K2", "latent attention, experts in groups"),
    "deepseek_v32": (
        "DeepSeek V3.2",
        "latent attention, experts in groups; contexts of up to `index_topk` tokens (2048), of "
        "which the indexer would choose all",
    ),
    "glm_moe_dsa": (
        "GLM-5",
        "latent attention, experts; contexts of up to `index_topk` tokens (2048), as DeepSeek V3.2",
    ),
    "glm4_moe_lite": ("GLM-4.7-Flash", "latent attention, experts"),
    "gemma2": ("Gemma 2", "sliding window in every other layer, capped logits"),
    "glm4": ("GLM-4", "norms before and after each block, half of each head rotates"),
    "seed_oss": ("Seed-OSS", "biases"),
    "ernie4_5": ("ERNIE 4.5 (dense)", ""),
    "ernie4_5_moe": ("ERNIE 4.5 with experts, text", "experts, and some that all tokens share"),
    "exaone4": ("EXAONE 4", "sliding window, norms after each block"),
    "bitnet": ("BitNet b1.58", "ternary weights, norms before output projections"),
    "hunyuan_v1_dense": ("Hunyuan (dense)", "norms on queries and keys after the rotation"),
    "hunyuan_v1_moe": (
        "Hunyuan-A13B",
        "norms on queries and keys after the rotation; experts, and one that all tokens share",
    ),
}


def supported() -> Iterator[str]:
    gguf = {
        row: f"GGUF (`{name}`)"
        for name, known in [*GGUF_ARCHITECTURES.items(), *VARIANTS.items()]
        for row in ((known.architecture, known.model_type), *known.others)
    }
    yield "| architecture | model_type | code | formats | parsers | compared with |"
    yield "|---|---|---|---|---|---|"
    for architecture, known in ARCHITECTURES.items():
        formats = [
            "safetensors",
            QUANTIZED + OWN_FORMATS.get(known.model_type, ""),
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


def notes() -> Iterator[str]:
    """A line for each type of a page, with what NOTES says of it."""
    architectures: dict[str, list[str]] = {}
    for architecture, known in ARCHITECTURES.items():
        architectures.setdefault(known.model_type, []).append(f"`{architecture}`")
    yield "| architecture | models | notes |"
    yield "|---|---|---|"
    for model_type, names in architectures.items():
        models, note = NOTES.get(model_type, ("", ""))
        yield f"| {', '.join(names)} | {models} | {note} |"


def _runs(model_type: str) -> bool:
    """Whether a generative model of a type runs under a name that transformers gives it."""
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        if model_type in names:
            config = {"model_type": model_type, "architectures": [names[model_type]]}
            try:
                choose_implementation(config, "auto")
            except ModelLoadError:
                continue
            return True
    return False


def refused() -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    of_pages = {known.model_type for known in [*ARCHITECTURES.values(), *ENCODERS.values()]}
    for model_type, reason in REFUSED.items():
        if model_type in of_pages | FALLBACK_ENCODERS.keys() or _runs(model_type):
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
    "notes": notes,
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
