"""What a user may change of how a model pools."""

from __future__ import annotations

import msgspec
import pytest
from quire.ipc.models.pooling import PoolerConfig


def test_unknown_keys_and_values_are_refused():
    for wrong in ({"normalize": True}, {"pooling_type": "FIRST"}, {"dimensions": 0}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, PoolerConfig)
