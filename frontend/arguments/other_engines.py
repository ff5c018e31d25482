"""Flags and commands of llama.cpp, Ollama and vLLM that Quire does not have, and what to use.

Must not know: argparse, which command has which flag.
"""

from __future__ import annotations


def _by_flag(flags_of: dict[str, str]) -> dict[str, str]:
    return {flag: instead for instead, flags in flags_of.items() for flag in flags.split()}


# A flag maps to Quire's flag, or to a sentence where Quire has none.
FLAGS = _by_flag(
    {
        "--num-threads": "-t --threads -tb --threads-batch",
        "--max-model-len": "-c --ctx-size --num-ctx",
        "--device": "-ngl --gpu-layers --n-gpu-layers -dev",
        "--max-num-seqs": "-np --parallel",
        "--max-num-batched-tokens": "-b --batch-size -ub",
        "--max-tokens": "-n --predict --n-predict --num-predict",
        "--file": "-f",
        "--seed": "-s",
        "--temperature": "--temp",
        "--repetition-penalty": "--repeat-penalty",
        "--presence-penalty": "--presence-pen",
        "--frequency-penalty": "--frequency-pen",
        "--stop": "-r --reverse-prompt",
        "--structured-outputs": "-j --json-schema --grammar --grammar-file --format",
        "--system": "-sys --system-prompt",
        "--kv-cache-dtype": "-ctk --cache-type-k -ctv --cache-type-v",
        "--served-model-name": "-a --alias",
        "--speculative-config": "-md --model-draft",
        "--tensor-parallel-size": "-sm --split-mode -ts --tensor-split",
        "--keep-alive": "--keepalive",
        "the model is an argument without a flag: a file, a directory, or org/name:Q4_K_M of the "
        "hub": "-m -hf -hfr --hf-repo -mu --model-url",
        "a prompt is an argument of quire generate, without a flag": "-p --prompt",
        "quire chat is a conversation": "-cnv --conversation -i --interactive",
        "it is always on": "-fa --flash-attn -cb --cont-batching --jinja",
        "weights are always mapped from their files": "--mlock --mmap --no-mmap",
    }
)
# A command maps to Quire's.
COMMANDS = {
    "run": "quire chat MODEL, or quire generate PROMPT --model MODEL",
    "list": "quire models",
    "ls": "quire models",
    "ps": "quire top URL",
    "rm": "quire models remove MODEL",
    "show": "quire models show MODEL",
    "start": "quire serve MODEL",
    "stop": "Ctrl-C or SIGTERM",
    "complete": "quire generate PROMPT",
    "run-batch": "quire batch FILE",
    "collect-env": "quire doctor",
}
