"""Tests of the bundled model's files and of its generator: size, layout, tokenizer, determinism,
and a sample of its skills.
"""

import json
import re
from pathlib import Path
from random import Random

import pytest

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "frontend" / "bundled_model"


# the scripts of this folder import each other by their plain names
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(HERE))
    import data
    import documents
    import evaluate_chat
    import tool_data

PROMPT_MAKERS = [
    data.recall_prompt,
    data.addition_prompt,
    data.subtraction_prompt,
    data.copy_prompt,
    data.json_prompt,
    data.translation_prompt,
    data.chat_prompt,
    data.story_prompt,
]


@pytest.fixture(scope="module")
def tokenizer():
    """tokenizer.json as it is; AutoTokenizer puts Qwen2's own normalizer (NFC) into it, which is
    not lossless.
    """
    return pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(
        FOLDER, padding_side="left"
    )


@pytest.fixture(scope="module")
def model():
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def _greedy(model, tokenizer, prompts: list[str], max_new_tokens: int) -> list[str]:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    token_ids = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    return tokenizer.batch_decode(token_ids[:, inputs["input_ids"].shape[1] :])


def _weight_table() -> dict:
    with open(FOLDER / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def test_size_and_layout():
    table = _weight_table()
    num_parameters = 0
    for name, entry in table.items():
        assert entry["dtype"] == "BF16", name
        size = 1
        for extent in entry["shape"]:
            size *= extent
        num_parameters += size
    assert num_parameters <= 4_000_000
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert (
        config["model_type"] == "qwen2"
        and config["tie_word_embeddings"]
        and config["max_position_embeddings"] >= 2048
    )
    assert "lm_head.weight" not in table


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time",
        "12 + 34 = 46\n\n\n  x\t y ",
        "你好，世界 🙂🏳️‍🌈 e\u0301",
        "\x00\x01\x7f\r\n\u2028",
        '{"a": [1, 2.5]}',
        "",
        "  ",
        "don't (stop)... ÆØÅ العربية हिन्दी",
    ],
)
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_has_every_byte_and_single_digits(tokenizer):
    rng = Random(0)
    for _ in range(50):
        text = "".join(
            chr(
                rng.choice(
                    [
                        rng.randint(0, 0x7F),
                        rng.randint(0x80, 0xD7FF),
                        rng.randint(0x10000, 0x10FFFF),
                    ]
                )
            )
            for _ in range(40)
        )
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("4817").input_ids) == 4
    assert [
        tokenizer.convert_tokens_to_ids(token)
        for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ] == [0, 1, 2]


def test_auto_tokenizer_gives_the_same_ids(tokenizer):
    """On the generator's text: whatever class AutoTokenizer puts around tokenizer.json, the model
    sees what it was trained on.
    """
    automatic = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(FOLDER)
    for seed in range(30):
        text = "".join(
            text
            for text, _ in documents.training_document(
                Random(seed), 200, "recall" if seed % 2 else "any"
            )
        )
        assert tokenizer(text).input_ids == automatic(text).input_ids


def test_prompt_and_completion_tokenize_as_one_text(tokenizer):
    for seed in range(60):
        prompt, _, completion = PROMPT_MAKERS[seed % len(PROMPT_MAKERS)](Random(seed))
        whole, parts = (
            tokenizer(prompt + completion).input_ids,
            tokenizer(prompt).input_ids + tokenizer(completion).input_ids,
        )
        assert whole == parts


def test_chat_template_is_the_generators(tokenizer):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    for add_generation_prompt in (False, True):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert rendered == data.chat_text(messages, add_generation_prompt)


def test_chat_template_writes_tools_as_the_generator_does(tokenizer):
    for seed in range(40):
        item = tool_data.tool_question(Random(seed), num_tools=1 + seed % 3)
        question = {"role": "user", "content": tool_data.question_turn(item.question, item.tools)}
        call = {"type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": item.question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": item.result},
        ]
        rendered = tokenizer.apply_chat_template(
            messages,
            tools=[tool.as_openai() for tool in item.tools],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert rendered == data.chat_text(
            [
                messages[0],
                question,
                {"role": "assistant", "content": item.call()},
                {"role": "user", "content": tool_data.result_turn(item.result)},
            ]
        )


def test_chat_template_takes_schemas_without_a_type(tokenizer):
    schema = {"properties": {"day": {"enum": [7, 8]}, "any": True, "either": {"anyOf": [{}]}}}
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "When?"}],
        tools=[{"type": "function", "function": {"name": "set_day", "parameters": schema}}],
        tokenize=False,
    )
    assert '{"day": "string", "any": "string", "either": "string"}' in rendered


def test_tool_documents_tokenize_as_one_text(tokenizer):
    for seed in range(200):
        parts = [text for text, _ in tool_data.tool_document(Random(seed), 0)]
        whole = tokenizer("".join(parts)).input_ids
        assert whole == [token for part in parts for token in tokenizer(part).input_ids]


