"""Adapters of a rank, through the executor: reading, adding, removing."""

import pytest
from quire import InvalidParameterError, LoRARequest
from quire.executor.loras import Loras

REQUEST = LoRARequest("sql", 1, "/nowhere/sql")


def test_a_rank_without_adapters() -> None:
    loras = Loras()
    assert loras.list() == set()
    assert loras.remove(1) is False
    with pytest.raises(InvalidParameterError, match="lora_request: sql: LoRA adapters are not"):
        loras.read(REQUEST)
