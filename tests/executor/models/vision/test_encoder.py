"""Encoders of images against transformers' towers and projectors."""

import pytest
import torch
from quire.executor.model_builder import make_encoder
from quire.executor.models.vision.encoder import VisionEncoder
from quire.executor.weights.table import stored_shape
from quire.executor.worker import Worker
from quire.frontend.engine_args import EngineArgs
from quire.frontend.model_info.model_sizes import encoder_bytes
from quire.ipc.models.vision_config import grid_of
from quire.ipc.models.vision_families import tower_of
from quire.ipc.models.vision_tower import TABLE
from quire.tests.tiny_vision import KINDS, make_images, save_tiny_vision_model, transformers_rows


def load(directory, **arguments):
    defaults = {"max_model_len": 256, "num_threads": 1}
    config = EngineArgs(str(directory), **{**defaults, **arguments}).create_engine_config()
    worker = Worker(config)
    worker.load_model(lambda stage, fraction: None)
    assert worker.model.encoder is not None
    return worker


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """The kind, transformers' model and the directory of its checkpoint."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, save_tiny_vision_model(directory, request.param), directory


@pytest.mark.sampled
@pytest.mark.parametrize("isa", ["auto", "none"])
def test_rows_equal_those_of_transformers(saved, isa):
    kind, model, directory = saved
    worker = load(directory, dtype="float32", cpu_isa=isa)
    images, vision = make_images(kind), worker.config.model_config.vision
    assert vision is not None
    wanted = [transformers_rows(model, kind, pixels) for pixels in images]
    found = worker.model.encoder.encode(images).split([len(rows) for rows in wanted])
    for pixels, mine, rows in zip(images, found, wanted, strict=True):
        grid = grid_of(vision, *pixels.shape[:2])
        assert mine.shape == rows.shape == (grid[0] * grid[1], worker.model.encoder.width)
        assert (mine - rows).abs().max() < 1e-4 * rows.abs().max()


def test_the_largest_image_can_be_encoded(saved):
    """Its rows are at most those asked for, or those of all images."""
    _, _, directory = saved
    encoder = load(directory, dtype="float32").model.encoder
    for num_rows in (1, 7, 40):
        side = encoder.config.largest_side(num_rows)
        encoder.encode_largest(num_rows)
        rows = encoder.encode([torch.zeros(side, side, 3, dtype=torch.uint8)])
        assert 0 < len(rows) <= (num_rows if encoder.config.positions != TABLE else 16)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_are_those_that_the_table_names(saved, quantization):
    _, _, directory = saved
    arguments = {"dtype": "bfloat16", "quantization": quantization}
    config = EngineArgs(str(directory), **arguments).create_engine_config()
    encoder, num_bytes = make_encoder(config, torch.bfloat16, torch.device("cpu"), "auto")
    assert num_bytes == encoder_bytes(config.model_config.vision, "bfloat16", quantization)
    shapes = {name: stored_shape(tensor) for name, tensor in encoder.weights()}
    assert shapes == tower_of(config.model_config.vision).weight_shapes()


def test_bits_do_not_depend_on_what_is_beside_nor_on_threads(saved):
    kind, _, directory = saved
    worker = load(directory, dtype="bfloat16")
    images = make_images(kind)
    alone = [worker.model.encoder.encode([pixels]) for pixels in images]
    beside = worker.model.encoder.encode([*images[::-1], *images])
    assert torch.equal(beside[-sum(map(len, alone)) :], torch.cat(alone))
    more = load(directory, dtype="bfloat16", num_threads=2).model.encoder.encode(images)
    assert torch.equal(more, torch.cat(alone))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_native_call_has_the_bits_of_single_operations(saved, dtype):
    kind, _, directory = saved
    encoder = load(directory, dtype=dtype).model.encoder
    images = make_images(kind)
    found = encoder.encode(images)
    assert encoder._run._program is not None
    op_by_op = VisionEncoder(encoder.tower, encoder.tower, encoder)
    assert torch.equal(op_by_op.encode(images), found)
