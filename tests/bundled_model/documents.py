"""The bundled model's training text: chats, and documents made of the pieces of data.py.

Public: the exchanges of a chat; `training_document` feeds train.py.
"""

from collections.abc import Callable
from random import Random

from data import (
    ANSWER,
    CHARS_PER_TOKEN,
    CONTEXT,
    END_OF_TEXT,
    OPENINGS,
    SYSTEM_MESSAGES,
    TEXT,
    TURN_END,
    WORDS,
    Exchange,
    Fact,
    Sample,
    Segment,
    chat_text,
    chinese_story,
    copy_exchange,
    copy_prompt,
    draw_facts,
    filler_sentences,
    invented_word,
    json_exchange,
    json_prompt,
    small_talk_exchange,
    story,
    sum_exchange,
    sum_text,
    translation_exchange,
    with_article,
)

ALPHABETS = ["abcdefghijklmnopqrstuvwxyz", "asdfjkl ", "äöüéèñçøß aeiou", "?!.,;:#"]


def opening_exchange(rng: Random) -> Exchange:
    """What people type first, in any case and punctuation; what the model cannot do, it says."""
    if rng.random() < 0.4:
        group = rng.choice(OPENINGS.groups)
        question, replies = rng.choice(group["questions"]), group["replies"]
    else:
        question, replies = _unknown_opening(rng), OPENINGS.unknown_replies
    question = rng.choice([question, question.capitalize(), question.capitalize()])
    if question[-1].isalpha() and rng.random() < 0.4:
        question += rng.choice([".", "!", "?", "...", " :)", "!!", ","])
    reply = rng.choice(replies)
    return Exchange(question, reply, reply)


def _unknown_opening(rng: Random) -> str:
    if rng.random() < 0.25:
        alphabet = rng.choice(
            ["abcdefghijklmnopqrstuvwxyz", "asdfjkl ", "äöüéèñçøß aeiou", "?!.,;:#"]
        )
        return "".join(rng.choices(alphabet, k=rng.randint(2, 14))).strip() or "?"
    first, second = (
        noun if rng.random() < 0.7 else invented_word(rng) for noun in rng.sample(OPENINGS.nouns, 2)
    )
    verb, adjective = rng.choice(OPENINGS.verbs), rng.choice(OPENINGS.adjectives)
    return rng.choice(OPENINGS.unknown).format(
        n=first, n2=second, v=verb, a=adjective, d=rng.randint(1, 99)
    )


def plain_exchange(rng: Random) -> Exchange:
    """A question that no tool of the catalogue answers."""
    makers = [small_talk_exchange, opening_exchange, json_exchange, copy_exchange]
    return rng.choice([*makers, translation_exchange, _story_exchange])(rng)


def _short_recall_exchange(rng: Random) -> Exchange:
    facts = [fact for fact, _ in zip(draw_facts(rng), range(rng.randint(1, 4)))]
    question, reply, answer = rng.choice(facts).exchange(rng, may_be_short=True)
    return Exchange(" ".join([fact.sentence(rng) for fact in facts] + [question]), reply, answer)


def _story_exchange(rng: Random) -> Exchange:
    if rng.random() < 0.4:
        text = story(rng)
        return Exchange(
            rng.choice(["Tell me a story.", "Please tell me a story.", "Write a short story."]),
            text,
            "",
        )
    kind = rng.choice(WORDS.animals)
    form = rng.choice(
        [
            "Tell me a story about {}.",
            "Write a short story about {}.",
            "Please tell me a story about {}.",
        ]
    )
    return Exchange(form.format(with_article(kind)), story(rng, kind), "")


def arithmetic_exchange(rng: Random) -> Exchange:
    return sum_exchange(rng, rng.choice("+++--*"))


CHAT_SKILLS = [
    (small_talk_exchange, 4),
    (opening_exchange, 4),
    (arithmetic_exchange, 5),
    (_short_recall_exchange, 3),
    (json_exchange, 3),
    (copy_exchange, 2),
    (translation_exchange, 3),
    (_story_exchange, 1),
]


# Training documents


def _reply_segments(reply: str, answer: str) -> list[Segment]:
    """The reply with its checkable part weighted up, cut where the tokenizer cuts anyway (before a
    space).
    """
    if not answer or answer not in reply:
        return [(reply, TEXT)]
    before, _, after = reply.rpartition(answer)
    space = " " if before.endswith(" ") else ""
    before = before[: len(before) - len(space)]
    return [part for part in [(before, TEXT), (space + answer, ANSWER), (after, TEXT)] if part[0]]


def _chat_segments(exchanges: list[Exchange], system: str = "") -> list[Segment]:
    segments: list[Segment] = (
        [(chat_text([{"role": "system", "content": system}], False), CONTEXT)] if system else []
    )
    for question, reply, answer in exchanges:
        segments.append((chat_text([{"role": "user", "content": question}]), CONTEXT))
        segments += [*_reply_segments(reply, answer), (TURN_END, TEXT), ("\n", CONTEXT)]
    return segments


def _chat_document(rng: Random, max_tokens: int) -> list[Segment]:
    makers, weights = zip(*CHAT_SKILLS)
    exchanges = [maker(rng) for maker in rng.choices(makers, weights, k=rng.randint(1, 5))]
    if rng.random() < 0.2:  # something to remember from turn to turn
        name = rng.choice(WORDS.girls + WORDS.boys)
        exchanges.insert(0, Exchange(f"My name is {name}.", f"Nice to meet you, {name}!", name))
        exchanges.append(Exchange("What is my name?", f"Your name is {name}.", name))
    if rng.random() < 0.15:
        exchanges = [opening_exchange(rng)]
    return _chat_segments(exchanges, rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.3 else "")


