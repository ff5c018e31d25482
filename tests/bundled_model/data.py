"""The bundled model's text: a generator of checkable prompts.

Public: `recall_prompt addition_prompt subtraction_prompt copy_prompt json_prompt translation_prompt
story_prompt chat_prompt` return a `Sample`; the `*_exchange` functions return a turn and its reply;
`chat_text` renders ChatML. documents.py makes training text of them.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import NamedTuple

WORDS = SimpleNamespace(
    **json.loads(Path(__file__).with_name("grammar.json").read_text(encoding="utf-8"))
)
OPENINGS = SimpleNamespace(
    **json.loads(Path(__file__).with_name("openings.json").read_text(encoding="utf-8"))
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You are Quire, a small and friendly assistant.",
    "Answer briefly.",
]

Segment = tuple[str, float]  # text, and the weight of its tokens in the training loss
CONTEXT, TEXT, ANSWER = 0.15, 1.0, 3.0  # what is given, what is written freely, what can be checked
CHARS_PER_TOKEN = 4.3  # of the bundled tokenizer on this text, to plan the length of a document


class Sample(NamedTuple):
    """A prompt for the model, the text that its output must contain, and the whole ideal output
    without its end token.
    """

    prompt: str
    answer: str
    completion: str


class Exchange(NamedTuple):
    """One turn of a user, the reply, and the checkable part of the reply (a substring of it)."""

    question: str
    reply: str
    answer: str


def estimate_tokens(text: str) -> int:
    """About what the bundled tokenizer says, without it: words, single digits and punctuation
    marks.
    """
    return len(re.findall(r"\d|[^\W\d]+|[^\w\s]", text))


def chat_text(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """ChatML, exactly as the model's chat template renders it."""
    turns = [
        f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n" for message in messages
    ]
    return "".join(turns) + (f"{TURN_START}assistant\n" if add_generation_prompt else "")


def chat_sample(exchange: Exchange) -> Sample:
    prompt = chat_text([{"role": "user", "content": exchange.question}])
    return Sample(prompt, exchange.answer, exchange.reply)


# Stories and translation


def _slots_of_story(rng: Random, kind: str) -> dict[str, str]:
    """The cast of one story; pronouns follow the hero's name."""
    is_girl = rng.random() < 0.5
    own_kind, friend_kind, spare_kind = rng.sample(WORDS.animals, 3)
    if not kind:
        kind = ("girl" if is_girl else "boy") if rng.random() < 0.2 else own_kind
    name = rng.choice(WORDS.girls if is_girl else WORDS.boys)
    friend = next(other for other in rng.sample(WORDS.girls + WORDS.boys, 2) if other != name)
    he, him, his, his_own = (
        ("she", "her", "her", "hers") if is_girl else ("he", "him", "his", "his")
    )
    trait, friend_trait = rng.sample(WORDS.traits, 2)
    return dict(
        name=name,
        kind=kind,
        trait=trait,
        he=he,
        him=him,
        his=his,
        his_own=his_own,
        He=he.capitalize(),
        His=his.capitalize(),
        friend=friend,
        friend_kind=spare_kind if friend_kind == kind else friend_kind,
        friend_trait=friend_trait,
        place=rng.choice(WORDS.places),
        spot=rng.choice(WORDS.spots),
        thing=rng.choice(WORDS.things),
        food=rng.choice(WORDS.foods),
        hobby=rng.choice(WORDS.hobbies),
    )


def story_sentences(rng: Random, kind: str = "") -> list[str]:
    """One story of seven to nine sentences; its hero is an animal of `kind` if that is given."""
    slots = _slots_of_story(rng, kind)
    templates = [rng.choice(WORDS.openings[:4] if rng.random() < 0.6 else WORDS.openings)]
    templates += rng.sample(WORDS.middles, rng.randint(1, 2))
    templates += [rng.choice(step) for step in rng.choice(WORDS.plots)]
    templates.append(rng.choice(WORDS.endings))
    return [
        re.sub(r"\b([Aa]) (?=[aeiou]|honest)", r"\1n ", template.format(**slots))
        for template in templates
    ]


