"""Trains the heads that draft for the bundled model, on the texts that it was trained on.

    python train_heads.py mtp && python train_heads.py eagle3

A head learns the model's own distribution, which is what drafts are verified with, for the next
token and for those after it, with its own states (`--depth` in all).
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from random import Random

import heads
import torch
from tokenizers import Tokenizer
from torch import Tensor
from train import DEFAULT_FOLDER, Step, learning_rate_factor, make_batch, make_optimizers, update
from transformers import Qwen2ForCausalLM

EAGLE3_LAYERS = [1, 2, 4]
EAGLE3_TOKENS, EAGLE3_INNER = 768, 320  # so that the file has less than 2 MB
GIVEN_WEIGHT = 0.3  # of tokens that a user writes, beside 1 for the model's own


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["mtp", "eagle3"])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--matrix-lr", type=float, default=3e-3, help="Muon")
    parser.add_argument("--vector-lr", type=float, default=3e-3, help="AdamW")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="default: drafters/<kind>")
    return parser.parse_args()


def frequent_tokens(tokenizer: Tokenizer, seed: int, count: int) -> Tensor:
    """[count], ascending"""
    counts: Counter[int] = Counter()
    for number in range(40):
        rng = Random(f"{seed} frequent {number}")
        inputs, _, weights = make_batch(rng, tokenizer, Step(512, 8, 0.1, 0.3), "")
        counts.update(inputs[:, 1:][weights[:, :-1] > 0].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(count)))


def loss_of(
    head: torch.nn.Module, model: Qwen2ForCausalLM, batch: tuple, depth: int
) -> tuple[Tensor, list[float]]:
    """The cross-entropy to the model's distributions, and by depth the share of positions where
    head and model agree on the likeliest token.
    """
    tokens, _, weights = batch
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        result = model(tokens, output_hidden_states=True, use_cache=False)
    *layer_inputs, hidden = (states.float() for states in result.hidden_states)
    wanted = result.logits.float().softmax(-1)
    own = (weights > 0).float() * (1 - GIVEN_WEIGHT) + GIVEN_WEIGHT
    state, losses, agreement = head.first_state(layer_inputs, hidden), [], []
    for step in range(1, depth + 1):
        state, following = state[:, :-1], tokens[:, step:]
        positions = torch.arange(step - 1, tokens.shape[1] - 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, state = head(following, state, positions)
        logits, state = logits.float(), state.float()
        of_step, weight = wanted[:, step:], own[:, step:]
        entropy = -(of_step * logits.log_softmax(-1).clamp_min(-30)).sum(-1)
        losses.append((entropy * weight).sum() / weight.sum())
        is_equal = logits.argmax(-1) == of_step.argmax(-1)
        agreement.append(is_equal[weight > GIVEN_WEIGHT].float().mean().item())
    return torch.stack(losses).mean(), agreement


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    model = Qwen2ForCausalLM.from_pretrained(DEFAULT_FOLDER, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(DEFAULT_FOLDER / "tokenizer.json"))
    config = json.loads((DEFAULT_FOLDER / "config.json").read_text(encoding="utf-8"))
    embedding = model.model.embed_tokens.weight.detach()
    head: torch.nn.Module
    if arguments.kind == "mtp":
        head = heads.MTPHead(config, embedding)
    else:
        known = frequent_tokens(tokenizer, arguments.seed, EAGLE3_TOKENS)
        config |= {"intermediate_size": EAGLE3_INNER}
        head = heads.Eagle3Head(config, embedding, known, EAGLE3_LAYERS)
    optimizers = make_optimizers(head, arguments.matrix_lr, arguments.vector_lr)
    curve, start = [], time.monotonic()
    for step in range(arguments.steps):
        rng = Random(f"{arguments.seed} head {step}")
        shape = Step(arguments.context, arguments.rows, 0.05, 0.3)
        batch = make_batch(rng, tokenizer, shape, "")
        loss, agreement = loss_of(head, model, batch, arguments.depth)
        factor = learning_rate_factor(step, arguments.steps, arguments.steps // 2)
        update(head, optimizers, loss, factor)
        curve.append([loss.item(), *agreement])
        if step % 20 == 19:
            means = [round(sum(column) / 20, 4) for column in zip(*curve[-20:])]
            print(step + 1, *means, f"{time.monotonic() - start:.0f}s", flush=True)
    directory = arguments.output or heads.DRAFTERS / arguments.kind
    heads.save(head, directory)
    columns = [f"agreement of draft {depth + 1}" for depth in range(arguments.depth)]
    write_curve(arguments, curve, time.monotonic() - start, directory, columns)


def write_curve(
    arguments: argparse.Namespace,
    curve: list[list[float]],
    seconds: float,
    directory: Path,
    names: list[str],
    every: int = 20,
) -> None:
    """Means over `every` steps; the settings beside them. names: of what follows the loss."""
    rows = []
    for start in range(0, len(curve), every):
        part = curve[start : start + every]
        rows.append([start, *(round(sum(column) / len(part), 4) for column in zip(*part))])
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    columns = [f"first step of {every}", "loss", *names]
    content = dict(settings=settings, seconds=round(seconds), columns=columns)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = json.dumps(content, indent=1)[:-2] + f',\n "curve": [\n{lines}\n ]\n}}\n'
    (directory / "loss_curve.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    train(parse_arguments())
