"""ServerConfig: names that differ from the engine's, descriptions for --help, and ranges."""

import msgspec
import pytest
from quire.frontend.server.config import ServerConfig, server_fields
from quire.ipc.config import config_fields


def test_names_are_unique_over_both_trees() -> None:
    assert not server_fields().keys() & config_fields().keys()


@pytest.mark.parametrize("name", sorted(server_fields()))
def test_every_field_has_a_description(name: str) -> None:
    field = server_fields()[name]
    notes = [note for note in field.type.__metadata__ if isinstance(note, str)]
    assert notes == [field.help] and field.help.endswith(".")


@pytest.mark.parametrize(
    "bad",
    [
        {"port": 65536},
        {"port": -1},
        {"unknown_params": "maybe"},
        {"header_timeout_s": 0},
        {"api_keys": []},
    ],
)
def test_values_out_of_range_are_refused(bad: dict) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, ServerConfig)
