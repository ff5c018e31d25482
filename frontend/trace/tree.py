"""A trace as a tree for the terminal: a stage per branch, a kernel per line.

Must not know: where a trace comes from.
"""

from __future__ import annotations

import io
import statistics
from collections import Counter

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ...ipc.trace import EngineTrace, Hop, RankTrace, Row, Span, StepTrace
from .fold import FoldedKernel, dominating, fold
from .recorded import Received, RecordedTrace

# these run once per message of the engine, and the other stages once per request
OF_EACH_STEP = ("LLMEngine.step", "AsyncLLM._read_outputs")
OF_OUTPUTS = ("OutputProcessor.process_outputs", "IncrementalDetokenizer.update")
REASONS = {
    "budget": "the step's token budget is spent",
    "blocks": "too few KV-cache blocks are free for its whole prompt",
    "slots": "max_num_seqs requests run",
    "preemption": "this step preempted a request",
    "order": "the request before it waits",
    "sibling": "its prompt is computed for another completion",
    "pause": "the engine is paused",
    "grammar": "its grammar is being compiled",
}
WIDE = 160  # columns of a terminal that has room for all of a table
# (heading, whether it is left out of a narrow table)
COLUMNS = (
    ("kernel", False),
    ("shape", False),
    ("line", True),
    ("calls", False),
    ("min", True),
    ("median", False),
    ("max µs", True),
    ("share", False),
    ("rate", False),
    ("of the limit", False),
)
LEFT = "kernel", "shape", "line"


def render(tree: RenderableType, width: int) -> str:
    """Prints `tree` in lines of at most `width` columns, without colours."""
    out = io.StringIO()
    plain = Console(file=out, width=width, color_system=None, markup=False, highlight=False)
    plain.print(tree)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def tree_of(trace: RecordedTrace, width: int) -> Tree:
    """Makes the tree for a terminal of `width` columns. A narrow one shows fewer figures."""
    engine, places = trace.recorded, trace.places | trace.recorded.places
    root = Tree(_heading(engine))
    for name in trace.places:
        if name not in OF_OUTPUTS:
            each = "once per message of the engine, below" if name in OF_EACH_STEP else ""
            root.add(_stage(name, places, each))
    for hop in engine.hops:
        if hop.request_id:
            root.add(_hop(hop))
    left = list(trace.received)
    for step in engine.steps:
        end_s = step.execute_begin_s + step.execute_s
        taken = next((one for one in left if one.received_s >= end_s), None)
        if taken is not None:
            left.remove(taken)
        root.add(_step(step, engine, places, taken, width >= WIDE))
    if not engine.steps:
        root.add("no step was made while the trace was recorded")
    return root


def _heading(engine: EngineTrace) -> Text:
    limits = engine.limits
    rates = (
        f"; this machine reads {limits.bytes_per_s / 1e9:.1f} GB/s and multiplies "
        f"{limits.flops / 1e9:.0f} GFLOP/s"
        if limits.flops
        else ""
    )
    notes = "".join(f"; {note}" for note in engine.notes)
    name = engine.model.rstrip("/").rpartition("/")[2]
    return Text(
        f"trace of {name}, {engine.dtype} on {engine.device} ({engine.implementation})"
        f"{rates}{notes}"
    )


def _stage(name: str, places: dict[str, str], more: str = "") -> Text:
    text = Text(name, style="bold")
    if place := places.get(name):
        text.append(f"  {place}", style="dim")
    if more:
        text.append(f"  {more}", style="not bold")
    return text


