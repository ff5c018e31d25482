"""instructor: objects from tools, JSON schemas and JSON mode."""

from typing import Literal

import instructor
import openai
from checks import QUESTION, run
from pydantic import BaseModel, ConfigDict

REQUIREMENTS = {"instructor": "instructor"}
DISTRIBUTION = "instructor"


class Color(BaseModel):
    """A color. Without other keys: a schema that allows them leaves their number to the model."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["red", "green"]


def extract(address: str, mode: instructor.Mode, **fields: object) -> Color:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{address}/v1", api_key="none"), mode=mode
    )
    return client.chat.completions.create(
        model="quire",
        messages=QUESTION,
        response_model=Color,
        max_retries=0,
        max_tokens=300,
        temperature=0,
        **fields,
    )


def check_tools(address: str, _: str) -> None:
    assert extract(address, instructor.Mode.TOOLS).name in ("red", "green")


def check_strict_tools(address: str, _: str) -> None:
    assert extract(address, instructor.Mode.TOOLS_STRICT).name in ("red", "green")


def check_json_schema(address: str, _: str) -> None:
    assert extract(address, instructor.Mode.JSON_SCHEMA).name in ("red", "green")


def check_json_o1(address: str, _: str) -> None:
    assert extract(address, instructor.Mode.JSON_O1).name in ("red", "green")


def check_partial_stream(address: str, _: str) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{address}/v1", api_key="none"), mode=instructor.Mode.TOOLS
    )
    parts = list(
        client.chat.completions.create_partial(
            model="quire", messages=QUESTION, response_model=Color, max_tokens=300, temperature=0
        )
    )
    assert parts[-1].name in ("red", "green")


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