def _lines_document(
    rng: Random, sample: Callable[[Random], Sample], max_lines: int, separator: str
) -> list[Segment]:
    segments: list[Segment] = []
    for _ in range(rng.randint(1, max_lines)):
        prompt, answer, completion = sample(rng)
        segments += [(prompt, CONTEXT), (completion, ANSWER), (separator, CONTEXT)]
    return segments[:-1]


def _sum_line(rng: Random) -> Sample:
    operator = rng.choice("++++--*")
    expression, result = sum_text(rng, operator, 1 if operator == "*" or rng.random() < 0.1 else 2)
    return Sample(f"{expression} =", str(result), f" {result}")


def _recall_document(rng: Random, max_tokens: int) -> list[Segment]:
    """Facts, filler and questions in turn; any fact so far may be asked for, so distances reach
    from none to the whole text.
    """
    in_chat = rng.random() < 0.4
    facts, filler, known = draw_facts(rng), filler_sentences(rng), []
    fact_rate, ask_rate = rng.uniform(0.1, 0.5), rng.uniform(0.15, 0.4)
    segments: list[Segment] = []
    pending: list[str] = []
    num_chars = 0
    while num_chars < max_tokens * CHARS_PER_TOKEN:
        if not known or rng.random() < fact_rate:
            known.append(next(facts))
            pending.append(known[-1].sentence(rng))
        else:
            pending += [next(filler) for _ in range(rng.randint(1, 4))]
        num_questions = rng.randint(1, 3) if rng.random() < ask_rate else 0
        for _ in range(num_questions):
            question = _question_segments(rng, pending, rng.choice(known), in_chat, not segments)
            num_chars += sum(len(text) for text, _ in question)
            segments += question
            pending.clear()
    for fact in rng.sample(known, min(len(known), 6)):
        segments += _question_segments(rng, pending, fact, in_chat, not segments)
        pending.clear()
    return segments


def _question_segments(
    rng: Random, pending: list[str], fact: Fact, in_chat: bool, is_first: bool
) -> list[Segment]:
    """The text since the last question, then a question about `fact` and its answer; no whitespace
    at the end.
    """
    exchange = fact.exchange(rng, may_be_short=True)
    if in_chat:
        return _chat_segments([exchange._replace(question=" ".join([*pending, exchange.question]))])
    start = "" if is_first else "\n\n"
    if rng.random() < 0.75:
        context = "\n\n".join(
            [" ".join(pending)] * bool(pending) + [f"Question: {exchange.question}\nAnswer:"]
        )
    else:
        context = " ".join([*pending, exchange.question])
    return [(start + context, CONTEXT), *_reply_segments(" " + exchange.reply, exchange.answer)]


def _drill_document(rng: Random, max_tokens: int) -> list[Segment]:
    """Recall and copying with nothing between: every second token can be looked up, so looking up
    is learned first.
    """
    if rng.random() < 0.4:
        if rng.random() < 0.5:
            return _chat_segments([copy_exchange(rng, 12) for _ in range(rng.randint(1, 4))])
        return _lines_document(rng, lambda rng: copy_prompt(rng, max_words=12), 4, "\n\n")
    facts = [fact for fact, _ in zip(draw_facts(rng), range(rng.randint(1, 6)))]
    in_chat = rng.random() < 0.3
    segments: list[Segment] = []
    pending = [fact.sentence(rng) for fact in facts]
    for fact in rng.sample(facts, len(facts)):
        segments += _question_segments(rng, pending, fact, in_chat, not segments)
        pending.clear()
    return segments


def _story_document(rng: Random, max_tokens: int) -> list[Segment]:
    return [(story(rng), TEXT)]


def _chinese_document(rng: Random, max_tokens: int) -> list[Segment]:
    return [(chinese_story(rng), TEXT)]


def _sums_document(rng: Random, max_tokens: int) -> list[Segment]:
    return _lines_document(rng, _sum_line, 24, "\n")


def _copies_document(rng: Random, max_tokens: int) -> list[Segment]:
    max_words = rng.choice([8, 24, 60])
    return _lines_document(rng, lambda rng: copy_prompt(rng, max_words=max_words), 3, "\n\n")


def _json_document(rng: Random, max_tokens: int) -> list[Segment]:
    return _lines_document(rng, json_prompt, 4, "\n\n")


DOCUMENT_KINDS = [
    (_story_document, 5),
    (_chinese_document, 1),
    (_sums_document, 5),
    (_copies_document, 2),
    (_json_document, 2),
    (_chat_document, 6),
    (_recall_document, 3),
]


def training_document(rng: Random, max_tokens: int, kind: str = "any") -> list[Segment]:
    """One document as weighted segments, its end marked: a `recall` of about `max_tokens`, a short
    `drill`, `sums`, or `any`.
    """
    if kind == "any":
        makers, weights = zip(*DOCUMENT_KINDS)
        segments = rng.choices(makers, weights)[0](rng, rng.randint(40, 250))
    else:
        segments = {"recall": _recall_document, "drill": _drill_document, "sums": _sums_document}[
            kind
        ](rng, max_tokens)
    return [*segments, (END_OF_TEXT, TEXT)]
