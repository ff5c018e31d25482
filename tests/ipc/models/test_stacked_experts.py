"""The pieces of stacked tensors cover them, each number once."""

from __future__ import annotations

import pytest
from quire.ipc.models.architectures import ARCHITECTURES, find_architecture
from quire.ipc.models.stacked_experts import stacked_pieces
from quire.tests.tiny_models import make_tiny_config


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
def test_pieces_cover_each_stack_once(kind: str) -> None:
    hf_config = make_tiny_config(kind).to_dict()
    architecture = ARCHITECTURES[find_architecture(hf_config)]
    shapes = architecture.weight_shapes(architecture.parse(hf_config))
    pieces = stacked_pieces(shapes)
    rows: dict[str, list[tuple[int, int]]] = {}
    for name, piece in pieces.items():
        assert piece.stored not in shapes
        if piece.expert is None:
            assert piece.shape == shapes[name]
            continue
        last, columns = (-1, piece.shape[1:-1]) if piece.is_transposed else (1, piece.shape[2:])
        covered = range(piece.shape[last])[piece.rows]
        assert [len(covered), *columns] == shapes[name]
        rows.setdefault(piece.stored, []).extend((piece.expert, row) for row in covered)
    assert rows
    for stored, covered in rows.items():
        piece = next(piece for piece in pieces.values() if piece.stored == stored)
        num_rows = piece.shape[-1 if piece.is_transposed else 1]
        assert sorted(covered) == [(e, n) for e in range(piece.shape[0]) for n in range(num_rows)]


def test_a_dense_model_has_none() -> None:
    hf_config = make_tiny_config("llama").to_dict()
    architecture = ARCHITECTURES["LlamaForCausalLM"]
    assert stacked_pieces(architecture.weight_shapes(architecture.parse(hf_config))) == {}
