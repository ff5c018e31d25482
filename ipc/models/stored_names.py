"""The names under which a checkpoint has a model's tensors, and those that a pooling model ignores.

Must not know: tensors' values, architectures, torch.

A checkpoint of the base model alone lacks the base's prefix ("bert.", "model."), and one for
another task has heads that are not needed. BERT's oldest checkpoints say gamma and beta.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .checkpoint import find_weight_files, read_header
from .gguf_weights import is_gguf

T = TypeVar("T")

# of heads for other tasks (in front of a name, with or without the base's prefix), and buffers
_NOT_POOLED = re.compile(
    r"^(\w+\.)?(lm_head|cls|pooler|qa_outputs|classifier|pre_classifier|score|head|decoder|"
    r"vocab_transform|vocab_layer_norm|vocab_projector|discriminator_predictions|"
    r"generator_predictions|generator_lm_head|predictions|sop_classifier)\.|"
    r"(^|\.)(position_ids|token_type_ids|inv_freq|original_inv_freq)$"
)
_MTP_HEADS = ("model.mtp_layers.", "mtp.")  # of MiMo and of Qwen
_OLD_ENDINGS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def in_checkpoint(
    by_name: Mapping[str, T], base_prefix: str, stored: Collection[str]
) -> dict[str, T]:
    """`by_name` with the names that the checkpoint has for a model's.

    A name loses `base_prefix` if no stored one begins with it, and takes an old ending if the
    checkpoint has that instead.
    """
    is_bare = bool(base_prefix) and not any(name.startswith(base_prefix) for name in stored)

    def name_in(name: str) -> str:
        name = name.removeprefix(base_prefix) if is_bare else name
        for new, old in _OLD_ENDINGS.items():
            other = name.removesuffix(new) + old
            if name.endswith(new) and name not in stored and other in stored:
                return other
        return name

    return {name_in(name): value for name, value in by_name.items()}


def is_ignored(name: str, config: Any) -> bool:
    """Whether a model with this configuration needs no tensor of that name: a head for multi-token
    prediction, which has weights of its own; an output head, where it does not generate text; or a
    buffer.
    """
    if name.startswith(_MTP_HEADS):
        return True
    return not config.has_lm_head and _NOT_POOLED.search(name) is not None


def stored_by_name(by_name: Mapping[str, T], config: Any, directory: Path) -> dict[str, T]:
    """in_checkpoint for the files of `directory`; a GGUF file has names of its own."""
    if is_gguf(directory):
        return dict(by_name)
    stored = {name for path in find_weight_files(directory) for name in read_header(path)}
    return in_checkpoint(by_name, config.base_prefix, stored)
