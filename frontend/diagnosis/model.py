"""Checks of a model: files, memory, and whether template, tokenizer and end-of-sequence tokens
agree. Each returns a Finding.

Must not know: torch, an engine, how findings are printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...ipc.errors import InvalidParameterError, ModelLoadError, QuireError
from ...ipc.models.architectures import ARCHITECTURES, NATIVE
from ...ipc.models.checkpoint import check_checkpoint, find_weight_files, missing_weight_files
from ...ipc.models.decoder_config import unread_keys
from ...ipc.models.gguf import is_gguf, read_gguf
from ...ipc.models.quantization_config import CheckpointQuantization, parse_quantization
from ...ipc.models.resolve_pooling import resolve_pooling
from ...ipc.models.stored_names import find_stored_names, is_ignored
from ...ipc.models.vision_config import VisionConfig
from ...ipc.models.vision_files import find_vision
from ..answer_format import detect
from ..engine_args import EngineArgs
from ..model_info.gguf_header import find_description, is_header_only
from ..model_info.model_files import (
    eos_token_ids,
    find_model_directory,
    read_generation_config,
    read_hf_config,
)
from ..model_info.model_sizes import ModelSizes, StoredSizes, encoder_bytes, measure_model
from ..model_info.plan import check_cache, make_plan
from ..requests.image_inputs import MAX_IMAGES
from ..server.config import ServerConfig
from ..text.tokenizer import Tokenizer
from .machine import Finding, failure, passed, warning

GIB = 2**30
EXAMPLE_IMAGE = (1024, 768)  # pixels: width and height
# general.architecture of GGUF files beside which repositories mostly have an encoder of images
OFTEN_WITH_IMAGES = frozenset(
    {"qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "gemma3", "gemma4", "mistral3"}
)
MARK = "QUIRE-MARK"  # a word that does not occur in any template


def check_model(
    args: EngineArgs, server: ServerConfig = ServerConfig(), chat_template: str | None = None
) -> Iterator[Finding]:
    """Makes all checks. If an early one fails, the checks that depend on it are skipped.

    `chat_template` is text, or the name of one of the model's templates, and is used instead of the
    default template.
    """
    try:
        directory = find_description(args)
        hf_config = read_hf_config(directory, args.hf_overrides)
        resolved = resolve_pooling(
            directory, hf_config, args.runner, args.convert, None, args.model_impl
        )
        hf_config = resolved.hf_config
        sizes = measure_model(hf_config, directory, args.model_impl)
    except QuireError as error:
        yield failure(
            "model",
            str(error),
            "quire models lists the local models; the message names what is supported",
        )
        return
    yield passed(
        "model",
        f"{sizes.architecture}, {sizes.num_parameters / 1e6:,.1f} million parameters, at "
        f"{directory}",
    )
    is_decoder = not isinstance(sizes, StoredSizes) and sizes.architecture in ARCHITECTURES
    if is_decoder and (unread := unread_keys(hf_config)):
        yield warning(
            "config",
            f"keys of config.json that Quire ignores: {', '.join(unread)}",
            "check the model's page: none of them may change its computation",
        )
    yield check_weights(directory, args, sizes, parse_quantization(hf_config))
    yield check_plan(args)
    if args.model_impl != "transformers":
        yield from check_images(args, directory, hf_config)
    if not args.skip_tokenizer_init:
        vocab_size, pools = sizes.config.vocab_size, resolved.runner == "pooling"
        yield from _check_text(args, directory, hf_config, vocab_size, pools, server, chat_template)


def _check_text(
    args: EngineArgs,
    directory: Path,
    hf_config: dict[str, Any],
    vocab_size: int,
    pools: bool,
    server: ServerConfig,
    chat_template: str | None,
) -> Iterator[Finding]:
    """Checks the tokenizer, end-of-sequence tokens, template and format of answers."""
    try:
        tokenizer = Tokenizer(
            directory
            if args.tokenizer is None
            else find_model_directory(args.tokenizer, weights=False)
        )
    except ModelLoadError as error:
        yield failure(
            "tokenizer",
            str(error),
            "add a tokenizer.json (transformers' save_pretrained writes one), or use --tokenizer",
        )
        return
    yield check_vocabulary(tokenizer, vocab_size)
    if pools:
        return  # it needs no end, no template and no format of answers
    generation_config = read_generation_config(directory) | args.override_generation_config
    try:
        ends, of_config = eos_token_ids(generation_config, hf_config), eos_token_ids({}, hf_config)
    except ModelLoadError as error:
        yield failure(
            "ends",
            str(error),
            "correct the file, or use --override-generation-config '{\"eos_token_id\": [ID]}'",
        )
        return
    yield check_ends(tokenizer, ends, of_config, vocab_size)
    yield from check_template(tokenizer, ends, chat_template)
    yield check_answers(tokenizer, server, chat_template)


def check_weights(
    directory: Path,
    args: EngineArgs,
    sizes: ModelSizes,
    quantization: CheckpointQuantization | None,
) -> Finding:
    """Compares the headers of all weight files with what the engine's loader expects. The loader
    uses the same check.
    """
    if args.load_format == "dummy":
        return warning(
            "weights", "load_format=dummy: random ones", "leave it out to use the model's own"
        )
    try:
        missing = missing_weight_files(directory)
    except ModelLoadError as error:
        return failure("weights", str(error), "replace the file with an intact copy")
    if missing:
        is_cached = "snapshots" in directory.parts
        fix = (
            f"hf download {args.model}, or start the engine, which downloads them"
            if is_cached
            else "copy them there; Quire reads safetensors and GGUF files only"
        )
        return Finding(
            "weights",
            "warn" if is_cached else "fail",
            f"{len(missing)} missing: {', '.join(missing[:3])}",
            fix,
        )
    try:
        if isinstance(sizes, StoredSizes) and not is_gguf(directory):
            # the headers are read; transformers knows the names
            num_tensors, files = len(sizes.shapes), {*find_weight_files(directory)}
        else:
            origin = _find_tensors(directory, sizes, quantization)
            num_tensors, files = len(origin), {*origin.values()}
    except ModelLoadError as error:
        return failure("weights", str(error), "replace the model's files with intact copies")
    num_bytes = sum(path.stat().st_size for path in files)
    found = f"{num_tensors} tensors, {num_bytes / GIB:.2f} GiB in"
    if is_header_only(directory):
        return warning(
            "weights",
            f"{found} GGUF files on the hub",
            f"quire pull {args.model}, or start the engine, which downloads them",
        )
    kind = "GGUF" if is_gguf(directory) else "safetensors"
    how = ""
    if quantization is not None and not isinstance(sizes, StoredSizes):
        how = f" ({quantization.method})"
    return passed("weights", f"{found} {kind} files{how}")


def _find_tensors(
    directory: Path, sizes: ModelSizes, quantization: CheckpointQuantization | None
) -> dict[str, Path]:
    """Does what check_checkpoint does, with the names that the files have."""
    shapes: dict[str, list[int]]
    if isinstance(sizes, StoredSizes):
        shapes, tied = dict(sizes.shapes), {}
    else:
        table: Any = NATIVE[sizes.architecture]
        shapes, tied = table.weight_shapes(sizes.config), table.tied_weights(sizes.config)
    names = find_stored_names(shapes, sizes.config, directory)
    return check_checkpoint(
        directory,
        {names.of(name): shape for name, shape in shapes.items()},
        {names.of(name): names.of(original) for name, original in tied.items()},
        quantization,
        lambda name: is_ignored(names.own(name), sizes.config),
    )


def check_plan(args: EngineArgs) -> Finding:
    try:
        plan = make_plan(args)
        exceeds = check_cache(args, plan)
    except QuireError as error:
        return failure("fits", str(error), "the message names the allowed values")
    part = f" (1/{plan.num_engines} of the experts)" if plan.divides_experts else ""
    detail = (
        f"{plan.weights_bytes / GIB:.2f} GiB of weights as {plan.weights_kind}{part} in "
        f"{plan.memory_bytes / GIB:.1f} GiB of free memory"
    )
    if plan.num_engines > 1:
        detail = f"{plan.num_engines} engines, each with {detail} for all"
    if plan.num_ranks > 1:
        room = plan.kv_cache_bytes or plan.longest_kv_cache_bytes
        of_rank = (plan.weights_bytes + room) / plan.num_ranks / GIB
        each = " of an engine" if plan.num_engines > 1 else ""
        detail += (
            f"; {plan.num_ranks} ranks{each}, each with {of_rank:.2f} GiB of weights and cache"
        )
    if plan.fits:
        longest = max(plan.concurrency)
        number = plan.concurrency[longest] * plan.num_engines
        detail += f"; {number} requests of {longest} tokens at once"
        if exceeds:
            fix = "a smaller one, or none: the KV cache then follows from the free memory"
            return warning("fits", f"{detail}; {exceeds}", fix)
        return passed("fits", detail)
    if plan.longest_context:
        detail += (
            f"; a sequence of at most {plan.longest_context} tokens fits, "
            f"max_model_len is {plan.max_model_len}"
        )
    return failure(
        "fits",
        detail,
        " ".join(plan.flags)
        or f"at least {plan.least_memory_bytes / GIB:.1f} GiB; quire plan {plan.model}",
    )


def check_images(args: EngineArgs, directory: Path, hf_config: dict[str, Any]) -> Iterator[Finding]:
    """Says how the model reads images, or why not. Nothing about a model that is not made for it.

    hf_config: of its text part.
    """
    if args.language_model_only:
        return
    try:
        vision = find_vision(directory, hf_config, args.hf_overrides, args.mmproj)
        if vision is not None:
            yield passed("images", _images_detail(args, directory, vision))
            return
    except QuireError as error:
        fix = "correct the file, or use --language-model-only"
        yield failure("images", str(error), fix)
        return
    if not is_gguf(directory) or is_header_only(directory):
        return
    if read_gguf(directory).metadata.get("general.architecture") in OFTEN_WITH_IMAGES:
        yield warning(
            "images",
            "the model reads text only: no mmproj-*.gguf is beside the file",
            "put its encoder there, or name it with --mmproj; llama.cpp's convert_hf_to_gguf.py "
            "--mmproj writes one",
        )


def _images_detail(args: EngineArgs, directory: Path, vision: VisionConfig) -> str:
    """Raises ModelLoadError for a processor's file, InvalidParameterError for its settings."""
    from ..images.families import make_family

    width, height = EXAMPLE_IMAGE
    family = make_family(vision, args.mm_processor_kwargs)
    num_tokens = family.layout(height, width).num_rows
    dtype = "bfloat16" if args.dtype == "auto" else args.dtype
    size = (
        Path(vision.file).stat().st_size
        if vision.file
        else encoder_bytes(vision, dtype, args.quantization)
    )
    origin = Path(vision.file).name if vision.file else "the model's own files"
    most = args.limit_mm_per_prompt.get("image", MAX_IMAGES)
    return (
        f"{vision.family}, an encoder of {size / GIB:.2f} GiB from {origin}; {num_tokens} tokens "
        f"for {width} x {height} pixels, at most {most} images in a prompt"
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Finding:
    largest = max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=-1)
    detail = f"{tokenizer.vocab_size} tokens, the model has rows for {vocab_size}"
    if largest >= vocab_size:
        return failure(
            "tokenizer",
            f"{detail}; its largest id is {largest}",
            "the tokenizer belongs to another model; use --tokenizer",
        )
    return passed("tokenizer", detail)


