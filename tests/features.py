"""The features that the feature tests combine, one object each.

A feature has engine settings, a change of the request's parameters, or an action of the driver in
mid-run. `shows` fails if a run gives no evidence of the feature. `relates` compares the outputs
with those of the same requests without the feature.
"""

from __future__ import annotations

from quire.kernels.cpu.native.library import library
from quire.tests.feature_effects import (
    pause_and_resume,
    shows_beams,
    shows_chunks,
    shows_drafts,
    shows_hits,
    shows_multi_step,
    shows_offload,
    shows_overlap,
    shows_pause,
    shows_priority,
    shows_recompute,
    shows_states,
    shows_swap,
    shows_trace,
)
from quire.tests.feature_loras import SETTINGS as OF_LORAS
from quire.tests.feature_loras import shows_loras
from quire.tests.feature_requests import (
    relates_as_different,
    relates_as_equal,
    relates_n,
    relates_stop,
    shows_logprobs,
    shows_n,
    shows_nothing,
    shows_prompt_logprobs,
    shows_stop,
    shows_structure,
    with_n,
    with_prompt_logprobs,
    with_stop,
    with_structure,
)
from quire.tests.feature_run import (
    BLOCK_SIZE,
    FEW_BLOCKS,
    GGUF_MODEL,
    HYBRID_MODEL,
    KIMI_MODEL,
    Feature,
    replace,
)

CHUNKED_PREFILL = Feature("chunked prefill", shows_chunks, dict(max_num_batched_tokens=16))
# Few requests at once: those of the first step find nothing in the cache.
PREFIX_CACHE = Feature("prefix cache", shows_hits, dict(enable_prefix_caching=True, max_num_seqs=3))
RECOMPUTE = Feature(
    "recompute",
    shows_recompute,
    dict(preemption_mode="recompute", num_gpu_blocks_override=FEW_BLOCKS),
)
SWAP = Feature("swap", shows_swap, dict(preemption_mode="swap", num_gpu_blocks_override=FEW_BLOCKS))
OFFLOAD = Feature(
    "offload",
    shows_offload,
    dict(enable_prefix_caching=True, kv_offloading_size=0.02, num_gpu_blocks_override=FEW_BLOCKS),
)
OVERLAP = Feature("overlap", shows_overlap, dict(async_scheduling=True))
MULTI_STEP = Feature("multi-step", shows_multi_step, dict(num_scheduler_steps=4))
# the shortest prompts of the workload repeat themselves, and so do some answers
SPECULATION = Feature(
    "speculation",
    shows_drafts,
    dict(
        speculative_config={
            "prompt_lookup_min": 1,
            "num_speculative_tokens": 5,
            "adaptive": False,
        }
    ),
)
PRIORITY = Feature("priority", shows_priority, dict(scheduling_policy="priority", max_num_seqs=3))
PAUSE = Feature("pause", shows_pause, disturb=pause_and_resume)
TRACE = Feature("trace", shows_trace, traces=True)
BEAMS = Feature("beam search", shows_beams, searches_beams=True)
N = Feature("n", shows_n, change=with_n, relates=relates_n)
LOGPROBS = Feature(
    "logprobs",
    shows_logprobs,
    change=lambda params, i, _: replace(params, logprobs=3),
    relates=relates_as_equal,
)
PROMPT_LOGPROBS = Feature(
    "prompt logprobs",
    shows_prompt_logprobs,
    change=with_prompt_logprobs,
    relates=relates_as_equal,
)
PENALTIES = Feature(
    "penalties",
    shows_nothing,
    change=lambda params, i, _: replace(
        params, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.8
    ),
    relates=relates_as_different,
)
STRUCTURED = Feature(
    "structured output",
    shows_structure,
    dict(enable_jump_forward=True),
    change=with_structure,
    relates=relates_as_different,
)
QUANTIZED = Feature(
    "quantized",
    shows_nothing,
    dict(quantization="int4", kernels={} if library else {"pack_quantized_linear": "reference"}),
    relates=relates_as_different,
    changes_model=True,
)
# on native kernels the file's blocks are multiplied, elsewhere dequantized weights
GGUF = Feature(
    "GGUF",
    shows_nothing,
    dict(model=GGUF_MODEL, dtype="bfloat16" if library else "float32"),
    relates=relates_as_different,
    changes_model=True,
)
# the same weights in transformers' code: the outputs are those of Quire's own
FALLBACK = Feature(
    "transformers",
    shows_nothing,
    dict(model_impl="transformers"),
    relates=relates_as_equal,
    changes_model=True,
)
LORA = Feature(
    "LoRA", shows_loras, dict(OF_LORAS), relates=relates_as_different, changes_model=True
)
# checkpoints at the end of every block: the prompts of the workload are short
HYBRID = Feature(
    "hybrid",
    shows_states,
    dict(model=HYBRID_MODEL, state_checkpoint_interval=BLOCK_SIZE),
    relates=relates_as_different,
    changes_model=True,
)
KIMI = Feature(
    "Kimi Linear",
    shows_states,
    dict(model=KIMI_MODEL, state_checkpoint_interval=BLOCK_SIZE),
    relates=relates_as_different,
    changes_model=True,
)
STOP = Feature("stop", shows_stop, change=with_stop, relates=relates_stop)

FEATURES = (
    CHUNKED_PREFILL,
    PREFIX_CACHE,
    RECOMPUTE,
    SWAP,
    OFFLOAD,
    N,
    BEAMS,
    LOGPROBS,
    PROMPT_LOGPROBS,
    PENALTIES,
    STRUCTURED,
    STOP,
    OVERLAP,
    MULTI_STEP,
    SPECULATION,
    PAUSE,
    TRACE,
    PRIORITY,
    QUANTIZED,
    GGUF,
    FALLBACK,
    LORA,
    HYBRID,
    KIMI,
)
