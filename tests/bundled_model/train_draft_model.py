"""Trains a small model that drafts for the bundled model, on the texts that it was trained on.

    python train_draft_model.py

It learns the bundled model's own distribution, which is what drafts are verified with. Its
embedding begins as the best approximation of that model's with so few columns.
"""

import argparse
import time
from pathlib import Path
from random import Random

import torch
from export import CONFIG
from heads import DRAFTERS, write
from tokenizers import Tokenizer
from torch import Tensor
from train import DEFAULT_FOLDER, Step, learning_rate_factor, make_batch, make_optimizers, update
from train_heads import GIVEN_WEIGHT, write_curve
from transformers import Qwen2Config, Qwen2ForCausalLM


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--size", type=int, default=128, help="of hidden states")
    parser.add_argument("--inner-size", type=int, default=320)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--matrix-lr", type=float, default=5e-3, help="Muon")
    parser.add_argument("--vector-lr", type=float, default=3e-3, help="AdamW")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=DRAFTERS / "draft_model")
    return parser.parse_args()


def make_model(
    arguments: argparse.Namespace, model: Qwen2ForCausalLM
) -> tuple[Qwen2ForCausalLM, dict]:
    config = CONFIG | {
        "hidden_size": arguments.size,
        "intermediate_size": arguments.inner_size,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.size // 64,
        "num_key_value_heads": 1,
    }
    draft = Qwen2ForCausalLM(Qwen2Config(**config))
    embedding = model.model.embed_tokens.weight.detach()
    left, values, _ = torch.linalg.svd(embedding, full_matrices=False)
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(left[:, : arguments.size] * values[: arguments.size])
    return draft, config


def loss_of(draft: Qwen2ForCausalLM, model: Qwen2ForCausalLM, batch: tuple) -> tuple[Tensor, float]:
    """The cross-entropy to the model's distributions, and the share of positions where both agree
    on the likeliest token.
    """
    tokens, _, weights = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            wanted = model(tokens, use_cache=False).logits.float().softmax(-1)
        logits = draft(tokens, use_cache=False).logits.float()
    weight = (weights > 0).float() * (1 - GIVEN_WEIGHT) + GIVEN_WEIGHT
    entropy = -(wanted * logits.log_softmax(-1)).sum(-1)
    is_equal = logits.argmax(-1) == wanted.argmax(-1)
    loss = (entropy * weight).sum() / weight.sum()
    return loss, is_equal[weight > GIVEN_WEIGHT].float().mean().item()


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    model = Qwen2ForCausalLM.from_pretrained(DEFAULT_FOLDER, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(DEFAULT_FOLDER / "tokenizer.json"))
    draft, config = make_model(arguments, model)
    optimizers = make_optimizers(draft, arguments.matrix_lr, arguments.vector_lr)
    curve, start = [], time.monotonic()
    for step in range(arguments.steps):
        rng = Random(f"{arguments.seed} draft model {step}")
        shape = Step(arguments.context, arguments.rows, 0.05, 0.3)
        loss, agreement = loss_of(draft, model, make_batch(rng, tokenizer, shape, ""))
        factor = learning_rate_factor(step, arguments.steps, arguments.steps // 2)
        update(draft, optimizers, loss, factor)
        curve.append([loss.item(), agreement])
        if step % 100 == 99:
            means = [round(sum(column) / 100, 4) for column in zip(*curve[-100:])]
            print(step + 1, *means, f"{time.monotonic() - start:.0f}s", flush=True)
    tensors = {
        name: value for name, value in draft.state_dict().items() if name != "lm_head.weight"
    }
    write(tensors, config, arguments.output)
    seconds = time.monotonic() - start
    write_curve(arguments, curve, seconds, arguments.output, ["agreement"], 100)


if __name__ == "__main__":
    train(parse_arguments())