def check_ends(
    tokenizer: Tokenizer, used: list[int], of_config: list[int], vocab_size: int
) -> Finding:
    """Compares the end-of-sequence tokens that config.json, generation_config.json and the
    tokenizer may each name. The engine uses those of generation_config.json, or of config.json if
    there are none (`used`), and also the tokenizer's.
    """
    own = tokenizer.eos_token_id
    ends: list[int] = list(dict.fromkeys([*used, *([] if own is None else [own])]))
    if not ends:
        return warning(
            "ends",
            "no end-of-sequence token: answers end only at max_tokens",
            "--override-generation-config '{\"eos_token_id\": [ID]}'",
        )
    if bad := [i for i in ends if not 0 <= i < vocab_size]:
        return failure(
            "ends",
            f"id {bad[0]} is outside of the model's {vocab_size} tokens",
            "the files belong to different models",
        )
    disagreements = [_tokens(tokenizer, ends)]
    if lost := [i for i in of_config if i not in ends]:
        disagreements.append(
            f"config.json also names {_tokens(tokenizer, lost)}, which generation_config.json "
            f"overrides"
        )
    if own is not None and used and own not in used:
        disagreements.append(
            f"the tokenizer's {_tokens(tokenizer, [own])} is not in the configuration "
            f"and is also used"
        )
    if len(disagreements) == 1:
        return passed("ends", disagreements[0])
    override = json.dumps({"eos_token_id": ends})
    fix = f"if an answer ends too early or too late: use --override-generation-config '{override}'"
    return warning("ends", "; ".join(disagreements), fix)


