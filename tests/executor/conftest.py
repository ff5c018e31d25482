"""Fixtures of the executor's tests: tiny checkpoints and transformers' own model of each, made once
per session.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire.tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread: the machine is shared, and with one thread the order of summation
    is fixed.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[..., Path]:
    """tiny(kind, **arguments of save_tiny_model) returns the checkpoint's directory. The same
    arguments give the same directory.
    """
    made: dict[str, Path] = {}

    def make(kind: str = "qwen2", **arguments) -> Path:
        key = repr((kind, sorted(arguments.items())))
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp(kind), kind, **arguments)
        return made[key]

    return make


@pytest.fixture(scope="session")
def oracle() -> Callable[..., torch.nn.Module]:
    """oracle(directory, dtype) returns transformers' model of a checkpoint."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    loaded: dict[tuple[Path, torch.dtype], torch.nn.Module] = {}

    def load(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        if (directory, dtype) not in loaded:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
            for module in model.modules():
                # transformers 5.17 does not read these keys of gpt-oss: it uses 1.702 and 7
                if type(module).__name__ == "GptOssExperts":
                    module.alpha = getattr(model.config, "swiglu_alpha", module.alpha)
                    module.limit = model.config.swiglu_limit
            loaded[directory, dtype] = model
        return loaded[directory, dtype]

    return load
