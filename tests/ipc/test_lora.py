"""LoRARequest: checks, and the wire."""

import msgspec
import pytest
from quire import InvalidParameterError, LoRARequest
from quire.ipc.codec import MessageDecoder, MessageEncoder
from quire.ipc.messages import ClientMessage, EngineCoreRequest
from quire.ipc.params import SamplingParams


def test_names_and_order_are_vllms() -> None:
    request = LoRARequest("sql", 1, "/adapters/sql")
    assert request == LoRARequest(lora_name="sql", lora_int_id=1, lora_path="/adapters/sql")
    assert request.load_inplace is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_name": ""}, "lora_name: must have 1 to 256 characters, none of them NUL, got 0"),
        ({"lora_name": "a" * 257}, "lora_name: must have 1 to 256 characters"),
        ({"lora_name": 7}, "lora_name: must be a string, got 7"),
        ({"lora_name": "\ud800"}, "lora_name: must be text that UTF-8 can hold"),
        ({"lora_int_id": 0}, "lora_int_id: must be an integer between 1 and"),
        ({"lora_int_id": True}, "lora_int_id: must be an integer between 1 and"),
        ({"lora_path": ""}, "lora_path: must have 1 to 4096 characters"),
        ({"lora_path": "a\0b"}, "lora_path: must have 1 to 4096 characters, none of them NUL"),
        ({"load_inplace": 1}, "load_inplace: must be True or False, got 1"),
    ],
)
def test_bad_values_are_refused_by_name(changes, words) -> None:
    values = {"lora_name": "sql", "lora_int_id": 1, "lora_path": "/adapters/sql"} | changes
    with pytest.raises(InvalidParameterError, match=words):
        LoRARequest(**values)


def test_a_request_carries_its_adapter() -> None:
    request = EngineCoreRequest(
        "a", [1], SamplingParams(), lora_request=LoRARequest("sql", 1, "/adapters/sql", True)
    )
    frames = MessageEncoder(2**20).encode(request)
    assert MessageDecoder(ClientMessage, 2**20).decode(frames) == request
    with pytest.raises(msgspec.ValidationError, match="lora_int_id"):
        msgspec.convert(["sql", 0, "/adapters/sql"], LoRARequest)