def check_template(
    tokenizer: Tokenizer, config_ends: list[int], template: str | None
) -> Iterator[Finding]:
    """Compares the output of the chat template with the tokens that the tokenizer adds and with the
    tokens that end a sequence.
    """
    if not tokenizer.chat_templates and template is None:
        yield warning(
            "template",
            "none: this is a base model, or its template is missing",
            "use quire generate, or --chat-template FILE with quire serve",
        )
        return
    if template is not None and template not in tokenizer.chat_templates and "{" not in template:
        names = ", ".join(sorted(tokenizer.chat_templates)) or "it has none"
        yield failure(
            "template",
            f"{template} is neither a file nor one of the model's templates: {names}",
            "--chat-template FILE",
        )
        return
    question = [{"role": "user", "content": "Hello"}]
    try:
        prompt = _render(tokenizer, question, template, add_generation_prompt=True)
        without = _render(tokenizer, question, template)
    except InvalidParameterError as error:
        yield failure("template", str(error), "use --chat-template FILE with a valid template")
        return
    yield _check_bos(tokenizer, prompt)
    if prompt == without:
        fix = "use a template that begins the assistant's turn if add_generation_prompt is true"
        yield warning(
            "generation prompt",
            "the template writes none: the model may continue the user's turn",
            fix,
        )
    else:
        yield passed("generation prompt", repr(prompt.removeprefix(without)))
    yield from _check_turn_end(tokenizer, question, config_ends, template)


