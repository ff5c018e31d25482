"""Questions that tools answer: the tools, the right call, the tool's result and the reply.

A catalogue (`tools.json`) holds the kinds of tools: arithmetic, look-ups with one argument, calls
without one. `tool_question` draws a question with its tools; `tool_document` makes training text
of several, in exactly the form in which the model's chat template renders them.
"""

import json
import zlib
from pathlib import Path
from random import Random
from typing import NamedTuple

import data
import documents

TOOLS = json.loads(Path(__file__).with_name("tools.json").read_text(encoding="utf-8"))
# weights in the loss: turns without their tools, what every call holds, the tool's name
UNSEEN, FORM, CHOICE = 0.0, 1.0, 8.0


class Tool(NamedTuple):
    """`parameters` maps each parameter's name to its JSON type."""

    name: str
    parameters: dict[str, str]

    def as_openai(self) -> dict:
        """The form in which a client sends it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": self.name, "parameters": schema}}


class ToolQuestion(NamedTuple):
    question: str
    tools: list[Tool]
    name: str  # of the right tool; "" where no tool fits
    arguments: dict[str, str | int]
    result: str
    reply: str

    def call(self) -> str:
        """The call in Hermes' form."""
        content = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{content}\n</tool_call>"


def question_turn(question: str, tools: list[Tool]) -> str:
    """A user's turn with its tools, as the chat template renders it."""
    lines = [json.dumps({"name": name, "arguments": kinds}) for name, kinds in tools]
    block = "".join(f"{line}\n" for line in lines)
    return f"{question}\n\n<tools>\n{block}</tools>" if tools else question


def result_turn(result: str) -> str:
    return f"<tool_response>\n{result}\n</tool_response>"


def _is_held_out(question: str) -> bool:
    """A tenth of all questions never enters the training text."""
    return zlib.crc32(question.encode()) % 10 == 0


def _value(rng: Random, kind: str, invented: float) -> str:
    words = data.WORDS
    if rng.random() < invented and kind != "numbers":
        return " ".join(data.invented_word(rng) for _ in range(rng.choice([1, 1, 2])))
    if kind == "items":
        item = rng.choice(words.objects)
        return f"{rng.choice(words.colours)} {item}" if rng.random() < 0.8 else item
    if kind == "numbers":
        return str(rng.randint(1, 10 ** rng.randint(1, 5) - 1))
    if kind == "people":
        return rng.choice(words.girls + words.boys)
    if kind == "words":
        return rng.choice(words.animals + words.objects + words.jobs + words.traits)
    return rng.choice(TOOLS["countries"] if kind == "countries" else getattr(words, kind))


def _fill(rng: Random, form: str, **slots: str) -> str:
    words = data.WORDS
    return form.format(
        n=rng.randint(1, 99),
        k=rng.randint(100, 9999),
        h=rng.randint(10, 23),
        m=rng.randint(10, 59),
        d=rng.randint(1, 9),
        c=rng.choice(words.cities),
        j=rng.choice(words.jobs),
        o=rng.choice(words.objects),
        t=rng.choice(words.traits),
        p=rng.choice(words.girls + words.boys),
        **slots,
    )


def _reply(form: str, result: str, **slots: str) -> str:
    """A whole sentence is repeated as it is; anything else is put into a sentence."""
    return result if result[-1] in ".!?" else form.format(r=result, **slots)


def _operand(rng: Random) -> int:
    return rng.randint(0, 10 ** rng.choice([1, 2, 2, 3, 3, 4]) - 1)


def _arithmetic(rng: Random, invented: float) -> tuple[Tool, str, dict, str, str]:
    first, second = _operand(rng), max(1, _operand(rng))
    operator = rng.choice("++-**/")
    result = {
        "+": first + second,
        "-": first - second,
        "*": first * second,
        "/": round(first / second, 2),
    }[operator]
    result = f"{result:g}" if isinstance(result, float) else str(result)
    reply = f"The result is {result}."
    if rng.random() < 0.3:
        kind = TOOLS["calculators"]
        expression = f"{first} {operator} {second}"
        name = rng.choice(kind["parameters"])
        tool = Tool(rng.choice(kind["names"]), {name: "string"})
        question = rng.choice(kind["questions"]).format(e=expression)
        return tool, question, {name: expression}, result, reply
    kind = TOOLS["operations"][operator]
    names = rng.choice(TOOLS["operands"])
    tool = Tool(rng.choice(kind["names"]), dict.fromkeys(names, rng.choice(["number", "integer"])))
    question = rng.choice(kind["questions"]).format(a=first, b=second)
    return tool, question, dict(zip(names, (first, second))), result, reply


