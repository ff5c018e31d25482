"""Keys of an encoder's config.json that no encoder can have."""

from __future__ import annotations

from typing import Any

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.vision_config import VisionConfig
from quire.ipc.models.vision_families import tower_of

HEADS = {
    "qwen3_vl": "num_heads",
    "qwen2_5_vl": "num_heads",
    "gemma3": "num_attention_heads",
    "internvl": "num_attention_heads",
}


def config(family: str, **fields: Any) -> VisionConfig:
    return VisionConfig(family=family, hidden_size=64, image_token_id=7, unit=8, **fields)


@pytest.mark.parametrize("family", HEADS)
def test_heads_have_equal_parts(family: str) -> None:
    name = HEADS[family]
    tower = {"hidden_size": 32, name: 5}
    with pytest.raises(ModelLoadError, match=rf"{name} must be a divisor of 32, got 5"):
        tower_of(config(family, tower=tower))
    heads = tower_of(config(family, tower=tower | {name: 4})).layer.attention
    assert (heads.heads, heads.head_dim) == (4, 8)


def test_what_the_encoder_reads_is_rescaled_as_the_file_says() -> None:
    """(byte * rescale_factor - mean) / std, for bytes over 255."""
    tower = tower_of(config("qwen3_vl"))
    assert (tower.mean, tower.std) == ((0.5,) * 3, (0.5,) * 3)
    tower = tower_of(config("qwen3_vl", processor={"rescale_factor": 2 / 255}))
    assert tower.mean == pytest.approx((0.25,) * 3) and tower.std == pytest.approx((0.25,) * 3)
    tower = tower_of(config("qwen3_vl", processor={"do_rescale": False, "do_normalize": False}))
    assert (tower.mean, tower.std) == ((0.0,) * 3, (1 / 255,) * 3)


@pytest.mark.parametrize("name", ["do_rescale", "do_normalize", "rescale_factor", "image_mean"])
@pytest.mark.parametrize("value", ["x", -1, [], [1, 2, float("nan")], 10**400])
def test_malformed_values_name_their_file(name: str, value: Any) -> None:
    file = "processor_config.json"
    with pytest.raises(ModelLoadError, match=rf"{file}: {name} must be"):
        tower_of(config("qwen3_vl", processor={name: value}, processor_file=file))


@pytest.mark.parametrize("std", [[0.5, 0.0, 0.5], [-1.0, 1.0, 1.0]])
def test_deviations_of_channels_are_positive(std: list[float]) -> None:
    """Pixels are divided by them."""
    with pytest.raises(ModelLoadError, match=r"image_std must be a list of 3 numbers above 0"):
        tower_of(config("qwen3_vl", processor={"image_std": std}))
