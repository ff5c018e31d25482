"""How a model pools, from its configuration."""

from __future__ import annotations

import msgspec
import pytest
from quire.ipc.models.pooling import PoolerConfig, Pooling, resolve_pooling


def test_a_decoder_pools_its_last_token():
    pooling = resolve_pooling({})
    assert pooling == Pooling(tasks=("embed", "token_embed"), modes=("lasttoken",))
    assert pooling.activation == "normalize" and not pooling.reads_all_tokens


def test_a_user_changes_how_it_pools():
    pooling = resolve_pooling(
        {}, PoolerConfig(pooling_type="MEAN", use_activation=False, dimensions=8)
    )
    assert (pooling.modes, pooling.activation, pooling.dimensions) == (("mean",), "identity", 8)
    assert pooling.reads_all_tokens


def test_unknown_keys_and_values_are_refused():
    for wrong in ({"normalize": True}, {"pooling_type": "FIRST"}, {"dimensions": 0}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, PoolerConfig)