def _step(
    step: StepTrace,
    engine: EngineTrace,
    places: dict[str, str],
    taken: Received | None,
    is_wide: bool,
) -> Tree:
    num_tokens = sum(row.num_tokens for row in step.rows)
    total_s = step.schedule_s + step.execute_s + step.process_s
    tree = Tree(
        Text(
            f"step {step.step}: {num_tokens} tokens of {_count(len(step.rows), 'request')} "
            f"computed, {step.num_tokens} sampled, {_ms(total_s)}",
            style="bold",
        )
    )
    core = next(
        (name for name in places if name.startswith("EngineCore._step")), "EngineCore._step"
    )
    branch = tree.add(_stage(core, places))
    branch.add(_schedule(step, places))
    for rank in step.ranks:
        branch.add(_execute(rank, step, engine, places, is_wide))
    ended = f", finished: {', '.join(step.finished)}" if step.finished else ""
    branch.add(_stage("Scheduler.update_from_output", places, _ms(step.process_s) + ended))
    if taken is not None:
        for hop in engine.hops:
            if not hop.request_id and hop.taken_s == taken.received_s:
                tree.add(_hop(hop))
        outputs = tree.add(
            _stage("OutputProcessor.process_outputs", places, f"{_ms(taken.seconds)}")
        )
        texts = ", ".join(f"{name}: {text!r}" for name, text in taken.texts.items())
        outputs.add(
            _stage("IncrementalDetokenizer.update", places, f"{taken.num_tokens} tokens → {texts}")
        )
    return tree


def _hop(hop: Hop) -> Text:
    """Shows the parts of a message's way between the frontend and the engine's process."""
    encoded_s = hop.encode_begin_s + hop.encode_s
    decoded_s = hop.decode_begin_s + hop.decode_s
    parts = [
        ("waited", hop.encode_begin_s - hop.handed_s),
        ("serialised", hop.encode_s),
        ("socket", hop.decode_begin_s - encoded_s),
        ("deserialised", hop.decode_s),
    ]
    end_s = decoded_s
    if hop.taken_s:
        parts.append(("taken after", hop.taken_s - decoded_s))
        end_s = hop.taken_s
    what = (
        f"request {hop.request_id} to the engine" if hop.request_id else "outputs to the frontend"
    )
    text = Text(f"hop of {what}", style="bold")
    figures = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in parts)
    text.append(f"  {_ms(end_s - hop.handed_s)}: {figures}; {hop.num_bytes} bytes", "not bold")
    return text


def _schedule(step: StepTrace, places: dict[str, str]) -> Tree:
    used = sum(row.num_tokens for row in step.rows)
    tree = Tree(
        _stage(
            "Scheduler.schedule",
            places,
            f"{_ms(step.schedule_s)}; {used} of the budget of {step.budget} tokens",
        )
    )
    for row in step.rows:
        tree.add(_row(row))
    for waiting in step.waiting:
        tree.add(
            f"request {waiting.request_id} waits, {waiting.num_tokens} tokens, priority "
            f"{waiting.priority}: {REASONS[waiting.reason]}"
        )
    for request_id in step.preempted:
        tree.add(f"request {request_id} is preempted: the requests before it need its blocks")
    before, after, end = (*step.num_free_blocks, 0, 0, 0)[:3]
    cached = sum(row.num_cached_tokens for row in step.rows)
    tree.add(
        f"KV-cache blocks: {before - after} taken, {end - after} freed at the end, {end} free; "
        f"{cached} tokens from the prefix cache"
    )
    return tree


def _row(row: Row) -> str:
    end = row.num_computed_tokens + row.num_tokens
    what = "decodes" if row.num_tokens == 1 and row.num_computed_tokens else "computes its prompt"
    most, count = row.num_lookahead_tokens, row.num_ahead
    ahead = f" and {count} more" if most else ""
    if count < most:
        ahead = f" and {count} of at most {most} more"
    new = ", admitted" if row.is_new else ""
    return (
        f"request {row.request_id} {what}: token {row.num_computed_tokens} to {end - 1} of "
        f"{row.num_known_tokens} known{ahead}{new}; {row.num_blocks} new blocks, "
        f"{row.num_cached_tokens} tokens cached"
    )


