"""Which weights of a checkpoint are quantized and how, from quantization_config in config.json.

Must not know: files, tensors' values, torch, architectures. quantized_tensors.py says which tensors
a format stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from ..errors import ModelLoadError

Json = dict[str, Any]

MAX_GROUP_SIZE = 1 << 20
E4M3_GROUP = 128  # columns of activations in FP8 with one scale, where blocks of weights have them
MAX_PATTERNS = 10_000
MAX_REPETITIONS = 4  # in a regular expression
HEAD = "lm_head"
MXFP4 = "mxfp4"  # gpt-oss: the experts of a layer in one tensor
# of BitNet: four rows in a byte and a scale that divides; the same and a scale that multiplies;
# floats that are quantized as they are loaded
BITLINEAR, AUTOBITLINEAR, ONLINE = "bitlinear", "autobitlinear", "online"
# compressed-tensors' formats of one weight
PACKED, PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
AUTO_ROUND_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
_ACTIVATIONS = ("dynamic", "static")


class WeightFormat(msgspec.Struct, frozen=True):
    """How the weight of a linear layer is stored: weight = scale * (number - zero)."""

    # awq, gptq: int32 words of several inputs' numbers; packed: words of one output's numbers;
    # plain: a number each; bitlinear, autobitlinear, online: those of BitNet
    layout: str
    bits: int
    is_float: bool = False  # e4m3
    # columns with one scale; 0: the whole row
    group_size: int = 0
    # rows with one scale; 0: all
    group_rows: int = 1
    is_symmetric: bool = True
    zero_offset: int = 0  # added to zeros as they are stored
    scale_name: str = "weight_scale"  # of packed and plain
    # how the checkpoint wants activations quantized to FP8: "group" of E4M3_GROUP columns of a row,
    # "token", "static" with a stored scale; empty: they are not
    activations: str = ""

    def __str__(self) -> str:
        if self.layout == MXFP4:
            return MXFP4.upper()
        if self.is_float:
            number = "fp8"
            if self.activations:
                number += f" (activations too, by {self.activations})"
        elif self.bits == 2:
            number = "ternary"
        else:
            number = f"int{self.bits}" + ("" if self.is_symmetric else " with zero points")
        if self.group_rows > 1:
            return f"{number} in blocks of {self.group_rows} x {self.group_size}"
        if self.group_size:
            return f"{number} in groups of {self.group_size}"
        return f"{number} with a scale per {'row' if self.group_rows else 'tensor'}"


class CheckpointQuantization(msgspec.Struct, frozen=True):
    method: str
    # (whether a format applies to a layer, the format), in order
    formats: tuple[tuple[Callable[[str], bool], WeightFormat], ...]
    is_ignored: Callable[[str], bool]
    keeps_fp8: bool = False  # whether the kernels multiply blocks of FP8, as those of GPUs do
    quantizes_to_fp8: bool = False  # and by activations in FP8

    def format_of(self, name: str, shape: list[int]) -> WeightFormat | None:
        """The format of a weight, by its name in the model; None: it is not quantized."""
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) != 2 or layer.endswith("embed_tokens"):
            return None
        if self.is_ignored(layer):
            return None
        found = next((found for applies, found in self.formats if applies(layer)), None)
        if found is None or not found.activations or self.quantizes_to_fp8:
            return found
        return replace(found, activations="")


def parse_quantization(
    hf_config: Json, keeps_fp8: bool = False, quantizes_to_fp8: bool = False
) -> CheckpointQuantization | None:
    """Returns None for a checkpoint that is not quantized. keeps_fp8, quantizes_to_fp8: see
    CheckpointQuantization.

    Raises ModelLoadError, naming the key, for what is missing, out of range or unsupported.
    """
    config = hf_config.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise _refused("must be an object", config)
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in METHODS:
        raise _refused(
            f"quant_method {method!r:.100} is not supported; supported: {', '.join(METHODS)}"
        )
    found = METHODS[method](config)
    return replace(found, keeps_fp8=keeps_fp8, quantizes_to_fp8=quantizes_to_fp8)


def _awq(config: Json) -> CheckpointQuantization:
    version = config.get("version") or config.get("format") or "gemm"
    _one_of({"version": version}, "version", ("gemm", "GEMM"))
    _one_of(config, "bits", (4,))
    _one_of(config, "zero_point", (True,), default=True)
    found = WeightFormat("awq", 4, group_size=_group_size(config), is_symmetric=False)
    return _same_for_all("awq", found, _patterns(config, "modules_to_not_convert"))


def _gptq(config: Json) -> CheckpointQuantization:
    stored = config.get("checkpoint_format") or "gptq"
    _one_of({"checkpoint_format": stored}, "checkpoint_format", ("gptq", "gptq_v2"))
    ignored = _patterns(config, "modules_to_not_convert")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(rule.startswith("-:") for rule in dynamic):
        raise _refused("dynamic may only exclude layers ('-:PATTERN')", dynamic)
    excluded = _any_regex("dynamic", [rule[2:] for rule in dynamic])
    quantization = _same_for_all(
        "gptq",
        WeightFormat(
            "gptq",
            _one_of(config, "bits", (4, 8)),
            group_size=_group_size(config),
            is_symmetric=False,  # zeros are always stored
            zero_offset=1 if stored == "gptq" else 0,
        ),
        ignored,
        has_head=_switch(config, "lm_head"),
    )
    is_ignored = quantization.is_ignored
    return replace(quantization, is_ignored=lambda layer: is_ignored(layer) or excluded(layer))


def _auto_round(config: Json) -> CheckpointQuantization:
    packing = _one_of(config, "packing_format", tuple(AUTO_ROUND_PACKINGS))
    layout = AUTO_ROUND_PACKINGS[packing]
    extra = config.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(
        isinstance(of_layer, dict) and of_layer.get("bits") in (16, 32)
        for of_layer in extra.values()
    ):
        raise _refused("extra_config may only exclude layers (bits 16)", extra)
    bits = _one_of(config, "bits", (4,) if layout == "awq" else (4, 8))
    found = WeightFormat(
        layout,
        bits,
        group_size=_group_size(config),
        is_symmetric=False,
        zero_offset=1 if layout == "gptq" else 0,
    )
    ignored = [*_patterns(config, "modules_to_not_convert"), *extra]
    return _same_for_all("auto-round", found, ignored)


def _fp8(config: Json) -> CheckpointQuantization:
    is_static = _one_of(config, "activation_scheme", _ACTIVATIONS, default="dynamic") == "static"
    _one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    key = "modules_to_not_convert" if config.get("modules_to_not_convert") else "ignored_layers"
    blocks = config.get("weight_block_size")
    if blocks is None:
        found = WeightFormat("plain", 8, is_float=True, group_rows=0, activations="token")
    else:
        found = replace(_blocks("weight_block_size", blocks), scale_name="weight_scale_inv")
    if is_static:
        found = replace(found, activations="static")
    return _same_for_all("fp8", found, _patterns(config, key))


def _fbgemm_fp8(config: Json) -> CheckpointQuantization:
    found = WeightFormat("plain", 8, is_float=True)
    return _same_for_all("fbgemm_fp8", found, _patterns(config, "modules_to_not_convert"))


def _mxfp4(config: Json) -> CheckpointQuantization:
    """Experts are stored as numbers and scales of blocks of 32, all of a layer in one tensor
    (stacked_experts.py); other layers keep their dtype.
    """
    found = WeightFormat(MXFP4, 4, group_size=32)
    return CheckpointQuantization(
        MXFP4, ((lambda layer: True, found),), lambda layer: ".experts." not in layer
    )


def _bitnet(config: Json) -> CheckpointQuantization:
    """transformers quantizes activations to int8 by token; Quire does so in smaller groups."""
    kinds = BITLINEAR, AUTOBITLINEAR
    layout = _one_of(config, "linear_class", kinds, default=BITLINEAR)
    mode = _one_of(config, "quantization_mode", ("offline", ONLINE), default="offline")
    _one_of(config, "use_rms_norm", (False,), default=False)
    if layout == AUTOBITLINEAR and mode == ONLINE:
        layout = ONLINE
    found = WeightFormat(layout, 2, group_rows=0)
    return _same_for_all("bitnet", found, _patterns(config, "modules_to_not_convert"))


def _compressed_tensors(config: Json) -> CheckpointQuantization:
    sparsity, transform = (config.get(key) or {} for key in ("sparsity_config", "transform_config"))
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise _refused("sparsity_config is not supported", sparsity)
    if not isinstance(transform, dict) or transform.get("config_groups"):
        raise _refused("transform_config is not supported", transform)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not 0 < len(groups) <= MAX_PATTERNS:
        raise _refused("config_groups must be an object with groups", groups)
    formats = []
    for name, group in groups.items():
        where = f"config_groups.{name:.50}"
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise _refused(f"{where} must have weights", group)
        found = _group_format(f"{where}.weights", group["weights"], group.get("format"), config)
        if found.is_float:
            found = replace(found, activations=_activations(group.get("input_activations")))
        targets = _patterns(group, "targets")
        formats.append((_targets(where, targets), found))
    ignored = _targets("ignore", _patterns(config, "ignore"))
    return CheckpointQuantization("compressed-tensors", tuple(formats), ignored)


def _group_format(where: str, weights: Json, stored: str | None, config: Json) -> WeightFormat:
    stored = stored or config.get("format")
    _one_of({"format": stored}, "format", (PACKED, *PLAIN))
    kind = _one_of(weights, "type", ("int", "float"), default="int", where=where)
    is_float, is_packed = kind == "float", stored == PACKED
    allowed = (4, 8) if not is_float else (8,)
    bits = _one_of(weights, "num_bits", allowed, default=8, where=where)
    if is_float and is_packed:
        raise _refused(f"{where}: type float is not supported with format {PACKED}")
    default = "channel" if weights.get("group_size") in (None, -1) else "group"
    strategies = ("tensor", "channel", "group", "block")[: 4 if is_float else 3]
    strategy = _one_of(
        weights | {"strategy": weights.get("strategy") or default}, "strategy", strategies, where
    )
    found = WeightFormat(
        "packed" if is_packed else "plain",
        bits,
        is_float=is_float,
        is_symmetric=is_float or _switch(weights, "symmetric", default=True, where=where),
    )
    if strategy == "tensor":
        return replace(found, group_rows=0)
    if strategy == "group":
        return replace(found, group_size=_group_size(weights, where))
    if strategy == "block":
        return _blocks(f"{where}.block_structure", weights.get("block_structure"))
    return found


def _activations(of_group: Any) -> str:
    """What compressed-tensors says of the activations of FP8 weights; see WeightFormat."""
    if not isinstance(of_group, dict) or (of_group.get("type"), of_group.get("num_bits")) != (
        "float",
        8,
    ):
        return ""
    strategy = of_group.get("strategy") or "tensor"
    if not of_group.get("dynamic"):
        return "static" if strategy == "tensor" else ""
    if strategy == "group":
        return "group" if of_group.get("group_size") == E4M3_GROUP else ""
    # as in vLLM, a dynamic scale is a row's, so that a request does not depend on those beside it
    return "token" if strategy in ("token", "tensor") else ""


METHODS: dict[str, Callable[[Json], CheckpointQuantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "bitnet": _bitnet,
    MXFP4: _mxfp4,
}


def _same_for_all(
    method: str, found: WeightFormat, ignored: list[str], has_head: bool = False
) -> CheckpointQuantization:
    """One format for all layers but the `ignored` ones; for the head only if it is named."""

    def is_ignored(layer: str) -> bool:
        # a part of the name between dots, as in vLLM and transformers
        return (layer == HEAD and not has_head) or any(
            f".{pattern.strip('.')}." in f".{layer}." for pattern in ignored
        )

    return CheckpointQuantization(method, ((lambda layer: True, found),), is_ignored)


def _targets(where: str, targets: list[str]) -> Callable[[str], bool]:
    """compressed-tensors' rules: "Linear", the name of a layer, or "re:" and a regular expression
    that matches from the name's start.
    """
    names = {target for target in targets if not target.startswith("re:")}
    matches = _any_regex(where, [target[3:] for target in targets if target.startswith("re:")])
    return lambda layer: "Linear" in names or layer in names or matches(layer)


def _any_regex(where: str, patterns: list[str]) -> Callable[[str], bool]:
    compiled = []
    for pattern in patterns:
        # a repeated group, or many repetitions, can take exponential time
        if re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > MAX_REPETITIONS:
            raise _refused(
                f"{where}: the regular expression {pattern!r:.100} has repeated groups "
                f"or more than {MAX_REPETITIONS} repetitions"
            )
        try:
            compiled.append(re.compile(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise _refused(f"{where}: {pattern!r:.100} is no regular expression: {error}") from None
    return lambda layer: any(pattern.match(layer) for pattern in compiled)


def _patterns(config: Json, key: str) -> list[str]:
    value = config.get(key) or []
    if (
        not isinstance(value, list)
        or len(value) > MAX_PATTERNS
        or not all(isinstance(item, str) and item for item in value)
    ):
        raise _refused(f"{key} must be a list of names", value)
    return value


def _group_size(config: Json, where: str = "") -> int:
    """Columns with one scale; 0 for -1, the whole row."""
    size = config.get("group_size", 128)
    if not isinstance(size, int) or isinstance(size, bool):
        size = None
    if size == -1:
        return 0
    if size is None or not 8 <= size <= MAX_GROUP_SIZE or size % 8:
        prefix = f"{where}: " if where else ""
        raise _refused(
            f"{prefix}group_size must be -1 or a multiple of 8", config.get("group_size")
        )
    return size


def _blocks(key: str, value: Any) -> WeightFormat:
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or not all(type(size) is int and 0 < size <= MAX_GROUP_SIZE for size in value)
    ):
        raise _refused(f"{key} must be two positive integers", value)
    activations = "group" if value[1] == E4M3_GROUP else ""
    return WeightFormat("plain", 8, True, value[1], value[0], activations=activations)


def _switch(config: Json, key: str, default: bool = False, where: str = "") -> bool:
    return _one_of(config, key, (False, True), where, default=default)


def _one_of(
    config: Json, key: str, allowed: tuple[Any, ...], where: str = "", default: Any = None
) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
        prefix = f"{where}: " if where else ""
        raise _refused(
            f"{prefix}{key}={value!r:.100} is not supported; supported: "
            f"{', '.join(repr(one) for one in allowed)}"
        )
    return value


def _refused(problem: str, *value: Any) -> ModelLoadError:
    got = f", got {value[0]!r:.100}" if value else ""
    return ModelLoadError(f"config.json: quantization_config: {problem}{got}")
