"""What a checkpoint is for, by the name of its architecture, and the classification heads of each
family.

Must not know: tensors' values, layers, how a head is computed (executor/pooling/heads.py), which
families there are.

`Qwen3Model`, `Qwen3ForCausalLM` and `Qwen3ForSequenceClassification` are one family, Qwen3, in the
forms EMBED, GENERATE and CLASSIFY.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from .config_values import integer, malformed

GENERATE, EMBED, CLASSIFY, CLASSIFY_TOKENS = "generate", "embed", "classify", "classify tokens"
# endings of architectures; the first that fits counts
_ENDINGS = {
    "LMHeadModel": GENERATE,
    "Model": EMBED,
    "ForMaskedLM": EMBED,
    "ForPreTraining": EMBED,
    "ForCausalLM": GENERATE,
    "ForConditionalGeneration": GENERATE,
    "ForSequenceClassification": CLASSIFY,
    "ForTokenClassification": CLASSIFY_TOKENS,
}
DEFAULT_NUM_LABELS = 2  # transformers'
MOST_LABELS = 1_000_000


def family_and_form(architecture: str) -> tuple[str, str]:
    """("Qwen3", CLASSIFY) of Qwen3ForSequenceClassification; GENERATE of a name without one of the
    endings.
    """
    for ending, form in _ENDINGS.items():
        if architecture.endswith(ending):
            return architecture.removesuffix(ending), form
    return architecture, GENERATE


def form_of(hf_config: Mapping[str, Any]) -> str:
    """The form of the first architecture of a config.json; GENERATE where it names none."""
    names = hf_config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return GENERATE
    return family_and_form(names[0])[1]


def in_form(hf_config: dict[str, Any], form: str) -> dict[str, Any]:
    """hf_config with the architecture of the same family in another form: EMBED or CLASSIFY."""
    names = hf_config.get("architectures")
    if form_of(hf_config) == form or not names:
        return hf_config
    ending = {EMBED: "Model", CLASSIFY: "ForSequenceClassification"}[form]
    return hf_config | {"architectures": [family_and_form(names[0])[0] + ending]}


def label_names(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a classifier's classes, in order. Raises ModelLoadError for what are none."""
    names, count = hf_config.get("id2label"), hf_config.get("num_labels")
    if names is None:
        count = integer("num_labels", DEFAULT_NUM_LABELS if count is None else count, MOST_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))
    numbered = {str(key): value for key, value in names.items()} if type(names) is dict else {}
    labels = [numbered.get(str(i)) for i in range(len(numbered))]
    if not labels or not all(isinstance(label, str) for label in labels):
        raise malformed("id2label", "an object of names by number, from 0", names)
    return tuple(map(str, labels))


class HeadLayer(msgspec.Struct, frozen=True):
    """activation(x W^T + b), or activation(layer_norm(x)). `name`: of its tensors."""

    name: str
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: str = "identity"  # of executor/pooling/heads.py
    norm_eps: float | None = None  # of a norm

    def shapes(self) -> Iterator[tuple[str, list[int]]]:
        is_norm = self.norm_eps is not None
        features = [self.out_features]
        yield f"{self.name}.weight", features if is_norm else [*features, self.in_features]
        if self.has_bias:
            yield f"{self.name}.bias", features


Head = tuple[HeadLayer, ...]


def decoder_head(hf_config: Mapping[str, Any], hidden_size: int) -> Head:
    """`score`, of the classifiers that transformers makes of decoders; empty for other forms."""
    form = form_of(hf_config)
    if form not in (CLASSIFY, CLASSIFY_TOKENS) or score_tokens(hf_config):
        return ()
    num_labels = len(label_names(hf_config))
    return (HeadLayer("score", hidden_size, num_labels, has_bias=form == CLASSIFY_TOKENS),)


def score_tokens(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of two tokens, (no, yes), whose rows of the output head make a classifier of one
    class: yes - no. Resolved by ipc/models/pooling.py; empty for most models.
    """
    return tuple(hf_config.get("score_token_ids") or ())