def story(rng: Random, kind: str = "") -> str:
    return " ".join(story_sentences(rng, kind))


def chinese_story(rng: Random) -> str:
    first, second = rng.sample(sorted(WORDS.zh_animals.values()), 2)
    slots = dict(
        a=first,
        b=second,
        c=rng.choice(sorted(WORDS.zh_colours.values())),
        p=rng.choice(sorted(WORDS.zh_places.values())),
        f=rng.choice(sorted(WORDS.zh_foods.values())),
    )
    return "".join(rng.choice(step) for step in WORDS.zh_story).format(**slots)


def translation_exchange(rng: Random) -> Exchange:
    animal, animal_zh = rng.choice(list(WORDS.zh_animals.items()))
    colour, colour_zh = rng.choice(list(WORDS.zh_colours.items()))
    food, food_zh = rng.choice(list(WORDS.zh_foods.items()))
    place, place_zh = rng.choice(list(WORDS.zh_places.items()))
    english, chinese = rng.choice(
        [
            (f"The {animal} is {colour}.", f"{animal_zh}是{colour_zh}的。"),
            (f"The {animal} likes {food}.", f"{animal_zh}喜欢{food_zh}。"),
            (f"The {animal} is in {place}.", f"{animal_zh}在{place_zh}。"),
            (f"I see a {colour} {animal}.", f"我看见一只{colour_zh}的{animal_zh}。"),
            (f"I like {food}.", f"我喜欢{food_zh}。"),
            (f"This is a {animal}.", f"这是一只{animal_zh}。"),
        ]
    )
    if rng.random() < 0.7:
        return Exchange(f"Translate to Chinese: {english}", chinese, chinese)
    return Exchange(f"Translate to English: {chinese}", english, english)


def translation_prompt(rng: Random) -> Sample:
    return chat_sample(translation_exchange(rng))


def story_prompt(rng: Random, chat: bool = False) -> Sample:
    """`Tell me a story about a fox.` (the answer is the hero's kind), or the first four words of a
    story (nothing to check).
    """
    if chat:
        kind = rng.choice(WORDS.animals)
        return chat_sample(
            Exchange(f"Tell me a story about {with_article(kind)}.", story(rng, kind), kind)
        )
    text = story(rng)
    start = " ".join(text.split(" ")[:4])
    return Sample(start, "", text.removeprefix(start))


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


# Arithmetic


def is_held_out(first: int, operator: str, second: int) -> bool:
    """A tenth of the sums of two-digit numbers is never trained on; a hash, so that it follows no
    digit.
    """
    return zlib.crc32(f"{first} {operator} {second}".encode()) % 10 == 0


def _operands(rng: Random, operator: str, num_digits: int, held_out: bool) -> tuple[int, int]:
    """Two numbers of up to `num_digits` digits; held-out ones have two digits each."""
    low = 10 if held_out else 0
    while True:
        first, second = rng.randint(low, 10**num_digits - 1), rng.randint(low, 10**num_digits - 1)
        if operator == "-" and first < second:
            first, second = second, first
        if num_digits == 1 or is_held_out(first, operator, second) == held_out:
            return first, second


def sum_text(
    rng: Random, operator: str, num_digits: int = 2, held_out: bool = False
) -> tuple[str, int]:
    first, second = _operands(rng, operator, num_digits, held_out)
    result = {"+": first + second, "-": first - second, "*": first * second}[operator]
    return f"{first} {operator} {second}", result


def sum_exchange(rng: Random, operator: str, held_out: bool = False) -> Exchange:
    expression, result = sum_text(
        rng,
        operator,
        1 if operator == "*" or (not held_out and rng.random() < 0.15) else 2,
        held_out,
    )
    form = rng.choice(["What is {}?", "What is {}?", "Calculate {}.", "{} = ?"])
    return Exchange(form.format(expression), f"{expression} = {result}", str(result))