def _lookup(rng: Random, invented: float) -> tuple[Tool, str, dict, str, str]:
    kind = rng.choice(TOOLS["lookups"])
    value, name = _value(rng, kind["values"], invented), rng.choice(kind["parameters"])
    is_integer = kind["values"] == "numbers" and rng.random() < 0.5
    tool = Tool(rng.choice(kind["names"]), {name: "integer" if is_integer else "string"})
    question = rng.choice(kind["questions"]).format(v=value)
    result = _fill(rng, rng.choice(kind["results"]), v=value)
    arguments = {name: int(value) if is_integer else value}
    return tool, question, arguments, result, _reply(kind["answer"], result, v=value)


def _invented_lookup(rng: Random, invented: float) -> tuple[Tool, str, dict, str, str]:
    """A look-up whose subject, and so whose name, is a word that the catalogue does not hold."""
    words = data.WORDS
    subject = data.invented_word(rng).lower() if rng.random() < 0.6 else rng.choice(words.objects)
    name = rng.choice(["key", "name", "item", "city", "id", "query", "thing"])
    tool = Tool(
        rng.choice(["get_{}", "find_{}", "{}_of", "lookup_{}"]).format(subject), {name: "string"}
    )
    kind = rng.choice(["cities", "items", "people", "words"])
    value = _value(rng, kind, invented)
    question = rng.choice(
        ["What is the {s} of {v}?", "Find the {s} of {v}.", "Tell me the {s} of {v}."]
    ).format(s=subject, v=value)
    result = _fill(rng, rng.choice(["{n}", "{k}", "{t}", "{o}"]))
    return tool, question, {name: value}, result, f"The {subject} of {value} is {result}."


def _pair(rng: Random, invented: float) -> tuple[Tool, str, dict, str, str]:
    """A call with a word and a number."""
    kind = rng.choice(TOOLS["pairs"])
    value, number = _value(rng, kind["values"], invented), rng.randint(1, 20)
    names = [rng.choice(choices) for choices in kind["parameters"]]
    tool = Tool(rng.choice(kind["names"]), dict(zip(names, ("string", "integer"))))
    question = rng.choice(kind["questions"]).format(v=value, n=number)
    result = rng.choice(kind["results"]).format(v=value, n=number, k=rng.randint(1, 30))
    reply = _reply(kind["answer"], result, v=value)
    return tool, question, dict(zip(names, (value, number))), result, reply


def _plain_call(rng: Random, invented: float) -> tuple[Tool, str, dict, str, str]:
    kind = rng.choice(TOOLS["plain_calls"])
    result = _fill(rng, rng.choice(kind["results"]))
    return (
        Tool(rng.choice(kind["names"]), {}),
        rng.choice(kind["questions"]),
        {},
        result,
        _reply(kind["answer"], result),
    )


MAKERS = [(_arithmetic, 4), (_lookup, 5), (_invented_lookup, 1), (_pair, 1), (_plain_call, 1)]


def _is_alike(tool: Tool, other: Tool) -> bool:
    """Whether both would answer the same questions."""
    arithmetic = [kind["names"] for kind in TOOLS["operations"].values()]
    calculators = TOOLS["calculators"]["names"]
    families = [kind["names"] for kind in TOOLS["lookups"] + TOOLS["pairs"]]
    families += [kind["names"] for kind in TOOLS["plain_calls"]]
    families += [names + calculators for names in arithmetic]
    return tool.name == other.name or any(
        tool.name in names and other.name in names for names in families
    )


def tool_question(
    rng: Random, num_tools: int = 2, invented: float = 0.15, held_out: bool = False
) -> ToolQuestion:
    """A question and `num_tools` tools, of which one answers it.

    With two tools, one is for arithmetic and one is another, in either order. `invented` is the
    share of arguments that are made-up words; `held_out` questions never enter the training text.
    """
    makers, weights = zip(*MAKERS)
    while True:
        maker = rng.choices(makers, weights)[0]
        tool, question, arguments, result, reply = maker(rng, invented)
        if _is_held_out(question) == held_out or (maker is _plain_call and not held_out):
            break
    tools = [tool]
    while len(tools) < num_tools:
        must_add_arithmetic = num_tools == 2 and maker is not _arithmetic
        other = (_arithmetic if must_add_arithmetic else rng.choices(makers[1:], weights[1:])[0])(
            rng, invented
        )[0]
        if not any(_is_alike(other, known) for known in tools):
            tools.append(other)
    rng.shuffle(tools)
    return ToolQuestion(question, tools, tool.name, arguments, result, reply)


