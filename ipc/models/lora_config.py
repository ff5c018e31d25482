"""The configuration of a LoRA adapter in PEFT's format: adapter_config.json.

Must not know: tensors, which modules a model has, torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from ..errors import ModelLoadError

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 512
# that say how an adapter was made, or where it came from
_NOT_READ = (
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out", "peft_version", "exclude_modules"),
    *("layers_pattern", "megatron_core", "runtime_config", "eva_config", "corda_config"),
    *("lora_ga_config", "ensure_weight_tying", "loftq_config", "qalora_group_size"),
)
_READ = (
    *("r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "init_lora_weights", "bias"),
)
# key -> what it is, if it is neither absent nor empty
_REFUSED = {
    "use_dora": "DoRA adapters",
    "use_qalora": "QALoRA adapters",
    "use_bdlora": "BD-LoRA adapters",
    "arrow_config": "Arrow routing",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "layer_replication": "replicated layers",
    "lora_bias": "adapters with a bias of their own",
    "modules_to_save": "adapters that replace whole modules",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "adapters of parameters, such as those of experts",
    "megatron_config": "adapters of Megatron",
}
# Values of init_lora_weights that leave the base model's weights as they are. PiSSA, OLoRA, CorDA,
# LoftQ and LoRA-GA change them, and a checkpoint of the base does not have the change.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
# of patterns: names with a few wildcards, which match in a time that grows slowly with the text
_PATTERN = re.compile(r"[\w.\-^$*+?\\\[\]()|]{1,200}")
_MOST_REPEATS = 3


class LoraConfig(msgspec.Struct, frozen=True):
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: tuple[str, ...] = ()  # empty: any that has tensors
    layers_to_transform: tuple[int, ...] | None = None

    def rank(self, module: str) -> int:
        """The rank of a module by its name in transformers, model.layers.0.self_attn.q_proj."""
        return _matching(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What B (A x) is multiplied by."""
        rank, alpha = self.rank(module), _matching(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def check_module(self, module: str) -> None:
        """Raises ValueError for a module that the configuration does not name: its tensors and the
        configuration do not belong together.
        """
        names = self.target_modules
        if names and not any(module == name or module.endswith(f".{name}") for name in names):
            raise ValueError("target_modules does not name it")
        layer = re.search(r"\.(\d+)\.", module)
        layers = self.layers_to_transform
        if layers is not None and layer is not None and int(layer[1]) not in layers:
            raise ValueError("layers_to_transform does not have its layer")


def parse_lora_config(config: dict[str, Any], path: Path) -> LoraConfig:
    """Parses the object in the file `path`.

    Raises ModelLoadError, naming file and key, for what is malformed or not supported.
    """

    def refuse(problem: str) -> ModelLoadError:
        return ModelLoadError(f"{path}: {problem}")

    if (kind := config.get("peft_type")) != "LORA":
        raise refuse(f"peft_type must be 'LORA', not {kind!r:.50}")
    for key, value in config.items():
        if key in _REFUSED and value not in (None, False, [], {}):
            raise refuse(f"{key}: {_REFUSED[key]} are not supported")
        if key not in (*_READ, *_NOT_READ, *_REFUSED) and value not in (None, False, [], {}, ""):
            raise refuse(f"{key:.50} is not supported, it is {value!r:.50}")
    if (bias := config.get("bias", "none")) != "none":
        raise refuse(f"bias: adapters that change biases are not supported, it is {bias!r:.50}")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, (bool, str, type(None))) or init not in _PLAIN_INITS:
        raise refuse(
            f"init_lora_weights: {init!r:.50} changes the weights of the base model, which is not "
            f"supported; convert the adapter to plain LoRA when it is saved"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not _is_rank(rank):
        raise refuse(f"r must be an integer in [1, {MAX_RANK}], not {rank!r:.50}")
    if not _is_alpha(alpha):
        raise refuse(f"lora_alpha must be a finite number, not {alpha!r:.50}")
    ranks = _pattern(config, "rank_pattern", _is_rank, f"integers in [1, {MAX_RANK}]", path)
    alphas = _pattern(config, "alpha_pattern", _is_alpha, "finite numbers", path)
    if not isinstance(rslora := config.get("use_rslora", False) or False, bool):
        raise refuse(f"use_rslora must be true or false, not {rslora!r:.50}")
    return LoraConfig(
        rank,
        alpha,
        rslora,
        ranks,
        alphas,
        _target_modules(config.get("target_modules"), path),
        _layers(config.get("layers_to_transform"), path),
    )


def _is_rank(value: Any) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_alpha(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def _target_modules(value: Any, path: Path) -> tuple[str, ...]:
    """The names; none for a regular expression and for "all-linear", which only PEFT expands."""
    if value is None or isinstance(value, str):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelLoadError(f"{path}: target_modules must be names or one expression")
    return tuple(value)


def _layers(value: Any, path: Path) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    layers = [value] if type(value) is int else value
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ModelLoadError(f"{path}: layers_to_transform must be integers, not {value!r:.50}")
    return tuple(layers)


def _pattern(config: dict[str, Any], key: str, is_valid: Any, valid: str, path: Path) -> dict:
    pattern = config.get(key) or {}
    if not isinstance(pattern, dict) or not all(map(is_valid, pattern.values())):
        raise ModelLoadError(f"{path}: {key} must map names of modules to {valid}")
    for name in pattern:
        if not _is_safe(name):
            raise ModelLoadError(
                f"{path}: {key}: {name!r:.50} must be the name of a module, or an expression with "
                f"at most {_MOST_REPEATS} repeats, none of a group"
            )
    return pattern


def _is_safe(pattern: str) -> bool:
    """Whether an expression compiles and cannot take long to match: the file may be hostile."""
    if not _PATTERN.fullmatch(pattern) or re.search(r"\)[*+?]", pattern):
        return False
    if len(re.findall(r"[*+?]", pattern)) > _MOST_REPEATS:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _matching(pattern: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first expression that matches the module's name, or its end at a dot."""
    for name, value in pattern.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{name})", module[-500:]):
            return value
    return default
