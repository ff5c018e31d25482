"""The processors of transformers for the families whose images Quire prepares, and a record of what
they make of some prompts.

The processors need torchvision, which the tests do without: where it is installed,
`python -m quire.tests.image_processors` writes tests/frontend/images/processors.json anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import msgspec
import numpy as np
from PIL import Image
from quire.frontend.images.families import FAMILIES
from quire.frontend.images.images import ImagePreparer
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.config import MultiModalConfig
from quire.ipc.models.vision_config import VisionConfig
from quire.tests.fakes import make_config
from quire.tests.pictures import make_picture
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

RECORD = Path(__file__).parent / "frontend/images/processors.json"
NUM_SAMPLES = 16  # pixels of each part
TOKENS = (
    *("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<video>"),
    *("<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|image>", "<|image|>"),
    *("<image|>", "<|audio|>", "<|audio>", "<audio|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<img>"),
    *("</img>", "<IMG_CONTEXT>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<row_{i}_col_{j}>" for i in (1, 2, 3) for j in (1, 2, 3)),
    *(f"<|img_row_{i}_col_{j}|>" for i in (1, 2, 3) for j in (1, 2, 3)),
    "<|video|>",
)
TEXTS = ["a\n\nb", "x\n\n\ny\n\n\n\nz", "Here is the original image and here are some crops"]


class Case(NamedTuple):
    """`processor`: makes that of transformers with a tokenizer that has these named tokens.
    `parts`: what it returned for one picture as parts u8 [height, width, 3].
    """

    vision: VisionConfig
    tokens: dict[str, str]
    processor: Callable[[Any], Any]
    parts: Callable[[Any], list[np.ndarray]]
    kwargs: dict[str, Any] = {}  # mm_processor_kwargs
    sizes: tuple[tuple[int, int], ...] = (
        *((1, 1), (50, 40), (300, 200), (7, 100), (100, 640), (641, 480), (1000, 700), (513, 900)),
    )


@cache
def backend() -> Backend:
    """Byte-level BPE whose tokens join line ends, as those of most models do."""
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS * 9, trainer)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in TOKENS])
    return made


@cache
def tokenizer() -> Tokenizer:
    directory = Path(mkdtemp())
    backend().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def vision_config(family: str, unit: int, **fields: Any) -> VisionConfig:
    token = backend().token_to_id(FAMILIES[family].image_token)
    return VisionConfig(family=family, hidden_size=64, image_token_id=token, unit=unit, **fields)


def prompt_of(case: Case) -> str:
    placeholder = FAMILIES[case.vision.family].placeholder
    return f"One\n{placeholder}\nTwo {placeholder}\n\nThree"


def sole_prompt_of(case: Case) -> str:
    """A prompt of one image."""
    return FAMILIES[case.vision.family].placeholder


def preparer_of(case: Case, **settings: Any) -> ImagePreparer:
    config = make_config(max_model_len=100_000)
    settings = {"mm_processor_kwargs": case.kwargs, "mm_processor_cache_gb": 0, **settings}
    config = msgspec.structs.replace(config, multimodal_config=MultiModalConfig(**settings))
    return ImagePreparer(config, case.vision, tokenizer())


def sample(part: np.ndarray) -> list[list[int]]:
    """Some pixels of a part, always at the same places."""
    rng = np.random.default_rng(part.shape[0] * 10_007 + part.shape[1])
    rows, columns = (rng.integers(0, side, NUM_SAMPLES) for side in part.shape[:2])
    return part[rows, columns].tolist()


def prompts_of(case: Case) -> list[list[Image.Image]]:
    """The pictures of each prompt."""
    made = [make_picture(*size, "RGB", i % 3) for i, size in enumerate(case.sizes)]
    return [made[i : i + 2] for i in range(0, len(made), 2)]


def digest(token_ids: list[int]) -> str:
    return sha256(np.array(token_ids, dtype="<i4").tobytes()).hexdigest()[:32]


# ---------------------------------------------------------------- what the processors return

HALF = ([0.5] * 3, [0.5] * 3)
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def _restored(values: Any, channels: tuple[list[float], list[float]]) -> np.ndarray:
    """values: [height, width, 3], normalized."""
    mean, std = map(np.array, channels)
    return np.rint((np.asarray(values, np.float64) * std + mean) * 255).astype(np.uint8)


def _planes(channels: tuple[list[float], list[float]]) -> Callable[[Any], list[np.ndarray]]:
    def parts(made: Any) -> list[np.ndarray]:
        values = np.asarray(made["pixel_values"])
        planes = values.reshape(-1, *values.shape[-3:])
        return [_restored(plane.transpose(1, 2, 0), channels) for plane in planes]

    return parts


def _qwen(patch: int, channels: tuple[list[float], list[float]]) -> Callable[[Any], Any]:
    def parts(made: Any) -> list[np.ndarray]:
        [[_, rows, columns]] = np.asarray(made["image_grid_thw"])
        values = np.asarray(made["pixel_values"])
        values = values.reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)[:, :, :, :, :, 0]
        values = values.transpose(0, 2, 5, 1, 3, 6, 4)
        return [_restored(values.reshape(rows * patch, columns * patch, 3), channels)]

    return parts


def _patches(values: Any, rows: int, columns: int, channels: Any) -> np.ndarray:
    """values: [patches, 16 * 16 * 3]"""
    values = np.asarray(values)[: rows * columns].reshape(rows, columns, 16, 16, 3)
    return _restored(values.transpose(0, 2, 1, 3, 4).reshape(rows * 16, columns * 16, 3), channels)


def _gemma4(made: Any) -> list[np.ndarray]:
    columns, rows = np.asarray(made["image_position_ids"][0]).max(0) + 1
    return [_patches(made["pixel_values"][0], rows, columns, ([0] * 3, [1] * 3))]


def _lfm2(made: Any) -> list[np.ndarray]:
    shapes = np.asarray(made["spatial_shapes"])
    return [_patches(p, *shape, HALF) for p, shape in zip(made["pixel_values"], shapes)]


def _pixtral(made: Any) -> list[np.ndarray]:
    height, width = made["image_sizes"][0]
    plane = np.asarray(made["pixel_values"])[0][:, :height, :width]
    return [_restored(plane.transpose(1, 2, 0), CLIP)]


# ---------------------------------------------------------------- the processors


def _named(model: str, name: str) -> Any:
    from importlib import import_module

    kind = "_".join([word for word in ("image", "video", "feature") if word in name.lower()][:1])
    modules = {
        "image": f"image_processing_{model}",
        "video": f"video_processing_{model}",
        "feature": f"feature_extraction_{model}",
        "": f"processing_{model}",
    }
    return getattr(import_module(f"transformers.models.{model}.{modules[kind]}"), name)


def _make_qwen(patch: int, channels: Any, least: int, most: int) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        image = _named("qwen2_vl", "Qwen2VLImageProcessor")(
            size={"shortest_edge": least, "longest_edge": most},
            patch_size=patch,
            image_mean=channels[0],
            image_std=channels[1],
        )
        video = _named("qwen3_vl", "Qwen3VLVideoProcessor")()
        return _named("qwen3_vl", "Qwen3VLProcessor")(image, tokenizer, video)

    return make


def _make_gemma3(tokenizer: Any) -> Any:
    image = _named("gemma3", "Gemma3ImageProcessor")(
        size={"height": 896, "width": 896}, image_mean=HALF[0], image_std=HALF[1]
    )
    return _named("gemma3", "Gemma3Processor")(image, tokenizer)


def _make_gemma4(tokenizer: Any) -> Any:
    return _named("gemma4", "Gemma4Processor")(
        _named("gemma4", "Gemma4AudioFeatureExtractor")(),
        _named("gemma4", "Gemma4ImageProcessor")(),
        tokenizer,
        _named("gemma4", "Gemma4VideoProcessor")(),
    )


def _make_pixtral(edge: int, patch: int, merge: int) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        image = _named("pixtral", "PixtralImageProcessor")(
            size={"longest_edge": edge}, patch_size=patch
        )
        processor = _named("pixtral", "PixtralProcessor")
        return processor(image, tokenizer, patch_size=patch, spatial_merge_size=merge)

    return make


def _make_idefics3(tokenizer: Any) -> Any:
    image = _named("idefics3", "Idefics3ImageProcessor")()
    return _named("idefics3", "Idefics3Processor")(image, tokenizer)


def _make_smolvlm(tokenizer: Any) -> Any:
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = str  # of videos; the package is not needed here
    image = _named("smolvlm", "SmolVLMImageProcessor")(
        size={"longest_edge": 1024}, max_image_size={"longest_edge": 512}
    )
    video = _named("smolvlm", "SmolVLMVideoProcessor")()
    return processing_smolvlm.SmolVLMProcessor(image, tokenizer, video, image_seq_len=64)


def _make_internvl(tokenizer: Any) -> Any:
    image = _named("got_ocr2", "GotOcr2ImageProcessor")(
        size={"height": 448, "width": 448}, image_mean=IMAGENET[0], image_std=IMAGENET[1]
    )
    video = _named("internvl", "InternVLVideoProcessor")()
    return _named("internvl", "InternVLProcessor")(image, tokenizer, video)


def _make_lfm2(tokenizer: Any) -> Any:
    image = _named("lfm2_vl", "Lfm2VlImageProcessor")(do_convert_rgb=True)
    return _named("lfm2_vl", "Lfm2VlProcessor")(image, tokenizer)


QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
GEMMA3_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
GEMMA4_TOKENS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CROPS = {"do_pan_and_scan": True}
IDEFICS_SIZES = ((50, 40), (700, 300), (30, 400), (1000, 1100))


def cases() -> dict[str, Case]:
    config = vision_config
    edges = {"shortest_edge": 65536, "longest_edge": 1_003_520}
    small = {"size": {"longest_edge": 1024}, "max_image_size": {"longest_edge": 512}}
    return {
        "qwen3_vl": Case(
            config("qwen3_vl", 32, processor={"size": edges, "patch_size": 16}),
            QWEN_TOKENS,
            _make_qwen(16, HALF, 65536, 1_003_520),
            _qwen(16, HALF),
        ),
        "qwen2_5_vl": Case(
            config("qwen2_5_vl", 28, processor={"min_pixels": 3136, "max_pixels": 401_408}),
            QWEN_TOKENS,
            _make_qwen(14, CLIP, 3136, 401_408),
            _qwen(14, CLIP),
        ),
        "gemma3": Case(
            config("gemma3", 56, tower={"image_size": 896}),
            *(GEMMA3_TOKENS, _make_gemma3, _planes(HALF)),
        ),
        "gemma3 with crops": Case(
            config("gemma3", 56), GEMMA3_TOKENS, _make_gemma3, _planes(HALF), CROPS
        ),
        "gemma4": Case(config("gemma4", 48), GEMMA4_TOKENS, _make_gemma4, _gemma4),
        "pixtral": Case(
            config("pixtral", 16, processor={"size": {"longest_edge": 1024}}),
            *({}, _make_pixtral(1024, 16, 1), _pixtral),
        ),
        "mistral3": Case(
            config("mistral3", 28, processor={"size": {"longest_edge": 1540}}),
            *({}, _make_pixtral(1540, 14, 2), _pixtral),
        ),
        "idefics3": Case(
            config("idefics3", 28),
            *({}, _make_idefics3, _planes(HALF), {}, IDEFICS_SIZES),
        ),
        "smolvlm": Case(
            config("idefics3", 64, processor=small),
            *({}, _make_smolvlm, _planes(HALF), {}, IDEFICS_SIZES),
        ),
        "internvl": Case(
            config("internvl", 28, tower={"image_size": [448, 448]}),
            *(INTERNVL_TOKENS, _make_internvl, _planes(IMAGENET)),
        ),
        "lfm2_vl": Case(config("lfm2_vl", 32), {}, _make_lfm2, _lfm2),
    }


def _record(case: Case) -> list[dict[str, Any]]:
    """One for each prompt: its ids, and the parts of each picture."""
    from transformers import PreTrainedTokenizerFast

    named = PreTrainedTokenizerFast(
        tokenizer_object=backend(), pad_token="<video>", extra_special_tokens=case.tokens
    )
    processor, found = case.processor(named), []
    for pictures in prompts_of(case):
        made = processor(images=pictures, text=prompt_of(case), **case.kwargs)
        alone = sole_prompt_of(case)
        parts = []
        for picture in pictures:
            one = processor(images=[picture], text=alone, return_tensors="pt", **case.kwargs)
            parts += [
                {"shape": [*part.shape[:2]], "pixels": sample(part)} for part in case.parts(one)
            ]
        token_ids = [int(token) for token in made["input_ids"][0]]
        found.append({"num_tokens": len(token_ids), "ids": digest(token_ids), "parts": parts})
    return found


if __name__ == "__main__":
    recorded = {name: _record(case) for name, case in cases().items()}
    lines = (f"{json.dumps(name)}: {json.dumps(made)}" for name, made in recorded.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
