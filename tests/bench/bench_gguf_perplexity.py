"""Perplexity of a GGUF file in Quire and in llama.cpp, on the same text, cut in the same way.

    python tests/bench/bench_gguf_perplexity.py FILE.gguf [--llama-perplexity PATH] [--write]

The text is that of Python's help topics, 100 KB of English. As llama-perplexity does, it is cut
into windows of 512 tokens and the second half of each window is scored. Quire multiplies the
file's blocks in bfloat16 and the dequantized weights in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.tests.bench.report import hardware, write_result

WINDOW = 512
NUM_BYTES = 100_000


def text() -> str:
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))[:NUM_BYTES]


def in_quire(file: str, dtype: str, threads: int) -> float:
    with LLM(file, dtype=dtype, max_model_len=WINDOW + 1, num_threads=threads) as llm:
        tokenizer = llm.get_tokenizer()
        ids = list(tokenizer.encode(text()))
        windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
        if ids[0] == tokenizer.bos_token_id:
            windows = [ids[:1] + window[1:] for window in windows]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": window} for window in windows]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    losses = []
    for window, output in zip(windows, outputs, strict=True):
        scored = zip(window, output.prompt_logprobs, strict=True)
        losses += [-of[token].logprob for token, of in list(scored)[WINDOW // 2 + 1 :]]
    return math.exp(sum(losses) / len(losses))


def in_llama_cpp(program: str, file: str, threads: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
        f.write(text())
        f.flush()
        command = [program, "-m", file, "-f", f.name, "-c", str(WINDOW), "-t", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = re.findall(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    return float(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--llama-perplexity", help="llama.cpp's llama-perplexity program")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")
    args = parser.parse_args()
    numbers: dict[str, Any] = {"file": Path(args.file).name}
    numbers["float32"] = in_quire(args.file, "float32", args.threads)
    numbers["blocks"] = in_quire(args.file, "bfloat16", args.threads)
    numbers["blocks / float32"] = numbers["blocks"] / numbers["float32"]
    if args.llama_perplexity:
        numbers["llama.cpp"] = in_llama_cpp(args.llama_perplexity, args.file, args.threads)
    print(json.dumps(numbers, indent=1))
    if args.write:
        print(hardware(), write_result(Path(args.file).stem, "gguf-perplexity", numbers))


if __name__ == "__main__":
    main()
