"""OpenAI's Agents SDK against the server: an agent calls tools and answers from their results."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import run
from openai import AsyncOpenAI

REQUIREMENTS = {"openai_agents": "openai-agents"}
DISTRIBUTION = "openai-agents"
CITIES: list[str] = []
SUMS: list[tuple[int, int]] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    CITIES.append(city)
    return f"The weather in {city} is sunny."


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    SUMS.append((a, b))
    return a + b


def agent(address: str) -> Agent:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none")
    return Agent(
        name="Assistant",
        instructions="You are a helpful agent.",
        model=OpenAIChatCompletionsModel(model="quire", openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=200),
        tools=[get_weather, add],
    )


def check_lookup(address: str, _: str) -> None:
    result = Runner.run_sync(agent(address), "What is the weather in Tokyo?", max_turns=4)
    assert (CITIES, result.final_output) == (["Tokyo"], "The weather in Tokyo is sunny.")


def check_arithmetic(address: str, _: str) -> None:
    result = Runner.run_sync(agent(address), "What is 47 plus 38?", max_turns=4)
    assert SUMS == [(47, 38)] and "85" in result.final_output


def check_stream(address: str, _: str) -> None:
    async def types() -> list[str]:
        result = Runner.run_streamed(agent(address), "What is the weather in Rome?", max_turns=4)
        items = [event async for event in result.stream_events()]
        return [event.item.type for event in items if event.type == "run_item_stream_event"]

    found = asyncio.run(types())
    assert found == ["tool_call_item", "tool_call_output_item", "message_output_item"]


def check_without_a_tool(address: str, _: str) -> None:
    result = Runner.run_sync(agent(address), "Hello!", max_turns=4)
    assert result.final_output == "Hello! How can I help you?"


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
