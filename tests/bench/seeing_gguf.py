"""Writes a random model that reads images, as a checkpoint and as a GGUF file beside an mmproj
file, by the converter of llama.cpp's sources.

    python tests/bench/seeing_gguf.py KIND DIRECTORY --llama-cpp SOURCES [--type f32]

KIND is a family in a tiny size, or one with an encoder of a full size before a tiny text model:
siglip_400m (Gemma 3) and qwen3_vl_2b.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from quire.ipc.json_files import read_json
from quire.tests.seeing_models import TEMPLATE, add_tokens
from quire.tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE
from quire.tests.tiny_vision import save_tiny_vision_model
from safetensors.torch import load_file, save_file

_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_QWEN = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
_GEMMA3 = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
_MISTRAL = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
_QWEN_AREA = {"size": {"shortest_edge": 8 * 8**2, "longest_edge": 4096 * 8**2}}
_TILES = [(row, column) for row in (1, 2) for column in (1, 2)]
_FAKE = "<fake_token_around_image>"
_IDEFICS = "<image>", _FAKE, "<global-img>", *(f"<row_{r}_col_{c}>" for r, c in _TILES), "\n\n"
_LFM2 = "<image>", "<|image_start|>", "<|image_end|>"
# a text model that does not take long beside the encoder
_SMALL_TEXT = {"hidden_size": 256, "head_dim": 64}


class Kind(NamedTuple):
    model: str  # of tests/tiny_vision.py
    # the image's, those before and after it, then others
    tokens: tuple[str, ...]
    written: str  # for an image, by a chat template
    processor: dict[str, Any]  # preprocessor_config.json
    # (width, height) of images: the first is not resized
    sizes: tuple[tuple[int, int], ...]
    text: dict[str, Any] = {}  # keys of text_config
    vision: dict[str, Any] = {}  # keys of vision_config
    whole: dict[str, Any] = {}  # other keys of config.json


def _mrope(theta: float, *sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": [*sections]}


def _qwen(model: str, normal: dict[str, Any], text: dict[str, Any] = {}) -> Kind:
    written = "<|vision_start|><|image_pad|><|vision_end|>"
    return Kind(model, _QWEN, written, normal | _QWEN_AREA, ((64, 40), (75, 50)), text)


def _idefics(model: str) -> Kind:
    sizes = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
    text = {"architectures": ["LlamaForCausalLM"]}
    return Kind(model, _IDEFICS, "<image>", _HALF | sizes, ((48, 48), (61, 40)), text)


KINDS = {
    "qwen3_5": _qwen("qwen3_5", _HALF, {"linear_value_head_dim": 16}),
    # llama.cpp turns pairs of heads that are in none of the sections otherwise than transformers
    "qwen3_vl": _qwen("qwen3_vl", _HALF, {"rope_parameters": _mrope(1e4, 3, 3, 2)}),
    "qwen2_5_vl": _qwen("qwen2_5_vl", _CLIP),
    "gemma3": Kind(
        *("gemma3", _GEMMA3, "<start_of_image>"),
        _HALF | {"size": {"height": 24, "width": 24}, "image_seq_length": 4},
        ((24, 24), (61, 61), (61, 40)),
        {"tie_word_embeddings": False},  # with a tied head, every token is certain
        whole={"tie_word_embeddings": False},
    ),
    "gemma4": Kind(
        *("gemma4", ("<|image|>", "<|image>", "<image|>"), "<|image|>"),
        {"image_mean": [0.0] * 3, "image_std": [1.0] * 3},
        ((240, 168), (300, 210)),
    ),
    "mistral3": Kind(
        *("mistral3", _MISTRAL, "[IMG]"),
        _CLIP | {"size": {"longest_edge": 1540}, "patch_size": 8},
        ((40, 24), (45, 27)),
        {"model_type": "mistral", "sliding_window": None},
    ),
    "llava": Kind(
        *("llava", _MISTRAL, "[IMG]"),
        _CLIP | {"size": {"longest_edge": 1024}, "patch_size": 4},
        ((40, 24), (45, 27)),
        {"sliding_window": None},
    ),
    "idefics3": _idefics("idefics3"),
    "smolvlm": _idefics("smolvlm"),
    "internvl": Kind(
        *("internvl", ("<IMG_CONTEXT>", "<img>", "</img>"), "<IMG_CONTEXT>"),
        _IMAGENET | {"size": {"height": 24, "width": 24}},
        ((24, 24), (48, 24), (61, 40)),
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["InternVisionModel"]},
    ),
    "lfm2_vl": Kind(
        *("lfm2_vl", _LFM2, "<image>", _HALF, ((256, 256), (300, 200))),
        {"architectures": ["Lfm2ForCausalLM"]},
    ),
    "siglip_400m": Kind(
        *("gemma3", _GEMMA3, "<start_of_image>"),
        _HALF | {"size": {"height": 896, "width": 896}},
        ((896, 896),),
        _SMALL_TEXT | {"sliding_window": 1024},
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 896,
        },
        {"mm_tokens_per_image": 256},
    ),
    "qwen3_vl_2b": Kind(
        *("qwen3_vl", _QWEN, "<|vision_start|><|image_pad|><|vision_end|>", _HALF, ((896, 896),)),
        # llama.cpp needs more layers than those that add the rows of three
        _SMALL_TEXT
        | {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
        | {"rope_parameters": _mrope(5e6, 11, 11, 10)},
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "depth": 24,
            "num_heads": 16,
            "patch_size": 16,
            "out_hidden_size": 256,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    ),
}
# model_type of vision_config -> parts of names, and what published files, which the converter
# expects, have in their place
_SIGLIP = {"vision_tower.": "vision_tower.vision_model."}
_PUBLISHED_NAMES = {
    "siglip_vision_model": _SIGLIP,
    "siglip2_vision_model": _SIGLIP,
    "internvl_vision": {
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}
# Any vocabulary is one of GPT-2's kind, and the mark at the end of a row of Pixtral's images, which
# llama.cpp reads from the mmproj file, is not left out with the text model. Arguments: SOURCES,
# then the converter's.
_CONVERT = """
import sys
sources = sys.argv.pop(1)
sys.path[:0] = [sources, sources + "/gguf-py"]
import convert_hf_to_gguf as converter
from conversion.base import MmprojModel, TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
def filtered(cls, item, of_base=MmprojModel.filter_tensors.__func__):
    is_wanted = cls.__name__ == "LlavaVisionModel" and "embed_tokens" in item[0]
    return item if is_wanted else of_base(cls, item)