def _execute(
    rank: RankTrace,
    step: StepTrace,
    engine: EngineTrace,
    places: dict[str, str],
    is_wide: bool,
) -> Tree:
    names = [name for name in places if name.endswith(".execute_model")]
    tree = Tree(_stage(names[0] if names else "execute_model", places, _ms(step.execute_s)))
    for name in names[1:]:
        tree.add(_stage(name, places))
    spans = {span.name: span for span in rank.spans}
    inputs = _span(spans["inputs"]) if "inputs" in spans else Text("inputs")
    shapes = ", ".join(f"{one.name} {one.shape} {one.dtype}" for one in rank.inputs)
    tree.add(inputs.append(f"  {shapes}", style="not bold"))
    kernels = fold(rank.kernels, engine.limits)
    of_model = [entry for entry in kernels if entry.module != "sampler"]
    of_sampler = [entry for entry in kernels if entry.module == "sampler"]
    kernel_s = sum(entry.total_s for entry in kernels)
    share = kernel_s / rank.seconds if rank.seconds else 0.0
    summary = f"{_ms(kernel_s)} in kernels, {share:.0%} of execute_model"
    where = f"  {spans['model'].place}" if "model" in spans else ""
    heading = Text(f"model {engine.model_class}", style="bold")
    heading.append(where, style="dim")
    heading.append(f"  {summary}", style="not bold")
    if usual := usual_implementation(of_model):
        heading.append(f"; {usual} unless a line names another", style="not bold")
    tree.add(Group(heading, _table(of_model, rank.seconds, is_wide)))
    if rank.experts:
        tree.add(experts_line(rank.experts))
    sampler = spans.get("sampler")
    if sampler is not None:
        label = _span(sampler)
        tree.add(Group(label, _table(of_sampler, rank.seconds, is_wide)) if of_sampler else label)
    if (most := dominating(kernels)) is not None:
        tree.add(Text(sentence(most, rank.seconds), style="bold"))
    return tree


def experts_line(experts: dict[int, list[int]]) -> str:
    """Counts the rows that the experts of all layers computed; imbalance is the most over the
    mean.
    """
    rows = sorted(count for of_layer in experts.values() for count in of_layer)
    read = [len(of_layer) - of_layer.count(0) for of_layer in experts.values()]
    uneven = [max(each) * len(each) / (sum(each) or 1) for each in experts.values()]
    per_layer = max(map(len, experts.values()))
    return (
        f"experts of {_count(len(experts), 'layer')}: {rows[0]} to {rows[-1]} rows each, median "
        f"{statistics.median(rows):g}; {min(read)} to {max(read)} of {per_layer} read per layer; "
        f"imbalance {min(uneven):.1f} to {max(uneven):.1f}, median {statistics.median(uneven):.1f}"
    )


def _span(span: Span) -> Text:
    return _stage(span.name, {span.name: span.place}, _ms(span.seconds))


def sentence(most: FoldedKernel, execute_s: float) -> str:
    """Says which kernel dominates, and how far it is from the limit."""
    share = most.total_s / execute_s if execute_s else 0.0
    return (
        f"most time: {most.module or most.op} ({most.op}), {share:.0%} of execute_model, at "
        f"{most.fraction:.0%} of the limit that {LIMITS[most.bound]} sets"
    )


LIMITS = {"memory": "memory bandwidth", "arithmetic": "arithmetic"}


def _table(kernels: list[FoldedKernel], execute_s: float, is_wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [is_wide or not is_extra for _, is_extra in COLUMNS]
    for column, is_shown in zip((name for name, _ in COLUMNS), shown):
        if is_shown:
            side = "left" if column in LEFT else "right"
            table.add_column(column, justify=side, no_wrap=column not in LEFT, overflow="fold")
    usual = usual_implementation(kernels)
    for entry in kernels:
        other = "" if entry.implementation == usual else f", {entry.implementation}"
        cells = (
            f"{entry.module or 'step'} → {entry.op}{other}",
            f"{entry.shape} {entry.dtype}",
            entry.place.rpartition("/")[2],
            str(entry.count),
            f"{1e6 * min(entry.seconds):.1f}",
            f"{1e6 * entry.median_s:.1f}",
            f"{1e6 * max(entry.seconds):.1f}",
            f"{entry.total_s / execute_s:.1%}" if execute_s else "",
            rate(entry),
            f"{entry.fraction:.0%} {entry.bound}" if entry.num_bytes or entry.flops else "",
        )
        table.add_row(*(cell for cell, is_shown in zip(cells, shown) if is_shown))
    return table


def usual_implementation(kernels: list[FoldedKernel]) -> str:
    """Returns the implementation that most entries have."""
    names = Counter(entry.implementation for entry in kernels)
    return names.most_common(1)[0][0] if names else ""


def rate(entry: FoldedKernel) -> str:
    if entry.bound == "arithmetic":
        return f"{entry.flops_per_s / 1e9:.1f} GFLOP/s"
    return f"{entry.bytes_per_s / 1e9:.1f} GB/s" if entry.num_bytes else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
