"""How often the batch around a request changes its tokens in bf16, and which of torch's kernels do
it. In fp32 the tests show that it never does.

    python tests/bench/bench_bf16_invariance.py [--requests 64] [--max-tokens 48] [--write]

First each linear layer of the model: the rows of one call with M of them against the same rows one
call each, bit by bit. Then requests: alone against all at once, greedy and sampled (temperature
0.8, seeded). "alone: linears" computes every linear layer one row at a time, "alone: attention"
every decoding request in a call of its own, whatever the batch: what still differs then is not
their doing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import contextmanager

import torch
from quire import LLM, SamplingParams
from quire.executor.models import layers
from quire.frontend.model_info.model_files import find_model_directory
from quire.kernels.cpu import attention
from quire.kernels.cpu.linear import pack_linear
from quire.tests.bench.report import hardware, write_result
from safetensors.torch import load_file

BATCH_SIZES = (2, 4, 8, 16, 32, 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def by_row(
    multiply: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.cat([multiply(row) for row in x.split(1)])


# ---------------------------------------------------------------- linear layers


def model_linears() -> dict[str, torch.Tensor]:
    """Name -> weight [out, in] of the first layer's projections as the engine merges them, and of
    the head.
    """
    weights = load_file(find_model_directory("bundled") / "model.safetensors")
    layer = "model.layers.0."
    return {
        "qkv_proj": torch.cat([weights[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]),
        "o_proj": weights[f"{layer}self_attn.o_proj.weight"],
        "gate_up_proj": torch.cat(
            [weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        ),
        "down_proj": weights[f"{layer}mlp.down_proj.weight"],
        "lm_head": weights["model.embed_tokens.weight"],
    }


def changed_rows(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Share of the rows of x [M, in] whose result is not the same bits when they are multiplied
    alone.
    """
    return (multiply(x) != by_row(multiply)(x)).any(-1).double().mean().item()


def measure_linears() -> dict[str, dict[str, dict[int, float]]]:
    found: dict[str, dict[str, dict[int, float]]] = {dtype: {} for dtype in DTYPES}
    for name, weight in model_linears().items():
        x = torch.randn(
            max(BATCH_SIZES), weight.shape[1], generator=torch.Generator().manual_seed(0)
        )
        for dtype_name, dtype in DTYPES.items():
            multiply = pack_linear(weight.to(dtype), None)
            label = f"{name} {weight.shape[1]}->{weight.shape[0]}"
            found[dtype_name][label] = {
                m: changed_rows(multiply, x[:m].to(dtype)) for m in BATCH_SIZES
            }
            print(
                f"{dtype_name:9} {label:24}"
                + "".join(
                    f"  M={m}: {share:4.0%}" for m, share in found[dtype_name][label].items()
                ),
                flush=True,
            )
    return found


# ---------------------------------------------------------------- requests


@contextmanager
def computed_alone(parts: tuple[str, ...]):
    """Models that are loaded and run in here compute these parts ("linears", "attention") for each
    request on its own.
    """
    saved = layers.Linear.pack, attention.group_by_length

    def pack_by_row(linear: layers.Linear) -> None:
        saved[0](linear)
        linear._multiply = by_row(linear._multiply)

    if "linears" in parts:
        layers.Linear.pack = pack_by_row
    if "attention" in parts:
        attention.group_by_length = lambda lengths, *limits: [[row] for row in range(len(lengths))]
    try:
        yield
    finally:
        layers.Linear.pack, attention.group_by_length = saved


def make_prompts(count: int) -> list[list[int]]:
    """Beginnings of stories of different lengths, by the model itself."""
    with LLM(engine="inproc", dtype="float32", num_threads=1) as llm:
        params = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=8 + i % 57, ignore_eos=True)
            for i in range(count)
        ]
        outputs = llm.generate(["Once upon a time"] * count, params, use_tqdm=False)
        return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def measure_requests(
    prompts: list[list[int]],
    dtype: str,
    parts: tuple[str, ...],
    temperature: float,
    max_tokens: int,
) -> dict:
    params = [
        SamplingParams(
            temperature=temperature, seed=1000 + i, max_tokens=max_tokens, ignore_eos=True
        )
        for i in range(len(prompts))
    ]

    def tokens(outputs: list) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in outputs]

    settings = dict(
        dtype=dtype,
        num_threads=1,
        cpu_isa="none",
        enable_prefix_caching=False,
        max_num_seqs=len(prompts),
    )
    with computed_alone(parts), LLM(engine="inproc", **settings) as llm:
        together = tokens(llm.generate(prompts, params, use_tqdm=False))
        alone = [
            tokens(llm.generate([prompt], [p], use_tqdm=False))[0]
            for prompt, p in zip(prompts, params)
        ]
    firsts = sorted(
        next(i for i, (a, b) in enumerate(zip(x, y)) if a != b)
        for x, y in zip(alone, together)
        if x != y
    )
    where = (
        f", first difference at token {firsts[0]} to {firsts[-1]}, median "
        f"{firsts[len(firsts) // 2]}"
        if firsts
        else ""
    )
    label = f"{dtype:9} alone: {' and '.join(parts) or 'nothing':22} temperature {temperature}"
    print(f"{label}: {len(firsts)} of {len(prompts)} requests change{where}", flush=True)
    return dict(
        dtype=dtype,
        alone=parts,
        temperature=temperature,
        max_tokens=max_tokens,
        requests=len(prompts),
        first_differences=firsts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        linears = measure_linears()
    prompts = make_prompts(args.requests)
    cases = [
        ("float32", ()),
        ("bfloat16", ()),
        ("bfloat16", ("linears",)),
        ("bfloat16", ("attention",)),
        ("bfloat16", ("linears", "attention")),
    ]
    requests = [
        measure_requests(prompts, *case, temperature, args.max_tokens)
        for case in cases
        for temperature in (0.0, 0.8)
    ]
    print(hardware())
    if args.write:
        print(
            write_result(
                "bundled",
                f"bf16-invariance-{args.requests}",
                {"rows_changed": linears, "requests": requests},
            )
        )


if __name__ == "__main__":
    main()
