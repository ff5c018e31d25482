"""Trains the bundled model from nothing but its own generator: tokenizer, weights, export; one
command, one seed.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import data
import documents
import export
import tool_data
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / "frontend" / "bundled_model"
# share of the given (unasked) tokens whose loss is computed; the output layer is a third of the
# work
CONTEXT_KEPT = 0.2
# of the short documents, beside those that the mixture holds anyway: sums take the longest to learn
SUMS_SHARE = 0.35


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages",
        default="128x20x500,256x12x300,512x8x400,1024x4x300,2048x2x1100",
        help="context x rows x steps, ...",
    )
    parser.add_argument(
        "--drill-steps", type=int, default=500, help="the first steps, which hold drills only"
    )
    parser.add_argument("--drill-share", type=float, default=0.1, help="of the rows after that")
    parser.add_argument(
        "--decay-steps",
        type=int,
        default=700,
        help="the last steps, in which the learning rate falls to zero",
    )
    parser.add_argument(
        "--matrix-lr", type=float, default=2e-3, help="Muon, for the hidden matrices"
    )
    parser.add_argument(
        "--vector-lr", type=float, default=3e-3, help="AdamW, for embedding, biases and norms"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--checkpoint", type=Path, default=Path("bundled_model_checkpoint.pt"))
    parser.add_argument(
        "--init-from",
        type=Path,
        help="tune the model of this folder for tools, for --tuning-steps steps",
    )
    parser.add_argument("--tuning-steps", type=int, default=3000)
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument(
        "--extra-text", type=Path, help="a text file to mix in as documents (one in twenty)"
    )
    parser.add_argument("--loss-curve", type=Path, default=HERE / "loss_curve.json")
    return parser.parse_args()


class Step(NamedTuple):
    """What a step trains on: rows of `context` tokens, the shares of drills and of tools."""

    context: int
    rows: int
    drill: float
    tools: float = 0.0


# tools in short rows, everything else in long ones
TUNING_CYCLE = (Step(512, 8, 0.15, 0.75),) * 3 + (Step(2048, 2, 0.15, 0.15),)


def planned_steps(arguments: argparse.Namespace) -> list[Step]:
    if arguments.init_from:
        return [TUNING_CYCLE[step % len(TUNING_CYCLE)] for step in range(arguments.tuning_steps)]
    stages = [tuple(map(int, stage.split("x"))) for stage in arguments.stages.split(",")]
    sizes = [(context, rows) for context, rows, steps in stages for _ in range(steps)]
    return [
        Step(*size, 1.0 if step < arguments.drill_steps else arguments.drill_share)
        for step, size in enumerate(sizes)
    ]


def pack_row(
    rng: Random, tokenizer: Tokenizer, step: Step, extra_text: str
) -> tuple[list[int], list[float]]:
    """Documents end to end, cut at `context` + 1 tokens; every other row opens with one long recall
    document. `drill` is the share of rows that hold drills only, `tools` the share of documents
    about tools.
    """
    context, _, drill, tools = step
    token_ids: list[int] = []
    weights: list[float] = []
    is_drill = rng.random() < drill
    while len(token_ids) <= context:
        if extra_text and rng.random() < 0.05:
            start = rng.randrange(len(extra_text))
            segments = [(extra_text[start : start + 600], data.CONTEXT)]
        elif rng.random() < tools and (token_ids or rng.random() < 0.5):
            make = tool_data.word_drill if rng.random() < 0.15 else tool_data.tool_document
            segments = [*make(rng, context), (data.END_OF_TEXT, data.TEXT)]
        else:
            is_recall, is_sums = not token_ids and rng.random() < 0.5, rng.random() < SUMS_SHARE
            kind = "drill" if is_drill else "recall" if is_recall else "sums" if is_sums else "any"
            segments = documents.training_document(rng, int(context * rng.uniform(0.5, 0.95)), kind)
        for encoding, (_, weight) in zip(
            tokenizer.encode_batch([text for text, _ in segments]), segments
        ):
            token_ids += encoding.ids
            weights += [weight] * len(encoding.ids)
    return token_ids[: context + 1], weights[: context + 1]


def make_batch(
    rng: Random, tokenizer: Tokenizer, step: Step, extra_text: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and loss weights, each [rows, context]."""
    rows = [pack_row(rng, tokenizer, step, extra_text) for _ in range(step.rows)]
    token_ids = torch.tensor([ids for ids, _ in rows])
    weights = torch.tensor([weights for _, weights in rows])[:, 1:]
    given = weights == data.CONTEXT
    kept = torch.rand(weights.shape) < CONTEXT_KEPT
    weights = torch.where(given, kept * (data.CONTEXT / CONTEXT_KEPT), weights)
    return token_ids[:, :-1], token_ids[:, 1:], weights