def test_training_text_holds_no_held_out_question():
    held_out = tool_data.tool_question(Random(1), held_out=True)
    assert held_out == tool_data.tool_question(Random(1), held_out=True)
    questions = {tool_data.tool_question(Random(seed)).question for seed in range(500)}
    held_out = {
        tool_data.tool_question(Random(seed), held_out=True).question for seed in range(500)
    }
    assert len(questions) > 300 and len(held_out) > 300
    plain = {question for kind in tool_data.TOOLS["plain_calls"] for question in kind["questions"]}
    assert not (questions - plain) & held_out


@pytest.mark.parametrize("make", PROMPT_MAKERS, ids=lambda make: make.__name__)
def test_generator_is_a_function_of_its_seed(make):
    assert make(Random(5)) == make(Random(5))
    assert len({make(Random(seed)).prompt for seed in range(40)}) > 5
    assert documents.training_document(Random(5), 300, "recall") == documents.training_document(
        Random(5), 300, "recall"
    )


def test_generated_answers_are_true():
    for seed in range(200):
        prompt, answer, completion = data.addition_prompt(Random(seed))
        first, second = map(int, re.findall(r"\d+", prompt))
        assert (
            int(answer) == first + second
            and data.is_held_out(first, "+", second)
            and completion == f" {answer}"
        )
        prompt, answer, _ = data.recall_prompt(Random(seed), 200)
        key = re.search(r"What is the code of the (.*)\?", prompt)[1]
        assert re.findall(rf"code of the {key} is (\d+)", prompt) == [answer]
        json.loads(data.json_prompt(Random(seed)).answer)


def test_training_text_holds_no_held_out_sum():
    text = "\n".join(
        "".join(text for text, _ in documents.training_document(Random(seed), 200))
        for seed in range(800)
    )
    sums = re.findall(r"\b(\d\d) ([+-]) (\d\d) =", text)
    assert len(sums) > 500
    assert not any(
        data.is_held_out(int(first), operator, int(second)) for first, operator, second in sums
    )


@pytest.mark.slow
@pytest.mark.parametrize("chat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recalls_a_code_over_1500_tokens(model, tokenizer, chat):
    samples = [data.recall_prompt(Random(f"test {seed}"), 1500, chat=chat) for seed in range(4)]
    outputs = _greedy(model, tokenizer, [sample.prompt for sample in samples], 20)
    assert sum(sample.answer in output for sample, output in zip(samples, outputs)) >= 3


def test_adds_two_digit_numbers(model, tokenizer):
    samples = [
        data.addition_prompt(Random(f"test {seed}"), chat=seed % 2 == 0) for seed in range(20)
    ]
    outputs = _greedy(model, tokenizer, [sample.prompt for sample in samples], 14)
    assert (
        sum(output.startswith(sample.completion) for sample, output in zip(samples, outputs)) >= 18
    )


def _right(outputs: list[str], wanted: list[str]) -> int:
    return sum(output.startswith(text + data.TURN_END) for output, text in zip(outputs, wanted))


def test_calls_tools_and_answers_from_their_results(model, tokenizer):
    items = [
        tool_data.tool_question(Random(f"test {seed}"), invented=0.0, held_out=True)
        for seed in range(20)
    ]
    questions = [
        {"role": "user", "content": tool_data.question_turn(item.question, item.tools)}
        for item in items
    ]
    calls = _greedy(model, tokenizer, [data.chat_text([question]) for question in questions], 80)
    assert _right(calls, [item.call() for item in items]) >= 17
    prompts = [
        data.chat_text(
            [
                question,
                {"role": "assistant", "content": item.call()},
                {"role": "user", "content": tool_data.result_turn(item.result)},
            ]
        )
        for question, item in zip(questions, items)
    ]
    replies = _greedy(model, tokenizer, prompts, 60)
    assert _right(replies, [item.reply for item in items]) >= 17


@pytest.mark.slow
def test_answers_short_openings_cleanly(model, tokenizer):
    openings = evaluate_chat.OPENINGS[::8]
    prompts = [data.chat_text([{"role": "user", "content": text}]) for text in openings]
    replies = [text.split(data.TURN_END) for text in _greedy(model, tokenizer, prompts, 150)]
    assert all(len(parts) > 1 for parts in replies)
    unclean = [parts[0] for parts in replies if not evaluate_chat.is_clean(parts[0])]
    assert len(unclean) <= 1, unclean


def test_tells_a_story_and_ends_it(model, tokenizer):
    [text] = _greedy(model, tokenizer, ["Once upon a time"], 250)
    assert text.endswith("<|endoftext|>") and text.count(".") >= 4


def test_ends_its_turn_in_a_chat(model, tokenizer):
    sample = data.chat_prompt(Random(1))
    assert _greedy(model, tokenizer, [sample.prompt], 60) == [sample.completion + "<|im_end|>"]