def addition_prompt(rng: Random, chat: bool = False, operator: str = "+") -> Sample:
    """A held-out sum of two two-digit numbers: `12 + 34 =` -> ` 46`, or in a chat turn -> `12 + 34
    = 46`.
    """
    if chat:
        return chat_sample(sum_exchange(rng, operator, held_out=True))
    expression, result = sum_text(rng, operator, 2, held_out=True)
    return Sample(f"{expression} =", str(result), f" {result}")


def subtraction_prompt(rng: Random, chat: bool = False) -> Sample:
    return addition_prompt(rng, chat, operator="-")


# Copying and JSON


def invented_word(rng: Random) -> str:
    """An invented word of two to four syllables."""
    consonants, vowels = ("bcdfghjklmnprstvwz", "aeiou")
    word = "".join(
        rng.choice(consonants) + rng.choice(vowels) + rng.choice(["", "", rng.choice(consonants)])
        for _ in range(rng.randint(1, 3))
    )
    return word.capitalize() if rng.random() < 0.6 else word


def _copy_text(rng: Random, max_words: int = 24) -> str:
    """Words in no order, invented words and numbers: nothing that could be guessed instead of
    copied.
    """
    if rng.random() < 0.25:
        return " ".join(story_sentences(rng)[: rng.randint(1, 3)])
    pool = rng.choice(
        [
            WORDS.colours + WORDS.objects + WORDS.animals,
            WORDS.girls + WORDS.boys + WORDS.cities,
            None,
        ]
    )
    words = []
    for _ in range(rng.randint(2, max_words)):
        kind = rng.random()
        if kind < 0.15:
            words.append(str(rng.randint(0, 9999)))
        elif pool and kind < 0.8:
            words.append(rng.choice(pool))
        else:
            words.append("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 6))))
    return " ".join(words)


def copy_exchange(rng: Random, max_words: int = 24) -> Exchange:
    text = _copy_text(rng, max_words)
    return Exchange(
        rng.choice(["Repeat after me: ", "Repeat this: ", "Copy this text: "]) + text, text, text
    )


def copy_prompt(rng: Random, chat: bool = False, max_words: int = 24) -> Sample:
    """`Text: plum 7 kz` newline `Copy:` -> ` plum 7 kz`, or in a chat turn."""
    if chat:
        return chat_sample(copy_exchange(rng, max_words))
    text = _copy_text(rng, max_words)
    return Sample(f"Text: {text}\nCopy:", text, f" {text}")


def _record(rng: Random) -> tuple[str, dict[str, str | int]]:
    """A sentence that describes a record, and the record."""
    name, age, city, job = (
        rng.choice(WORDS.girls + WORDS.boys),
        rng.randint(1, 99),
        rng.choice(WORDS.cities),
        rng.choice(WORDS.jobs),
    )
    kind, colour, item = (
        rng.choice(WORDS.animals),
        rng.choice(WORDS.colours),
        rng.choice(WORDS.objects),
    )
    price, count = rng.randint(1, 999), rng.randint(1, 99)
    return rng.choice(
        [
            (
                f"{name} is {age} years old, lives in {city} and works as a {job}.",
                {"name": name, "age": age, "city": city, "job": job},
            ),
            (
                f"The {job} {name} from {city} is {age} years old.",
                {"name": name, "age": age, "city": city, "job": job},
            ),
            (
                f"{name} is {age} years old and lives in {city}.",
                {"name": name, "age": age, "city": city},
            ),
            (
                f"{name} is a {colour} {kind} and {age} years old.",
                {"name": name, "kind": kind, "colour": colour, "age": age},
            ),
            (f"A {kind} named {name} is {colour}.", {"name": name, "kind": kind, "colour": colour}),
            (
                f"The shop has {count} {colour} items of type {item} for {price} coins each.",
                {"item": item, "colour": colour, "count": count, "price": price},
            ),
            (
                f"A {colour} {item} costs {price} coins.",
                {"item": item, "colour": colour, "price": price},
            ),
        ]
    )


def json_exchange(rng: Random) -> Exchange:
    description, record = _record(rng)
    request = rng.choice(
        ["Write this as JSON: ", "Write a JSON object for this record: ", "Describe as JSON: "]
    )
    return Exchange(request + description, json.dumps(record), json.dumps(record))


def json_prompt(rng: Random, chat: bool = False) -> Sample:
    """`Record: Anna is 34 ...` newline `JSON:` -> ` {"name": "Anna", ...}`, or in a chat turn."""
    if chat:
        return chat_sample(json_exchange(rng))
    description, record = _record(rng)
    return Sample(f"Record: {description}\nJSON:", json.dumps(record), " " + json.dumps(record))


# Recall over a distance


class Fact(NamedTuple):
    attribute: str
    key: str
    code: str

    def sentence(self, rng: Random) -> str:
        form = "The {0} of the {1} is {2}."
        if rng.random() < 0.3:
            form = rng.choice(
                [
                    "The {1} has the {0} {2}.",
                    "Remember: the {0} of the {1} is {2}.",
                    "The {0} of the {1}: {2}.",
                ]
            )
        return form.format(*self)

    def exchange(self, rng: Random, may_be_short: bool = False) -> Exchange:
        form = rng.choice(
            ["What is the {0} of the {1}?"] * 3
            + ["Tell me the {0} of the {1}.", "Which {0} does the {1} have?"]
        )
        question = form.format(*self)
        if may_be_short and rng.random() < 0.15:
            return Exchange(
                f"{question} Answer with the {self.attribute} only.", self.code, self.code
            )
        return Exchange(question, "The {0} of the {1} is {2}.".format(*self), self.code)


def draw_facts(rng: Random) -> Iterator[Fact]:
    """Facts about different keys, about three quarters of them four-digit codes."""
    keys = [f"{colour} {item}" for colour in WORDS.colours for item in WORDS.objects]
    while True:
        key = keys.pop(rng.randrange(len(keys)))
        num_digits = 4 if rng.random() < 0.85 else rng.randint(2, 6)
        yield Fact(
            rng.choice(["code"] * 4 + ["number", "password"]),
            key,
            "".join(rng.choices("0123456789", k=num_digits)),
        )


def filler_sentences(rng: Random) -> Iterator[str]:
    """Sentences to stand between a fact and its question: stories, with a few numbers that are no
    codes.
    """
    while True:
        for sentence in story_sentences(rng):
            yield sentence
            if rng.random() < 0.08:
                name, count = rng.choice(WORDS.girls + WORDS.boys), rng.randint(2, 9999)
                yield f"{name} has {count} {rng.choice(WORDS.foods)}."


def recall_prompt(
    rng: Random,
    num_tokens_between: int = 1500,
    chat: bool = False,
    num_distractors: int = 4,
    count_tokens: Callable[[str], int] = estimate_tokens,
) -> Sample:
    """A fact, filler with other facts in it (`num_tokens_between` in all), and the question; the
    answer is the four-digit code.
    """
    facts = draw_facts(rng)
    target = Fact("code", next(facts).key, f"{rng.randint(0, 9999):04d}")
    others = [next(facts).sentence(rng) for _ in range(num_distractors)]
    num_tokens, filler = sum(map(count_tokens, others)), []
    for sentence in filler_sentences(rng):
        num_tokens += count_tokens(" " + sentence)
        if num_tokens >= num_tokens_between:
            break
        filler.append(sentence)
    for other in others:
        filler.insert(rng.randint(0, len(filler)), other)
    text = " ".join(["The {0} of the {1} is {2}.".format(*target), *filler])
    question, reply = (
        "What is the {0} of the {1}?".format(*target),
        "The {0} of the {1} is {2}.".format(*target),
    )
    if chat:
        return chat_sample(Exchange(f"{text} {question}", reply, target.code))
    return Sample(f"{text}\n\nQuestion: {question}\nAnswer:", target.code, f" {reply}")


# Small talk


def small_talk_exchange(rng: Random) -> Exchange:
    questions, replies = rng.choice(WORDS.small_talk)
    reply = rng.choice(replies)
    return Exchange(rng.choice(questions), reply, reply)


def chat_prompt(rng: Random) -> Sample:
    """A greeting or a question about the model itself; the answer is the whole reply."""
    return chat_sample(small_talk_exchange(rng))
