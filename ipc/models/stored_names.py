"""The names under which a checkpoint has a model's tensors, and those that a pooling model ignores.

Must not know: tensors' values, architectures, torch.

A checkpoint of the base model alone lacks the base's prefix ("bert.", "model."), and one for
another task has heads that are not needed. BERT's oldest checkpoints say gamma and beta.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .architectures import TEXT_PREFIX
from .checkpoint import OTHER_PARTS, find_weight_files, read_header
from .decoder_config import DecoderConfig
from .gguf import is_gguf

_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and of torch.compile
# where files may have a base model: in a multimodal one, as transformers wrote and writes it, or
# in the base of that; in a model with a head; alone
_PLACES = (
    *("model.language_model.", "language_model.model.", "model.text_model.", "text_model."),
    *(TEXT_PREFIX, "model.", ""),
)

# of heads for other tasks (in front of a name, with or without the base's prefix), and buffers
_NOT_POOLED = re.compile(
    r"^(\w+\.)?(lm_head|cls|pooler|qa_outputs|classifier|pre_classifier|score|head|decoder|"
    r"vocab_transform|vocab_layer_norm|vocab_projector|discriminator_predictions|"
    r"generator_predictions|generator_lm_head|predictions|sop_classifier)\.|"
    r"(^|\.)(position_ids|token_type_ids|inv_freq|original_inv_freq)$"
)
_MTP_HEADS = ("model.mtp_", "mtp_layers.", "mtp.")  # of MiMo and ERNIE, and of Qwen
_KEYS_OR_VALUES = re.compile(r"\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight$")
_INDEXER = ".self_attn.indexer."
_OLD_ENDINGS = {
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
    "mm_input_projection.weight": "mm_input_projection_weight",  # of Gemma 3, always
}


class StoredNames:
    """The names that a checkpoint has for a model's tensors, and the model's for a checkpoint's.

    They differ by what stands in front of the base model's names, which is found once, from the
    names in the checkpoint: nothing where the base model alone was saved; what a model around it
    adds; the modules of torch that wrap a model while it is trained. BERT's oldest checkpoints
    have other endings besides.
    """

    def __init__(self, base_prefix: str, names: Collection[str], stored: Collection[str]):
        """base_prefix: of the base model's tensors in `names`, which are those of the model."""
        self._wrapper = _wrapper_of(stored)
        self._stored = {name.removeprefix(self._wrapper) for name in stored}
        self._base = base_prefix
        own = {name.removeprefix(base_prefix) for name in names if name.startswith(base_prefix)}
        first = {name.partition(".")[0] for name in own}
        places = (base_prefix, *_PLACES)
        self._place = next(
            (p for p in places if self._has(f"{p}{one}." for one in first)), places[0]
        )

    def of(self, name: str) -> str:
        """The checkpoint's name for a tensor of the model, whether it has that tensor or not."""
        if name.startswith(self._base):
            inner = self._place + name.removeprefix(self._base)
        elif OTHER_PARTS.match(name):
            inner = self._of_other_part(name)
        else:  # a head, beside the base model
            bare = name.removeprefix(TEXT_PREFIX)
            places = (name, bare, TEXT_PREFIX + bare)
            inner = next((p for p in places if self._has([f"{p.rpartition('.')[0]}."])), name)
        for new, old in _OLD_ENDINGS.items():
            other = inner.removesuffix(new) + old
            if inner.endswith(new) and inner not in self._stored and other in self._stored:
                inner = other
        return self._wrapper + inner

    def _of_other_part(self, name: str) -> str:
        """The name of a tensor of an encoder of images, which lies beside the text model or in a
        base around both. Older files have one module more in a tower.
        """
        part, _, rest = name.partition(".")
        first = rest.partition(".")[0]
        places = [
            f"{base}{part}.{module}" for base in ("model.", "") for module in ("", "vision_model.")
        ]
        place = next((p for p in places if self._has([p + first])), f"{part}.")
        return place + rest

    def own(self, name: str) -> str:
        """The model's name for a tensor of the checkpoint, as far as it is the base model's."""
        inner = name.removeprefix(self._wrapper)
        is_inside = self._place and inner.startswith(self._place)
        return self._base + inner.removeprefix(self._place) if is_inside else inner

    def _has(self, starts: Iterable[str]) -> bool:
        starts = tuple(starts)
        return any(name.startswith(starts) for name in self._stored)


def _wrapper_of(stored: Collection[str]) -> str:
    """What every name has in front, of _WRAPPERS."""
    found = ""
    while stored:
        longer = [
            found + one for one in _WRAPPERS if all(n.startswith(found + one) for n in stored)
        ]
        if not longer:
            break
        found = longer[0]
    return found


def is_ignored(name: str, config: Any) -> bool:
    """Whether a model with this configuration needs no tensor of that name: a head for multi-token
    prediction, which has weights of its own; keys and values of a layer that reads those of another
    one; an indexer, which would choose all tokens; an output head, where it does not generate text;
    or a buffer.
    """
    if name.startswith(_MTP_HEADS) or _is_of_indexer(name, config):
        return True
    if _is_further_layer(name, config) or _is_of_shared(name, config):
        return True
    return not config.has_lm_head and _NOT_POOLED.search(name) is not None


def _is_further_layer(name: str, config: Any) -> bool:
    """Whether a tensor is of a layer after the last one that predicts further tokens."""
    if not isinstance(config, DecoderConfig) or not config.num_nextn_predict_layers:
        return False
    prefix = f"{config.base_prefix}layers."
    layer = name.removeprefix(prefix).partition(".")[0]
    is_layer = name.startswith(prefix) and layer.isdecimal()
    further = int(layer) - config.num_hidden_layers if is_layer else -1
    return 0 <= further < config.num_nextn_predict_layers


def _is_of_indexer(name: str, config: Any) -> bool:
    latent = config.latent if isinstance(config, DecoderConfig) else None
    return latent is not None and latent.index_topk > 0 and _INDEXER in name


def _is_of_shared(name: str, config: Any) -> bool:
    """Whether it is of the keys and values of a layer that reads those of another one."""
    found = _KEYS_OR_VALUES.search(name)
    layers = getattr(config, "layers", ())
    return found is not None and any(
        layer.kv_from is not None for layer in layers[int(found[1]) : int(found[1]) + 1]
    )


def find_stored_names(names: Collection[str], config: Any, directory: Path) -> StoredNames:
    """Reads the names from the headers of the files in `directory`; a GGUF file has the model's.

    Raises ModelLoadError for files that are not there or not readable.
    """
    if is_gguf(directory):
        return StoredNames("", names, names)
    stored = {name for path in find_weight_files(directory) for name in read_header(path)}
    return StoredNames(config.base_prefix, names, stored)
