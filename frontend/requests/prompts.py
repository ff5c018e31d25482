"""The forms in which prompts are given, and the arguments of a call for several prompts.

Must not know: the model, the tokenizer, what is asked about a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...ipc.checks import require, require_kind, require_text, shown
from ...ipc.errors import InvalidParameterError
from ...ipc.messages import ImageItem
from ..text.chat_images import PlacedImage

# A prompt is text, token ids, or a dict with these keys. text_pair is the second text of a pair,
# for requests that pool.
Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "text_pair")
# Further keys, of prompts with images, in vLLM's words.
IMAGES, UUIDS, PROCESSOR_KWARGS = "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"
IMAGE_PROMPT_KEYS = (IMAGES, UUIDS, PROCESSOR_KWARGS)


class GivenImages(NamedTuple):
    """The images of a prompt, which has a placeholder for each."""

    images: list[PlacedImage]
    # replace keys of the model's preprocessor_config.json
    processor_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True  # to a text; a chat template has written them


class PreparedImages(NamedTuple):
    """The images of a prompt of token ids that have a token for each of their rows."""

    items: list[ImageItem]


NO_IMAGES = PreparedImages([])  # of a rendered conversation: none, whatever its text says


class PromptParts(NamedTuple):
    """`token_ids` as given and unchecked; None: the text is to be tokenized."""

    text: str | None
    token_ids: Any = None
    cache_salt: str | None = None
    text_pair: str | None = None
    images: GivenImages | PreparedImages | None = None


def read_prompt(prompt: Prompt) -> PromptParts:
    """Raises InvalidParameterError. If both text and ids are given, the ids are used and the text
    is informative only.
    """
    if isinstance(prompt, str):
        require_text("prompt", prompt)
        return PromptParts(prompt)
    if isinstance(prompt, list):
        return PromptParts(None, prompt)
    return _read_dict(prompt)


def _read_dict(prompt: Any) -> PromptParts:
    if not isinstance(prompt, dict):
        raise InvalidParameterError(
            "prompt",
            f"must be a string, a list of token ids or a dict, got {type(prompt).__name__}",
        )
    for key in prompt:
        if key not in PROMPT_KEYS and key not in IMAGE_PROMPT_KEYS:
            known = ", ".join((*PROMPT_KEYS, *IMAGE_PROMPT_KEYS))
            raise InvalidParameterError(
                "prompt", f"has the unknown key {shown(key)}; the keys are {known}"
            )
    text, token_ids, salt, pair = map(prompt.get, PROMPT_KEYS)
    for name, value in (("prompt", text), ("text_pair", pair)):
        if value is not None:
            if not isinstance(value, str):
                raise InvalidParameterError(name, f"must be a string, got {type(value).__name__}")
            require_text(name, value)
    if salt is not None:
        require_kind(
            isinstance(salt, str) and salt, "cache_salt", "a string that is not empty", salt
        )
        require_text("cache_salt", salt)
    if token_ids is None and text is None:
        raise InvalidParameterError("prompt", "must have `prompt` or `prompt_token_ids`")
    require(
        pair is None or token_ids is None,
        "text_pair",
        "must not be given with prompt_token_ids: both texts are tokenized together",
    )
    return PromptParts(text, token_ids, salt, pair, _read_images(prompt))


def has_images(prompt: Any) -> bool:
    """Tells whether a prompt has images that are not prepared, which takes time."""
    given = prompt.get(IMAGES) if isinstance(prompt, dict) else None
    return bool(given) and not isinstance(given, PreparedImages)


def _read_images(prompt: dict[str, Any]) -> GivenImages | PreparedImages | None:
    """Returns None for a prompt without images."""
    data, kwargs = prompt.get(IMAGES), prompt.get(PROCESSOR_KWARGS)
    require_kind(
        kwargs is None or isinstance(kwargs, dict), PROCESSOR_KWARGS, "an object or None", kwargs
    )
    if isinstance(data, PreparedImages):
        return data
    if isinstance(data, GivenImages):
        return data._replace(processor_kwargs=kwargs or {})
    images = _of_kind(data, IMAGES)
    uuids = _of_kind(prompt.get(UUIDS), UUIDS) or [None] * len(images)
    require(
        len(uuids) == len(images),
        UUIDS,
        f"must be as many as the images, {len(images)}, got {len(uuids)}",
    )
    placed = [
        _placed(image, uuid, f"{IMAGES}.image[{i}]")
        for i, (image, uuid) in enumerate(zip(images, uuids, strict=True))
    ]
    return GivenImages(placed, kwargs or {}) if placed else None


def _placed(image: Any, uuid: Any, place: str) -> PlacedImage:
    require_kind(uuid is None or isinstance(uuid, str), UUIDS, "strings or None", uuid)
    if isinstance(image, PlacedImage):
        return image
    require(image is not None, place, "must be an image: Quire finds images by their content")
    return PlacedImage(image, place, uuid)


def _of_kind(given: Any, name: str) -> list[Any]:
    """Returns the images, or what is said of each, of an argument in vLLM's form: one or a list for
    each kind of data.
    """
    require_kind(given is None or isinstance(given, dict), name, "an object or None", given)
    for kind, values in (given or {}).items():
        if kind != "image" and values:
            raise InvalidParameterError(name, f"can have `image` only, got {shown(kind)}")
    found = (given or {}).get("image")
    if found is None:
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def prompt_list(prompts: Any) -> list[Prompt]:
    """Converts the argument to a list. A single prompt is a string, a dict, or a list of integers;
    anything else must be a sequence of prompts.
    """
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidParameterError(
            "prompts", f"must be a prompt or a sequence of prompts, got {type(prompts).__name__}"
        )
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def with_processor_kwargs(prompts: list[Prompt], kwargs: dict[str, Any]) -> list[Prompt]:
    """Returns the prompts, those with images with these mm_processor_kwargs too. A prompt's own
    come first.
    """
    return [
        prompt | {PROCESSOR_KWARGS: kwargs | (prompt.get(PROCESSOR_KWARGS) or {})}
        if isinstance(prompt, dict) and has_images(prompt)
        else prompt
        for prompt in prompts
    ]


def one_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    """An argument that is one for all prompts, or a sequence with one for each."""
    if not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidParameterError(
            name,
            f"must be one for all or one per prompt, got {len(value)} for {num_prompts} prompts",
        )
    return list(value)


def error_in_request(
    error: InvalidParameterError, index: int, num_prompts: int | None
) -> InvalidParameterError:
    """The error of a prompt with its index, unless it is the only prompt. None: their number is
    unknown.
    """
    if num_prompts == 1:
        return error
    of = "" if num_prompts is None else f" of {num_prompts}"
    where = f"(in request {index}{of}, counted from 0)"
    return InvalidParameterError(error.parameter, f"{error.problem} {where}")
