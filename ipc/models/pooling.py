"""What a model pools: how hidden states become embeddings, scores or classes.

Must not know: tensors, requests, how any of it is computed (executor/pooling/).

A pooled result is made in this order: the hidden states of a request's tokens, one row by each of
`modes` (concatenated), the layers of `dense` or of a classifier's head, the first `dimensions`
numbers, the activation (normalisation, sigmoid or softmax). resolve_pooling.py makes a Pooling.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# One row of the hidden states [T, H] of a request. In sentence-transformers' names.
PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["identity", "normalize", "sigmoid", "softmax"]
# The key of a configuration that holds a GGUF file's pooling type, a number of llama.cpp's.
STORED_POOLING = "gguf_pooling_type"


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user changes of how a model pools, under vLLM's names. None: as the model says."""

    # of requests that name none, and of scores: those of token_embed are MaxSim
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    # of a request's only row; pooling_type is another name of it
    seq_pooling_type: Literal["CLS", "LAST", "MEAN"] | None = None
    pooling_type: Literal["CLS", "LAST", "MEAN"] | None = None
    # of a task by token
    tok_pooling_type: Literal["ALL"] | None = None
    use_activation: bool | None = None
    # of every embedding, unless a request gives its own
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    # of classes: their logits are (logit - logit_mean) / logit_sigma before the activation
    logit_mean: float | None = None
    logit_sigma: Annotated[float, Meta(gt=0)] | None = None


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A layer y = activation(x W^T + b) behind pooling, from a folder of its own."""

    folder: str  # in the model's directory
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: str = "tanh"  # of executor/pooling/heads.py


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """How a model pools, resolved from its files and the configuration."""

    tasks: tuple[str, ...] = ("embed", "token_embed")  # of POOLING_TASKS, the default first
    modes: tuple[PoolingMode, ...] = ("lasttoken",)
    # the instruction in front of a text takes part in pooling
    include_prompt: bool = True
    dense: tuple[Dense, ...] = ()
    embedding_size: int = 0  # with all dimensions; 0: not known
    activation: Activation = "normalize"  # of one row, unless a request says otherwise
    dimensions: int | None = None  # of every embedding; None: all
    # lengths that a request may ask for; empty: none
    matryoshka_dimensions: tuple[int, ...] = ()
    # whether any length may be asked for
    is_matryoshka: bool = False
    num_labels: int = 0  # of a classifier; its head is the model's (ipc/models/forms.py)
    labels: tuple[str, ...] = ()
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    # every token sees the whole text, and there is no KV cache: prompts are computed at once
    is_bidirectional: bool = False
    has_token_types: bool = False
    prompts: dict[str, str] = {}  # texts to put in front, by name
    default_prompt_name: str | None = None
    similarity: str = "cosine"  # or "dot"
    max_seq_length: int | None = None  # longer texts are truncated; None: they are refused
    do_lower_case: bool = False

    @property
    def reads_all_tokens(self) -> bool:
        """Whether one row needs the hidden states of more than the last token."""
        return self.modes != ("lasttoken",)
