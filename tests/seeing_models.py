"""Tiny random models that read images, complete: with tokens of images, a chat template, and the
settings of a processor. tiny_vision.py has the models alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.tests.tiny_vision import save_tiny_vision_model

# kind -> the tokens before, in the place of, and after an image, and what a template writes
MARKS = {
    "qwen3_5": (
        ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "gemma3": (
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "<start_of_image>",
    ),
}
# kind -> preprocessor_config.json
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 16 * 64, "longest_edge": 64 * 64},
    },
    "gemma3": {"size": {"height": 24, "width": 24}},
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_seeing_model(directory: Path, kind: str) -> Path:
    save_tiny_vision_model(directory, kind)
    tokens, written = MARKS[kind]
    first = add_tokens(directory / "tokenizer.json", tokens)
    before, image, after = range(first, first + 3)
    names = {"image_token_id": image, "image_token_index": image}
    names |= {"vision_start_token_id": before, "vision_end_token_id": after}
    names |= {"boi_token_index": before, "eoi_token_index": after}
    path = directory / "config.json"
    config = json.loads(path.read_text())
    assert config["text_config"]["vocab_size"] > after
    path.write_text(json.dumps(config | {k: v for k, v in names.items() if k in config}))
    (directory / "preprocessor_config.json").write_text(json.dumps(HALF | PROCESSORS[kind]))
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", written))
    return directory


def add_tokens(path: Path, tokens: tuple[str, ...]) -> int:
    """Returns the id of the first."""
    content = json.loads(path.read_text())
    first = 1 + max(token["id"] for token in content["added_tokens"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": first + i, "content": token, "special": True, **plain}
        for i, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(content))
    return first