def _no_tool_question(rng: Random) -> ToolQuestion:
    """A question that no tool answers, with tools beside it: the model answers by itself."""
    exchange = documents.plain_exchange(rng)
    tools = tool_question(rng, rng.randint(1, 3)).tools
    if rng.random() < 0.12:
        exchange = documents.arithmetic_exchange(rng)
        tools = [_lookup(rng, 0.0)[0] for _ in range(rng.randint(1, 2))]
    return ToolQuestion(exchange.question, tools, "", {}, "", exchange.reply)


def _result_text(rng: Random, result: str) -> str:
    return json.dumps({"result": result}) if rng.random() < 0.1 else result


def _turns(rng: Random, item: ToolQuestion, with_tools: bool) -> list[data.Segment]:
    """The turns of one question; `with_tools` only for the last one of a conversation."""
    question = question_turn(item.question, item.tools if with_tools else [])
    turn = data.chat_text([{"role": "user", "content": question}])
    if not item.name:
        return [(turn, data.CONTEXT), (item.reply, data.TEXT), (data.TURN_END, data.TEXT)]
    segments = [(turn, data.CONTEXT), *_call_segments(item, with_tools)]
    if with_tools and rng.random() < 0.5:
        return segments
    result = result_turn(_result_text(rng, item.result))
    return [
        *segments,
        ("\n" + data.chat_text([{"role": "user", "content": result}]), data.CONTEXT),
        (item.reply + data.TURN_END, data.ANSWER if with_tools else UNSEEN),
    ]


def _call_segments(item: ToolQuestion, is_asked: bool) -> list[data.Segment]:
    """The call, cut where the tokenizer cuts anyway: the name and the values carry the weight."""
    if not is_asked:
        return [(item.call() + data.TURN_END, UNSEEN)]
    start, name, rest = item.call().partition(item.name)
    segments = [(start, FORM), (name, CHOICE)]
    for value in item.arguments.values():
        text = json.dumps(value, ensure_ascii=False).strip('"')
        before, _, rest = rest.partition(f'"{text}"' if isinstance(value, str) else text)
        if isinstance(value, str):
            before, rest = before + '"', '"' + rest
        segments += [(before, FORM), (text, data.ANSWER)]
    return [*segments, (rest + data.TURN_END, data.TEXT)]


def tool_document(rng: Random, max_tokens: int) -> list[data.Segment]:
    """A conversation whose last question comes with tools."""
    segments: list[data.Segment] = []
    if rng.random() < 0.3:
        system = rng.choice(TOOLS["systems"])
        if rng.random() < 0.2:
            system = " ".join(data.invented_word(rng) for _ in range(rng.randint(2, 8))) + "."
        segments.append((data.chat_text([{"role": "system", "content": system}], False), UNSEEN))
    for _ in range(rng.choice([0, 0, 0, 0, 0, 0, 1, 2])):
        earlier = tool_question(rng, 1)
        if rng.random() < 0.4:
            earlier = _no_tool_question(rng)
        segments += [*_turns(rng, earlier, False), ("\n", data.CONTEXT)]
    if rng.random() < 0.2:
        last = _no_tool_question(rng)
    else:
        num_tools = rng.choices([1, 2, 3, 4], [2, 6, 2, 1])[0]
        last = tool_question(rng, num_tools, rng.choice([0.05, 0.5]))
    return [*segments, *_turns(rng, last, True)]


def word_drill(rng: Random, max_tokens: int) -> list[data.Segment]:
    """Words into JSON strings and numbers into JSON numbers, with nothing beside them."""
    segments: list[data.Segment] = []
    for _ in range(rng.randint(2, 6)):
        values = [
            rng.choice(
                [
                    data.invented_word(rng),
                    _value(rng, rng.choice(["items", "people", "cities"]), 0.5),
                ]
            )
            if rng.random() < 0.7
            else _operand(rng)
            for _ in range(rng.randint(1, 3))
        ]
        text = " ".join(map(str, values))
        pairs = dict(zip(rng.sample("abxyz", len(values)), values))
        segments += [
            (f"Write {text} as {', '.join(pairs)}:\n", data.CONTEXT),
            (json.dumps(pairs) + "\n", data.ANSWER),
        ]
    return segments
