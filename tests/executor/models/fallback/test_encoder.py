"""Text encoders in transformers' code against transformers, alone and in a batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from quire import EngineArgs
from quire.frontend.model_info.plan import make_plan
from quire.ipc.models.encoders import FALLBACK_ENCODERS
from quire.tests.executor.pooling_core import pool, raw_rows, start_core
from quire.tests.tiny_encoders import save_tiny_encoder
from safetensors.torch import load_file, save_file
from transformers import AutoModel

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "pad_token_id": 1,
    "max_position_embeddings": 200,
}
OWN = {
    "albert": {"embedding_size": 24},
    "electra": {"embedding_size": 24},
    "eurobert": {"num_key_value_heads": 4},
}
TEXTS = [random.Random(i).choices(range(5, 300), k=k) for i, k in enumerate((1, 40, 7, 100, 33))]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("kind", FALLBACK_ENCODERS)
def test_hidden_states_equal_those_of_transformers(tmp_path, kind):
    directory = save_tiny_encoder(tmp_path, kind, **SIZES, **OWN.get(kind, {}))
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    core = start_core(directory, max_model_len=None)
    assert core.config.model_config.runner == "pooling"
    together = raw_rows(core, TEXTS)
    with torch.inference_mode():
        for text, own in zip(TEXTS, together):
            other = model(torch.tensor([text])).last_hidden_state[0].numpy()
            assert own.shape == other.shape and abs(own - other).max() < 1e-5
    for text, own in zip(TEXTS, pool(core, TEXTS)):
        assert abs(np.linalg.norm(own) - 1) < 1e-6
        assert abs(pool(core, [text])[0] - own).max() < 1e-6
    core.shutdown()


def test_heads_and_buffers_are_read_over_and_a_pair_has_types(tmp_path):
    directory = save_tiny_encoder(tmp_path, "electra", **SIZES, embedding_size=24)
    text, path = TEXTS[1], directory / "model.safetensors"
    core = start_core(directory, max_model_len=None)
    (right,) = pool(core, [text], second_text_start=9)
    core.shutdown()
    stored = {f"electra.{name}": tensor for name, tensor in load_file(path).items()}
    stored["electra.embeddings.position_ids"] = torch.arange(200)[None]
    stored["discriminator_predictions.dense.bias"] = torch.zeros(4)
    stored["classifier.dense.bias"] = torch.zeros(4)
    save_file(stored, path)
    core = start_core(directory, max_model_len=None)
    assert pool(core, [text], second_text_start=9)[0].tobytes() == right.tobytes()
    assert pool(core, [text])[0].tobytes() != right.tobytes()
    core.shutdown()
    plan = make_plan(EngineArgs(str(directory)), 2**30)
    assert plan.fits and plan.kv_cache_bytes == 0 and plan.architecture == "ElectraModel"
