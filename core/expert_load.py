"""How evenly the tokens of a model's layers were spread over their experts.

Must not know: who counts, torch, what is shown.
"""

from __future__ import annotations

from typing import Any


def imbalance(tokens: list[int]) -> float:
    """The tokens of the busiest expert over the mean, 1.0 if all have as many, and the number of
    experts if one has all; 0.0 without tokens. tokens [E]
    """
    return max(tokens) * len(tokens) / total if (total := sum(tokens)) else 0.0


def unused(tokens: list[int]) -> float:
    """The share of experts without tokens. tokens [E]"""
    return tokens.count(0) / len(tokens)


def by_layer(loads: list[dict[int, list[int]]]) -> dict[str, Any]:
    """The tokens that each expert was sent since the weights were loaded. `loads`: of each rank,
    those of its layers; ranks that share a layer have equal ones.

    "layers": the layers with experts. "tokens": for each of them the tokens of its experts, with a
    token counted once for each expert that it has; prompts that are recomputed count again. A step
    that runs now may be counted in part. Both are empty for models without experts, and for models
    in transformers' code, which are not counted.
    """
    load = {layer: tokens for of_rank in loads for layer, tokens in of_rank.items()}
    return {"layers": list(load), "tokens": list(load.values())}


def summary(load: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(layer, imbalance, unused) of each layer with experts; `load` as of by_layer."""
    layers = zip(load["layers"], load["tokens"])
    return [(layer, imbalance(tokens), unused(tokens)) for layer, tokens in layers]
