"""Encoders of images from GGUF files, with the names and the layout of llama.cpp's conversion."""

import re

import gguf
import pytest
import torch
from quire.executor.worker import Worker
from quire.frontend.engine_args import EngineArgs
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.models.mmproj import vision_of_mmproj
from quire.tests import gguf_checkpoints
from quire.tests.tiny_models import save_tiny_model
from quire.tests.tiny_vision import (
    HIDDEN,
    make_images,
    make_tiny_vision_model,
    save_tiny_vision_model,
)

_LAYERS = {
    r"layer_norm1|norm1|attention_norm": "ln1",
    r"layer_norm2|norm2|ffn_norm": "ln2",
    r"(?:self_attn|attention)\.([qkv])_proj": r"attn_\1",
    r"self_attn\.out_proj|attn\.proj|attention\.o_proj": "attn_out",
    r"attn\.qkv": "attn_qkv",
    r"mlp\.fc1|mlp\.linear_fc1|feed_forward\.up_proj": "ffn_up",
    r"mlp\.fc2|mlp\.linear_fc2|feed_forward\.down_proj": "ffn_down",
    r"feed_forward\.gate_proj": "ffn_gate",
}
_OTHERS = {
    r".*patch_embed(ding|\.proj)|.*patch_conv": "v.patch_embd",
    r".*(position_embedding|pos_embed)": "v.position_embd",
    r".*post_layernorm|.*\.merger\.norm": "v.post_ln",
    r".*ln_pre": "v.pre_ln",
    r".*\.merger\.linear_fc1": "mm.0",
    r".*\.merger\.linear_fc2": "mm.2",
    r".*mm_soft_emb_norm": "mm.soft_emb_norm",
    r".*mm_input_projection": "mm.input_projection",
    r".*\.linear_([12])": r"mm.\1",
    r".*deepstack_merger_list\.(\d)\.norm": r"v.deepstack.\1.norm",
    r".*deepstack_merger_list\.(\d)\.linear_(fc\d)": r"v.deepstack.\1.\2",
}
_KINDS = {"qwen3_vl": "qwen3vl_merger", "gemma3": "gemma3", "llava": "pixtral"}


def name_in_file(name):
    stem, _, end = name.replace("_weight", ".weight").rpartition(".")
    if (layer := re.fullmatch(r".*(?:layers|blocks)\.(\d+)\.(.+)", stem)) is not None:
        for pattern, part in _LAYERS.items():
            if re.fullmatch(pattern, layer[2]):
                return f"v.blk.{layer[1]}.{re.sub(pattern, part, layer[2])}.{end}"
    for pattern, other in _OTHERS.items():
        if (found := re.fullmatch(pattern, stem)) is not None:
            return f"{found.expand(other)}.{end}"
    raise AssertionError(name)


