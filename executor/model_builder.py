"""Builds a model with its kernels and weights, as a configuration says.

Must not know: caches, requests, steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidParameterError, ModelLoadError
from ..ipc.json_files import read_json
from ..ipc.models.architectures import text_part
from ..ipc.models.checkpoint import read_stored_weights
from ..ipc.models.decoder_config import DecoderConfig, unread_keys
from ..ipc.models.encoder_config import EncoderConfig
from ..ipc.models.encoder_memory import encoder_cache_tokens, has_encoder
from ..ipc.models.gguf import is_gguf, read_gguf
from ..ipc.models.memory_plan import check_weights_fit
from ..ipc.models.quantization_config import CheckpointQuantization, parse_quantization
from ..ipc.models.quantized_tensors import saved_bytes
from ..kernels import registry
from ..kernels.registry import OpTable
from . import device as devices
from .groups.expert_group import ALL_EXPERTS, ExpertGroup
from .groups.tensor_group import ALONE, TensorGroup
from .kernel_choice import (
    check_invariance,
    check_kv_cache_dtype,
    check_latent_cache,
    check_quantization,
    chosen_kernels,
    warn_of_slow_heads,
    warn_of_slow_latents,
    warn_of_unused_kernels,
)
from .loras import adapted_modules, explored_modules
from .model import ImageEncoder, Model
from .models import ModelKind, find_model
from .models.images import ImageReader
from .models.layer_registry import replacements
from .models.layers import LayerFactory
from .models.packed_layers import PackedLayers
from .plugins import describe_module
from .result_checks import check_results
from .weights.loader import fill_with_random_weights, load_weights
from .weights.packed_cache import PackedCache

logger = logging.getLogger(__name__)


def select_operations(
    config: EngineConfig,
    shape: DecoderConfig | EncoderConfig,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    device: torch.device,
    cpu_isa: str,
    group: TensorGroup = ALONE,
) -> OpTable:
    """Selects the operations for a model of this shape, which the ranks of `group` share.

    Raises InvalidParameterError for an unknown kernel, and for what the chosen ones do not offer.
    """
    kernels = chosen_kernels(config, shape, device)
    head_dim = max(shape.layer(index).head_dim for index in range(shape.num_hidden_layers))
    facts = {
        "head_dim": head_dim,
        "num_heads": group.share(shape.num_attention_heads, "num_attention_heads"),
        "num_kv_heads": group.share(shape.num_key_value_heads, "num_key_value_heads"),
        "block_size": config.cache_config.block_size,
        "cpu_isa": cpu_isa,
        "kv_cache_dtype": kv_cache_dtype,
        "capability": devices.capability(device),
    }
    ops = registry.select(device, dtype, kernels, **facts)
    check_results(ops)
    if device.type == "cpu":
        check_invariance(config, ops, shape)
    warn_of_unused_kernels(ops, kernels)
    check_quantization(config.model_config.quantization, ops, kernels)
    if isinstance(shape, DecoderConfig) and shape.latent is not None:
        check_latent_cache(config.cache_config.kv_cache_dtype)
        warn_of_slow_latents(shape.head_dim, ops, kernels)
        return ops
    check_kv_cache_dtype(config.cache_config.kv_cache_dtype, ops, kernels)
    if not shape.is_bidirectional:
        warn_of_slow_heads(head_dim, ops, kernels)
    return ops


def make_encoder(
    config: EngineConfig, dtype: torch.dtype, device: torch.device, cpu_isa: str
) -> tuple[ImageEncoder, int] | None:
    """Makes the encoder of images of the configuration's model, unfilled, and says how many bytes
    its weights take; None: the model reads no images. It is whole where ranks divide the model. Its
    linear layers are quantized as those of the model are.
    """
    if config.model_config.vision is None:
        return None
    from ..ipc.models.vision_families import tower_of
    from .models.vision.encoder import VisionEncoder
    from .models.vision.tower import VisionTower
    from .program.encoder_program import RecordedTower, is_recordable

    tower = tower_of(config.model_config.vision)
    facts: dict[str, Any] = {"block_size": config.cache_config.block_size, "cpu_isa": cpu_isa}
    if tower.layer is not None:
        attention = tower.layer.attention
        facts |= {
            "head_dim": attention.head_dim,
            "num_heads": attention.heads,
            "num_kv_heads": attention.kv_heads,
        }
    ops = registry.select(device, dtype, config.device_config.kernels, **facts)
    make = LayerFactory(ops, dtype, device, config.model_config.quantization)
    model = VisionTower(make, tower)
    run = RecordedTower(model) if is_recordable(model, ops) else model
    return VisionEncoder(model, run, make), make.weights_bytes


def _warn_of_unused_layers(make: LayerFactory, model: str) -> None:
    """Logs which registered layers occur nowhere in the model that `make` has made."""
    for built_in, layer in replacements():
        chosen = make.chosen_layers.get(built_in)
        if chosen is not None and layer in chosen:
            continue
        reason = (
            f"the model has no layer of the kind {built_in}"
            if chosen is None
            else "its condition `when` holds for no layer, or another replaces them"
        )
        logger.warning(
            "%s replaces nothing in %s with %s: %s",
            describe_module(layer.__module__),
            model,
            getattr(layer, "__name__", repr(layer)),
            reason,
        )


class ModelBuilder:
    """Chooses how the configuration's model is made, and its operations.

    Raises ModelLoadError, InvalidParameterError (an unknown kernel).
    """

    def __init__(
        self,
        config: EngineConfig,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        device: torch.device,
        cpu_isa: str,
        group: TensorGroup = ALONE,
        expert_group: ExpertGroup = ALL_EXPERTS,
    ):
        """`group` holds the ranks that have the other parts of the layers, and `expert_group` the
        engines that have the other experts.
        """
        self.group, self.expert_group = group, expert_group
        self.config, self.dtype, self.device = config, dtype, device
        self.kv_cache_dtype, self.cpu_isa = kv_cache_dtype, cpu_isa
        self.weights_bytes = 0  # of the model built last
        model_config = config.model_config
        self.kind: ModelKind = find_model(model_config.hf_config, model_config.model_impl)
        self.shape = shape = self.kind.parse_config(model_config.hf_config)
        unread = unread_keys(model_config.hf_config)
        if isinstance(shape, EncoderConfig):
            unread = []
        if self.kind.is_fallback:  # transformers reads all keys but those that only a GGUF file has
            unread = [key for key in unread if "." in key]
        if unread:
            logger.warning("config.json: keys that Quire does not use: %s", ", ".join(unread))
        self.ops = select_operations(config, shape, dtype, kv_cache_dtype, device, cpu_isa, group)

    def build(self, directory: Path | None, report: Callable[[str, float], None]) -> Model:
        """Returns a model with the weights of `directory`, or with random ones, without a cache.
        Raises ModelLoadError, NotEnoughMemoryError.
        """
        model_config = self.config.model_config
        quantization = None if directory is None else self._quantization_of(directory)
        make = LayerFactory(
            self.ops,
            self.dtype,
            self.device,
            model_config.quantization,
            self.group,
            self.expert_group,
            self.config.lora_config,
            self._make_images(),
            has_draft_head=self.config.scheduler_config.has_draft_head,
            reads_blocks=quantization is not None or (directory is not None and is_gguf(directory)),
        )
        if quantization is not None:
            quantization = replace(
                quantization, keeps_fp8=make.multiplies_fp8, quantizes_to_fp8=make.quantizes_to_fp8
            )
        if self.config.lora_config.enable_lora and not self.shape.has_lm_head:
            problem = "takes no LoRA adapters: it does not generate text"
            raise InvalidParameterError("enable_lora", f"{self.kind.name} {problem}")
        model = self.kind.build(
            self.kind.parse_config(model_config.hf_config), make, model_config.max_model_len
        )
        _warn_of_unused_layers(make, self.kind.name)
        if make.adapter_rows is not None:
            model.use_adapters(make.adapter_rows, adapted_modules(model))
        made = None
        if has_encoder(self.config, self.group.stages.stage):
            made = make_encoder(self.config, self.dtype, self.device, self.cpu_isa)
        if made is not None:
            encoder, num_bytes = made
            model.use_encoder(encoder)
            make.weights_bytes += num_bytes
        kind = self._check_size(model, make, directory, quantization)
        if directory is None:
            fill_with_random_weights(model, model_config.seed, report, make.fill)
        else:
            cache = PackedCache.of(self.config, directory, self.group.place[0])
            packed = PackedLayers(model, cache)
            if not packed.restored():
                load_weights(model, directory, report, make.fill, quantization)
                vision = model_config.vision
                if model.encoder is not None and vision is not None and vision.file:
                    from .weights.mmproj import load_mmproj

                    load_mmproj(model.encoder, vision, report, make.fill)
                packed.keep()
        self.weights_bytes = make.weights_bytes
        if self.device.type == "cuda":
            size = self.weights_bytes / 2**30
            logger.info("the weights take %.2f GiB on %s, as %s", size, self.device, kind)
        if make.adapter_rows is not None and model.IS_FALLBACK:
            model.use_adapters(make.adapter_rows, explored_modules(model))
        return model

    def _make_images(self) -> ImageReader | None:
        """The table of encoded images, which the ranks with an encoder have and fill. None: the
        model reads no images.
        """
        vision = self.config.model_config.vision
        if vision is None:
            return None
        is_filled = has_encoder(self.config, self.group.stages.stage)
        num_rows = encoder_cache_tokens(self.config) if is_filled else 0
        return ImageReader(vision, num_rows, self.ops, self.dtype, self.device)

    def _check_size(
        self,
        model: Model,
        make: LayerFactory,
        directory: Path | None,
        quantization: CheckpointQuantization | None,
    ) -> str:
        """Checks that the model fits, and returns what its weights are. Its pages are allocated
        only when they are filled.
        """
        model_config = self.config.model_config
        num_bytes, kind = make.weights_bytes, model_config.quantization or model_config.dtype
        if directory is not None and is_gguf(directory) and make.multiplies_blocks:
            from .weights.gguf import bytes_of_blocks

            num_bytes = bytes_of_blocks(model, directory, model_config.dtype)
            kind = "blocks of the file"
        if directory is not None and quantization is not None and make.multiplies_blocks:
            shapes = (
                read_stored_weights(directory, quantization).kept
                if model.IS_FALLBACK
                else {name: list(tensor.shape) for name, tensor in model.weights()}
            )
            if saved := saved_bytes(shapes, quantization, self.dtype.itemsize):
                num_bytes, kind = num_bytes - saved, f"{quantization.method} weights"
        check_weights_fit(num_bytes, kind, devices.free_bytes(self.device))
        return kind

    def _quantization_of(self, directory: Path) -> CheckpointQuantization | None:
        """How the weights of `directory` are stored: like the model's own where there is no
        config.json.
        """
        hf_config = self.config.model_config.hf_config
        path = directory / "config.json"
        if directory != Path(self.config.model_config.model) and path.exists():
            hf_config = read_json(path)
        return parse_quantization(hf_config)

    def check_same_architecture(self, directory: Path) -> None:
        """Checks that the config.json or GGUF file of new weights, if there is one, describes the
        running model.

        Shapes do not show every difference. Raises ModelLoadError naming the first key that
        differs.
        """
        path = directory if is_gguf(directory) else directory / "config.json"
        if not path.exists():
            return
        model_config, kind = self.config.model_config, self.kind
        if is_gguf(path):
            from ..ipc.models.gguf_config import gguf_config

            hf_config = gguf_config(read_gguf(path))
        else:
            hf_config = text_part(read_json(path))
        described = find_model(hf_config, model_config.model_impl)
        if described.name != kind.name:
            raise ModelLoadError(
                f"{path}: the architecture is {described.name}, the engine runs {kind.name}"
            )
        known = model_config.hf_config
        # the architecture may have been converted (ipc/models/resolve_pooling.py)
        keys = (*model_config.hf_overrides, "architectures", "score_token_ids")
        overrides = {key: known[key] for key in keys if key in known}
        other = kind.parse_config(hf_config | overrides)
        for name in self.shape.__struct_fields__:
            if getattr(self.shape, name) != getattr(other, name):
                raise ModelLoadError(
                    f"{path}: {name} is {getattr(other, name)!r}, the engine runs a model with "
                    f"{getattr(self.shape, name)!r}"
                )
