"""Pydantic AI against the server: an agent with two tools, and an object as its output."""

from checks import run
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

REQUIREMENTS = {"pydantic_ai": "pydantic-ai-slim[openai]"}
DISTRIBUTION = "pydantic-ai-slim"
SETTINGS = {"temperature": 0, "max_tokens": 200}


def model(address: str) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    return OpenAIChatModel("quire", provider=provider)


def agent(address: str) -> Agent:
    made = Agent(model(address), instructions="You are a helpful agent.")

    @made.tool_plain
    def multiply(a: int, b: int) -> int:
        """The product of two numbers."""
        return a * b

    @made.tool_plain
    def get_population(city: str) -> int:
        """How many people live in a city."""
        return {"Oslo": 717710}[city]

    return made


def check_arithmetic(address: str, _: str) -> None:
    result = agent(address).run_sync("What is 12 times 12?", model_settings=SETTINGS)
    assert result.output == "The result is 144."


def check_lookup(address: str, _: str) -> None:
    result = agent(address).run_sync("What is the population of Oslo?", model_settings=SETTINGS)
    assert result.output == "The population of Oslo is 717710."


def check_stream(address: str, _: str) -> None:
    with agent(address).run_stream_sync("Multiply 3 by 5.", model_settings=SETTINGS) as result:
        assert list(result.stream_text())[-1] == "The result is 15."


class Color(BaseModel):
    """A color."""

    name: str


def check_output_object(address: str, _: str) -> None:
    made = Agent(model(address), output_type=Color)
    result = made.run_sync("Which colour is the grass?", model_settings=SETTINGS)
    assert isinstance(result.output, Color)


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
