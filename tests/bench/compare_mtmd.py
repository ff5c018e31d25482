"""Greedy tokens of Quire and of llama.cpp's llama-server for prompts with an image, from the same
two GGUF files of tiny random models.

    python tests/bench/compare_mtmd.py --llama-bin DIRECTORY --llama-cpp SOURCES [--kinds KIND …]
    [--models DIRECTORY]

Every kind of tests/bench/seeing_gguf.py is made once in --models and kept there. Both engines
compute in fp32. A row has the kind, the image's width and height, the tokens of each engine's
prompt, how many of the written tokens are equal before the first that is not, and the largest
difference of their log-probabilities. Where llama.cpp gives an image other sides than transformers,
or pads it, the tokens differ.
"""

from __future__ import annotations

import argparse
import base64
import io
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from quire import LLM, SamplingParams
from quire.tests.bench.seeing_gguf import KINDS, convert, save
from quire.tests.bench.servers import free_port, post_together, wait_until_ready

TINY = tuple(kind for kind in KINDS if kind not in ("siglip_400m", "qwen3_vl_2b"))
MARKER = "<__media__>"
QUESTION = "What is this?"
NUM_TOKENS = 16
# what Quire writes around an image as transformers does, and llama.cpp leaves to the template
AROUND = {"gemma3": "\n\n"}


class Answer(NamedTuple):
    num_prompt_tokens: int
    tokens: list[int]
    logprobs: list[float | None]


def picture(width: int, height: int) -> Image.Image:
    """Noise of a few pixels each, which resizing leaves visible."""
    noise = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


class LlamaServer:
    """llama-server with a model and its encoder."""

    def __init__(self, folder: Path, text: Path, mmproj: Path, *flags: str, threads: int = 2):
        self.port = free_port()
        command = [str(folder / "llama-server"), "-m", str(text), "--mmproj", str(mmproj)]
        command += ["-t", str(threads), "-tb", str(threads), "-np", "1", "--no-warmup"]
        command += ["--port", str(self.port), *flags]
        environment = {"LD_LIBRARY_PATH": str(folder), "LLAMA_MEDIA_MARKER": MARKER}
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until_ready(self.port, self.process, "/health")

    def complete(self, prompt: str, image: Image.Image, **options: Any) -> dict[str, Any]:
        file = io.BytesIO()
        image.save(file, "png")
        data = base64.b64encode(file.getvalue()).decode()
        body = {"prompt": {"prompt_string": prompt, "multimodal_data": [data]}, **options}
        [answer] = post_together(self.port, "/completion", [body])
        return answer

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def llama_answer(server: LlamaServer, kind: str, image: Image.Image) -> Answer:
    around = AROUND.get(kind, "")
    answer = server.complete(
        f"{around}{MARKER}{around}{QUESTION}",
        image,
        n_predict=NUM_TOKENS,
        temperature=0,
        n_probs=1,
        ignore_eos=True,
        cache_prompt=False,
        return_tokens=True,
    )
    # it leaves out tokens that end within a character
    logprobs, given = [], answer.get("completion_probabilities", [])
    for token in answer["tokens"]:
        is_next = bool(given) and given[0]["id"] == token
        logprobs.append(given.pop(0)["logprob"] if is_next else None)
    return Answer(answer["tokens_evaluated"], answer["tokens"], logprobs)


def quire_answer(llm: LLM, kind: str, image: Image.Image) -> Answer:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=1, ignore_eos=True)
    prompt = {
        "prompt": KINDS[kind].written + QUESTION,
        "multi_modal_data": {"image": image},
    }
    [output] = llm.generate(prompt, params, use_tqdm=False)
    [written] = output.outputs
    logprobs = [of[token].logprob for of, token in zip(written.logprobs, written.token_ids)]
    return Answer(len(output.prompt_token_ids), list(written.token_ids), logprobs)


def compare(kind: str, folder: Path, text: Path, mmproj: Path) -> None:
    flags = "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-c", "2048"
    if kind == "gemma4":  # transformers scales every image to as many tokens
        flags += "--image-min-tokens", "280", "--image-max-tokens", "280"
    # transformers' least area, which mmproj files do not have, is larger than the tiny images
    kwargs = {"min_pixels": 512} if kind.startswith("qwen") else {}
    server = LlamaServer(folder, text, mmproj, *flags)
    try:
        with LLM(str(text), dtype="float32", max_model_len=1024, mm_processor_kwargs=kwargs) as llm:
            for width, height in KINDS[kind].sizes:
                image = picture(width, height)
                other, mine = llama_answer(server, kind, image), quire_answer(llm, kind, image)
                pairs = list(zip(other.tokens, mine.tokens))
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                both = zip(other.logprobs[:same], mine.logprobs)
                off = [abs(a - b) for a, b in both if a is not None]
                print(
                    f"{kind:12} {width:4} x {height:<4} {mine.num_prompt_tokens:4} and "
                    f"{other.num_prompt_tokens:4} tokens, {same:2} of {len(pairs)} equal, "
                    f"log-probabilities differ by "
                    f"{max(off, default=math.nan):.5f}",
                    flush=True,
                )
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-bin", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's sources")
    parser.add_argument("--kinds", nargs="*", choices=TINY, default=TINY)
    parser.add_argument("--models", type=Path)
    args = parser.parse_args()
    models = args.models or Path(tempfile.mkdtemp())
    for kind in args.kinds:
        directory = models / kind
        files = directory / "f32" / "model.gguf", directory / "f32" / "mmproj-model.gguf"
        if not all(path.exists() for path in files):
            save(kind, directory)
            files = convert(directory, args.llama_cpp)
        try:
            compare(kind, args.llama_bin, *files)
        except (Exception, SystemExit) as error:
            print(f"{kind:12} {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