def weighted_loss(
    model: torch.nn.Module, inputs: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, float]:
    """The loss over the positions that have a weight, and the share of checkable tokens that were
    guessed right.
    """
    selected = weights > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # [num_selected, hidden_size]
        hidden = model.model(inputs, use_cache=False).last_hidden_state[selected]
        logits = model.lm_head(hidden)
    losses = F.cross_entropy(logits.float(), targets[selected], reduction="none")
    weights = weights[selected]
    is_answer = weights == data.ANSWER
    accuracy = (logits[is_answer].argmax(-1) == targets[selected][is_answer]).float().mean().item()
    return (losses * weights).sum() / weights.sum(), accuracy


def make_optimizers(
    model: torch.nn.Module, matrix_lr: float, vector_lr: float
) -> list[torch.optim.Optimizer]:
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "embed" not in name
    ]
    vectors = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 1 or "embed" in name
    ]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=matrix_lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(vectors, lr=vector_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def learning_rate_factor(
    step: int, num_steps: int, decay_steps: int, warmup_steps: int = 50
) -> float:
    """Up in a moment, flat, then straight down to nothing."""
    return min((step + 1) / warmup_steps, 1.0, (num_steps - step) / decay_steps)


def update(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], loss: Tensor, factor: float
) -> None:
    """A step along the gradients of `loss`; factor: of the learning rates."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        optimizer.step()
        optimizer.zero_grad()


def train_step(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], batch: tuple, factor: float
) -> tuple[float, float]:
    loss, accuracy = weighted_loss(model, *batch)
    update(model, optimizers, loss, factor)
    return loss.item(), accuracy


def restore(
    path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, list, int, float]:
    """Load a checkpoint; returns the next step, the curve so far, the tokens seen and the seconds
    spent.
    """
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(optimizer_state)
    return state["step"], state["curve"], state["num_tokens"], state["seconds"]


def save(
    arguments: argparse.Namespace,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    tokenizer: Tokenizer,
    progress: dict,
) -> None:
    state = dict(
        model=model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
        **progress,
    )
    torch.save(state, arguments.checkpoint)
    export.export_model(model, tokenizer, arguments.output)
    write_curve(arguments, progress)


def report(curve: list, num_tokens: int, seconds: float) -> None:
    recent = curve[-20:]
    step, context, _, _ = curve[-1]
    print(
        f"step {step} context {context} loss {sum(row[2] for row in recent) / len(recent):.3f} "
        f"answers "
        f"{sum(row[3] for row in recent) / len(recent):.3f} tokens {num_tokens / 1e6:.2f}M "
        f"{seconds:.0f}s",
        flush=True,
    )


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    if arguments.init_from:
        tokenizer, model = export.load_extended(arguments.init_from)
    else:
        tokenizer, model = export.train_tokenizer(arguments.seed), export.build_model()
    model.train()
    optimizers = make_optimizers(model, arguments.matrix_lr, arguments.vector_lr)
    first_step, curve, num_tokens, seconds = (
        restore(arguments.checkpoint, model, optimizers) if arguments.resume else (0, [], 0, 0.0)
    )
    extra_text = arguments.extra_text.read_text(encoding="utf-8") if arguments.extra_text else ""
    steps = planned_steps(arguments)
    start = time.monotonic() - seconds
    for step in range(first_step, len(steps)):
        rng = Random(f"{arguments.seed} {step}")
        batch = make_batch(rng, tokenizer, steps[step], extra_text)
        loss, accuracy = train_step(
            model, optimizers, batch, learning_rate_factor(step, len(steps), arguments.decay_steps)
        )
        num_tokens += steps[step].context * steps[step].rows
        curve.append([step, steps[step].context, round(loss, 4), round(accuracy, 4)])
        if step % 20 == 0:
            report(curve, num_tokens, time.monotonic() - start)
        if (step + 1) % arguments.save_every == 0 or step + 1 == len(steps):
            progress = dict(
                step=step + 1, curve=curve, num_tokens=num_tokens, seconds=time.monotonic() - start
            )
            save(arguments, model, optimizers, tokenizer, progress)


def write_curve(arguments: argparse.Namespace, progress: dict) -> None:
    """Means over twenty steps; the settings beside them."""
    rows = [progress["curve"][start : start + 20] for start in range(0, len(progress["curve"]), 20)]
    means = [
        [
            row[0][0],
            row[0][1],
            round(sum(c[2] for c in row) / len(row), 4),
            round(sum(c[3] for c in row) / len(row), 4),
        ]
        for row in rows
    ]
    settings = {
        key: value
        for key, value in vars(arguments).items()
        if isinstance(value, (str, int, float)) and key != "resume"
    }
    content = dict(
        settings=settings,
        num_tokens=progress["num_tokens"],
        seconds=round(progress["seconds"]),
        columns=["first step of twenty", "context", "loss", "answer token accuracy"],
    )
    text = (
        json.dumps(content, indent=1)[:-2]
        + ',\n "curve": [\n'
        + ",\n".join(f"  {json.dumps(row)}" for row in means)
        + "\n ]\n}\n"
    )
    arguments.loss_curve.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    train(parse_arguments())