MmprojModel.filter_tensors = classmethod(filtered)
found = converter.get_model_class
def with_vocabulary(*names, **options):
    kind = found(*names, **options)
    kind.set_vocab = lambda self: self._set_vocab_gpt2()
    return kind
converter.get_model_class = with_vocabulary
converter.main()
"""


def save(kind: str, directory: Path, layers: int | None = None) -> None:
    """Writes the checkpoint. layers: how many the encoder has; None: as many as the kind."""
    of = KINDS[kind]
    parts = {"text": of.text, "vision": dict(of.vision), "whole": of.whole}
    if layers is not None:
        parts["vision"]["depth" if "depth" in of.vision else "num_hidden_layers"] = layers
    save_tiny_vision_model(directory, of.model, **parts)
    # the converter wants a token for each row of the embedding
    others = (f"<|other{i}|>" for i in range(VOCAB_SIZE))
    tokens = *of.tokens, *islice(others, VOCAB_SIZE - EOS_TOKEN_ID - 1 - len(of.tokens))
    image = add_tokens(directory / "tokenizer.json", tokens)
    path = directory / "config.json"
    config = read_json(path)
    for token, parts in enumerate(("image", "vision_start boi", "vision_end eoi")):
        keys = [f"{part}_token_{end}" for part in parts.split() for end in ("id", "index")]
        config |= {key: image + token for key in keys if key in config}
    path.write_text(json.dumps(config))
    for old, new in _PUBLISHED_NAMES.get(config["vision_config"]["model_type"], {}).items():
        _rename(directory / "model.safetensors", old, new)
    (directory / "preprocessor_config.json").write_text(json.dumps(of.processor))
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", of.written))


def _rename(path: Path, old: str, new: str) -> None:
    tensors = load_file(path)
    save_file({name.replace(old, new): t for name, t in tensors.items()}, path, {"format": "pt"})


def convert(directory: Path, sources: Path, type: str = "f32") -> tuple[Path, Path]:
    """The GGUF files of the text model and of the encoder, beside the checkpoint."""
    folder = directory / type
    folder.mkdir(exist_ok=True)
    made = folder / "model.gguf", folder / "mmproj-model.gguf"
    is_qwen35 = read_json(directory / "config.json")["model_type"] == "qwen3_5"
    text = ["--no-nextn"] if is_qwen35 else []
    for path, extra in zip(made, (text, ["--mmproj"])):
        command = [sys.executable, "-P", "-c", _CONVERT, str(sources), str(directory)]
        command += ["--outfile", str(path), "--outtype", type, *extra]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{directory.name}: {done.stderr[-2000:]}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's sources")
    parser.add_argument("--layers", type=int, help="of the encoder")
    parser.add_argument("--type", default="f32", choices=("f32", "f16", "bf16", "q8_0"))
    args = parser.parse_args()
    save(args.kind, args.directory, args.layers)
    print(*convert(args.directory, args.llama_cpp, args.type), sep="\n")


if __name__ == "__main__":
    main()
