"""`quire plan`: what a model needs, what this machine or a given amount of memory provides, and the
flags that make the model fit.

Must not know: how the figures are computed, torch.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.errors import NotEnoughMemoryError, QuireError
from ..arguments.quantities import format_bytes, format_count, parse_bytes
from .flags import ENGINE, engine_flags, given, server_flags
from .parser import Parser
from .sources import naming_sources

if TYPE_CHECKING:
    from ..engine_args import EngineArgs
    from ..model_info.plan import Plan

USAGE = "[MODEL] [--memory SIZE] [--json] [engine flags]"
DESCRIPTION = (
    "Reads MODEL's config.json and prints the size of its weights, the longest context and the "
    "number of concurrent requests. Nothing is loaded."
)
COMMON = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "block_size",
    "data_parallel_size",
)


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("plan", USAGE, DESCRIPTION, argv)
    parser.add_model()
    parser.add(
        "--memory",
        "SIZE",
        "plan for this much memory, e.g. 24GiB; with --device cuda: the memory of the GPU [that of "
        "this machine]",
        type=_size,
    )
    parser.add.switch("--json", "the figures as one JSON object, in bytes and tokens")
    parser.add_flags("engine", engine_flags(without=("model",)), COMMON)
    parser.add_flags(
        "server (no effect here; accepted so that its settings can be passed unchanged)",
        [*server_flags(), ENGINE],
        (),
    )
    return parser


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    from ..engine_args import EngineArgs
    from ..model_info.plan import check_cache, make_plan

    arguments = given(args, engine_flags())
    with naming_sources(args.settings):
        engine_args = EngineArgs(**arguments)
        plan = make_plan(engine_args, args.memory, arguments)
        if exceeds := check_cache(engine_args, plan):
            print(f"quire plan: {exceeds}", file=sys.stderr)
    if args.json:
        names = ("fits", "least_memory_bytes", "least_kv_cache_bytes")
        derived = {name: getattr(plan, name) for name in names}
        figures = msgspec.structs.asdict(plan) | derived | {"command": command(plan)}
        print(msgspec.json.encode(figures).decode())
    else:
        print(render(plan), end="")
    return 0 if plan.longest_context or plan.fits_as else 1


def render(plan: Plan) -> str:
    """Returns the plan as lines of text."""
    on_gpus = plan.device == "cuda" and plan.num_ranks > 1
    of_each = f" on each of {plan.num_ranks} GPUs" if on_gpus else ""
    context = "no context length in config.json"
    if plan.model_context:
        context = f"context {plan.model_context:,} tokens"
    lines = [
        f"{plan.model}: {plan.architecture}, {format_count(plan.num_parameters)} parameters, "
        f"{context}",
        "",
        *(
            f"{name:<44} {format_bytes(size):>10}   {note}".rstrip()
            for name, size, note in _memory(plan)
        ),
        "",
    ]
    if not plan.longest_context:
        lines.append(
            f"It does not fit: max_model_len={plan.max_model_len:,} needs at least "
            f"{format_bytes(plan.least_memory_bytes)}{of_each}."
        )
        if plan.fits_as:
            lines += [f"As {plan.fits_as} it does:", "", command(plan)]
        return "\n".join([*lines, ""])
    lines.append(f"{'longest context':<44} {plan.longest_context:>10,}   tokens")
    if plan.longest_context < plan.max_model_len:
        lines[-1] += (
            f"; max_model_len={plan.max_model_len:,} needs a KV cache of "
            f"{format_bytes(plan.least_kv_cache_bytes)}, "
            f"{format_bytes(plan.least_memory_bytes)} in total{of_each}"
        )
    lines += [
        f"{f'requests of {length:,} tokens at once':<44} {number * plan.num_engines:>10,}"
        for length, number in plan.concurrency.items()
    ]
    return "\n".join([*lines, "", command(plan), ""])


def _memory(plan: Plan) -> list[tuple[str, int, str]]:
    """Returns (name, bytes, note) of the memory, of each of its uses, and of the rest."""
    others = ", ".join(
        f"{name}: {format_bytes(size)}"
        for name, size in plan.weights_bytes_by_dtype.items()
        if name != plan.weights_kind
    )
    if plan.mapped_bytes:
        others = f"{format_bytes(plan.mapped_bytes)} more are read from the file; {others}"
    room = plan.kv_cache_bytes or plan.longest_kv_cache_bytes
    per_token = f"{format_bytes(plan.kv_bytes_per_token)} per token"
    if plan.num_window_layers:
        per_token += f"; {plan.num_window_layers} of {plan.num_layers} layers keep a window of them"
    if plan.num_ranks > 1:
        of_rank = format_bytes((plan.weights_bytes + room) // plan.num_ranks)
        per_token += f"; {plan.num_ranks} ranks, each with {of_rank} of weights and cache"
    weights = (f"  weights, {plan.weights_kind}", plan.weights_bytes, others)
    if plan.device == "cuda":
        memory, free, left = "the GPU's memory", "", "  left"
        if plan.num_ranks > 1:
            memory = f"the memory of {plan.num_ranks} GPUs"
        share = f"gpu_memory_utilization={plan.memory_share}"
        runtime = [("  CUDA itself, an estimate", plan.runtime_bytes, "")]
        measured = "the engine measures it when it starts"
        uses = [
            ("  in use or left to others", plan.withheld_bytes, share),
            weights,
            *(runtime if plan.runtime_bytes else []),
            ("  activations and graphs, an estimate", plan.step_bytes, measured),
        ]
    else:
        memory, free = "memory", " that is free here"
        left = "  left for activations, swap space and others"
        uses = [weights, ("  engine and frontend", plan.runtime_bytes, "")]
        if (others := plan.num_engines - 1) > 0:
            note = f"{others} more engine{'s' * (others > 1)} with weights of their own"
            if plan.divides_experts:
                note += f", 1/{plan.num_engines} of the experts in each"
            uses[1] = ("  engines and frontend", plan.runtime_bytes, note)
            per_token = f"{format_bytes(room)} for each engine, {per_token}"
            room *= plan.num_engines
    if plan.images_bytes:
        note = "encoder_cache_tokens sets how many"
        uses.append(("  rows of encoded images", plan.images_bytes, note))
    states = _states(plan)
    rest = plan.free_bytes - room - sum(size for _, size, _ in states)
    return [
        (memory + (", as named" if plan.memory_is_named else free), plan.memory_bytes, ""),
        *uses,
        ("  KV cache", room, per_token),
        *states,
        (left if rest >= 0 else "  missing", abs(rest), ""),
    ]


def command(plan: Plan) -> str:
    """Returns the command line that makes the model fit, or "" if there is none."""
    is_possible = plan.longest_context or plan.fits_as
    return shlex.join(["quire", "serve", plan.model, *plan.flags]) if is_possible else ""


@contextlib.contextmanager
def plan_beneath(args: EngineArgs, arguments: dict[str, Any]) -> Iterator[None]:
    """If the engine does not fit into memory, adds the plan to its error as a note, which the
    command line prints after the error. If the given size of the cache is refused, the error alone
    suffices.
    """
    try:
        yield
    except NotEnoughMemoryError as error:
        from ..model_info.plan import check_cache, make_plan

        with contextlib.suppress(QuireError):  # a model known to a plug-in only has no plan
            plan = make_plan(args, given=arguments)
            check_cache(args, plan)
            error.add_note(render(plan).rstrip())
        raise


def _states(plan: Plan) -> list[tuple[str, int, str]]:
    """Returns the lines of _memory for a model that keeps states of requests."""
    if (states := plan.states) is None:
        return []
    number, count = plan.num_engines * states.num_requests, states.num_checkpoints
    of_one = plan.num_ranks * states.bytes_of_one
    return [
        (f"  states of {number:,} requests", number * of_one, f"{format_bytes(of_one)} each"),
        (
            "  checkpoints of states",
            plan.num_engines * count * of_one,
            f"at most, {count:,} of them (state_cache_memory_bytes)",
        ),
    ]