def check_answers(tokenizer: Tokenizer, server: ServerConfig, template: str | None) -> Finding:
    """Tells which parsers the server uses for the model's output. They are detected from the
    template, unless flags name them.
    """
    templates = tokenizer.chat_templates
    text = (
        templates.get(template, template)
        if template
        else templates.get("tool_use") or templates.get("default") or ""
    )
    try:
        found = detect(text, server.tool_call_parser, server.reasoning_parser, tokenizer)
    except InvalidParameterError as error:
        return failure("answers", str(error), "use one of the names in the message, or auto")
    try:
        found.require_tools()
        tools = found.tool_name
    except InvalidParameterError as error:
        tools = f"none (tools {error.problem})"
    return passed("answers", f"tool calls: {tools}; reasoning: {found.reasoning_name or 'none'}")


def _render(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    template: str | None,
    add_generation_prompt: bool = False,
) -> str:
    text = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
    )
    assert isinstance(text, str)
    return text


def _check_bos(tokenizer: Tokenizer, prompt: str) -> Finding:
    bos, ids = tokenizer.bos_token_id, tokenizer.encode(prompt, add_special_tokens=False)
    added = bos is not None and tokenizer.encode("Hello")[:1] == [bos]
    if bos is not None and ids[:2] == [bos, bos]:
        return failure(
            "BOS",
            f"the template writes {tokenizer.bos_token} twice",
            "use a template that writes it once",
        )
    if added and ids[:1] != [bos]:
        detail = (
            f"the tokenizer puts {tokenizer.bos_token} before a plain prompt, the template before "
            "no chat"
        )
        return warning(
            "BOS",
            detail,
            "use a template that begins with {{ bos_token }} if the model was trained with it",
        )
    if added:
        detail = (
            f"{tokenizer.bos_token} once; a chat that a program renders itself and sends as a "
            "plain prompt would get it twice"
        )
        return passed("BOS", detail)
    return passed(
        "BOS", "none" if ids[:1] != [bos] else f"{tokenizer.bos_token} once, from the template"
    )


def _check_turn_end(
    tokenizer: Tokenizer,
    question: list[dict[str, str]],
    config_ends: list[int],
    template: str | None,
) -> Iterator[Finding]:
    """Tells whether the token that the template writes after an answer is the token at which the
    model stops.
    """
    try:
        text = _render(tokenizer, [*question, {"role": "assistant", "content": MARK}], template)
    except InvalidParameterError as error:
        yield warning(
            "end of turn",
            f"the template fails for an answer: {error}",
            "use a template that renders answers, or single-turn requests only",
        )
        return
    behind = tokenizer.encode(text.rpartition(MARK)[2], add_special_tokens=False)
    special = [i for i in behind if i in tokenizer.special_ids]
    ends = {*config_ends, tokenizer.eos_token_id}
    if special and special[0] not in ends:
        override = json.dumps({"eos_token_id": [special[0], *config_ends]})
        fix = f"--override-generation-config '{override}'"
        yield warning(
            "end of turn",
            f"{_tokens(tokenizer, special[:1])} ends an answer in the template, and no sequence: "
            f"answers run on",
            fix,
        )
    elif special:
        yield passed("end of turn", _tokens(tokenizer, special[:1]))


def _tokens(tokenizer: Tokenizer, ids: list[int]) -> str:
    return ", ".join(f"{tokenizer.id_to_token(i)} ({i})" for i in ids)