def write_mmproj(path, kind, model, type="F32", **changed):
    """Writes the encoder of transformers' model."""
    own, width = model.config.vision_config, model.config.text_config.hidden_size
    heads = getattr(own, "num_attention_heads", None) or own.num_heads
    keys = {
        "projection_dim": width,
        "image_size": getattr(own, "image_size", 24),
        "patch_size": own.patch_size,
        "embedding_length": own.hidden_size,
        "feed_forward_length": own.intermediate_size,
        "block_count": getattr(own, "num_hidden_layers", None) or own.depth,
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": 1e-6,
        **changed,
    }
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", _KINDS[kind])
    for key, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"clip.vision.{key}", value)
    if kind == "qwen3_vl":
        layers = [i in own.deepstack_visual_indexes for i in range(own.depth)]
        writer.add_array("clip.vision.is_deepstack_layers", layers)
    if kind == "gemma3":
        writer.add_uint32("clip.vision.projector.scale_factor", 3)
    for name, tensor in model.state_dict().items():
        if "language_model" in name or name.startswith("lm_head"):
            continue
        parts = {name_in_file(name): tensor}
        if tensor.dim() == 5:  # a tensor for each frame
            parts = {
                "v.patch_embd.weight": tensor[:, :, 0],
                "v.patch_embd.weight.1": tensor[:, :, 1],
            }
        if "soft_emb" in name:
            parts = {one: values + 1 for one, values in parts.items()}
        if kind == "llava" and re.search(r"[qk]_proj", name):
            rows = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2)
            parts = dict.fromkeys(parts, rows.reshape(tensor.shape))
        for one, values in parts.items():
            is_matrix = values.dim() == 2 and values.shape[1] % 32 == 0 and ".blk." in one
            packed, stored = gguf_checkpoints.quantize(
                values.contiguous().numpy(), type if is_matrix else "F32"
            )
            writer.add_tensor(one, packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(model, **arguments):
    defaults = {"max_model_len": 128, "num_threads": 1, "dtype": "float32"}
    worker = Worker(EngineArgs(str(model), **{**defaults, **arguments}).create_engine_config())
    worker.load_model(lambda stage, fraction: None)
    return worker


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text model's GGUF file, in a directory of its own."""
    directory = tmp_path_factory.mktemp("text")
    path = directory / "model.gguf"
    gguf_checkpoints.write_gguf(path, save_tiny_model(directory / "saved", "gemma3_text"))
    return path


@pytest.mark.parametrize("kind", _KINDS)
def test_an_encoder_from_a_file_equals_that_of_safetensors(kind, text, tmp_path):
    model = save_tiny_vision_model(tmp_path / "saved", kind)
    path = tmp_path / "encoder.gguf"
    write_mmproj(path, kind, model)
    images = make_images(kind)
    worker, own = load(text, mmproj=str(path)), load(tmp_path / "saved")
    mine, wanted = worker.config.model_config.vision, own.config.model_config.vision
    assert (mine.unit, mine.num_vectors) == (wanted.unit, wanted.num_vectors)
    rows = own.model.encoder.encode(images)
    assert torch.equal(worker.model.encoder.encode(images), rows)


def test_blocks_of_a_file_stay_blocks(text, tmp_path):
    model = save_tiny_vision_model(tmp_path / "saved", "gemma3")
    path = text.parent / "mmproj-Q8_0.gguf"  # found beside the model
    write_mmproj(path, "gemma3", model, "Q8_0")
    try:
        images = make_images("gemma3")
        found = load(text, dtype="bfloat16").model.encoder.encode(images).float()
        assert load(text, language_model_only=True).model.encoder is None
    finally:
        path.unlink()
    wanted = load(tmp_path / "saved").model.encoder.encode(images)
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_a_text_model_without_rms_norm_eps_reads_images(text, tmp_path):
    path = tmp_path / "encoder.gguf"
    write_mmproj(path, "gemma3", make_tiny_vision_model("gemma3"))
    config = {"model_type": "lfm2", "hidden_size": HIDDEN, "norm_eps": 1e-5}
    assert vision_of_mmproj(path, text, config).hidden_size == HIDDEN


def test_files_that_do_not_fit_are_refused(text, tmp_path):
    model = save_tiny_vision_model(tmp_path / "saved", "gemma3")
    path = tmp_path / "encoder.gguf"
    write_mmproj(path, "gemma3", model, projection_dim=63)
    with pytest.raises(ModelLoadError, match="its rows have 63 numbers"):
        load(text, mmproj=str(path))
    write_mmproj(path, "gemma3", model, block_count=4)
    with pytest.raises(ModelLoadError, match=r"no tensor v\.blk\.3\..* for vision_tower"):
        load(text, mmproj=str(path))
    with pytest.raises(ModelLoadError, match="the architecture must be clip"):
        load(text, mmproj=str(text))
    with pytest.raises(InvalidParameterError, match="mmproj: must be a GGUF file"):
        load(text, mmproj=str(tmp_path / "nothing.gguf"))
    with pytest.raises(InvalidParameterError, match="mmproj: is for a model in a GGUF file"):
        load(tmp_path / "saved", mmproj=str(path))
