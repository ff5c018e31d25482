"""What a model that reads images has beside its layers: the table of rows that are encoded.

Must not know: how an image is encoded, requests, who decides which rows an image gets.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ipc.models.vision_config import VisionConfig, components_of
from ...kernels.ops import AttentionMetadata


class ImageReader:
    """Takes rows of encoded images into the residual stream.

    A row has `num_vectors` vectors [hidden_size]. The first takes the place of a token's embedding;
    each of the others is added to the input of one of the layers after the first.
    """

    def __init__(
        self,
        vision: VisionConfig,
        num_rows: int,
        ops: Any,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """num_rows: of the table; 0: of a stage whose layers read no rows. On a CPU its pages are
        taken when they are written.
        """
        self.vision, self.ops = vision, ops
        self.table = torch.empty(
            num_rows, vision.num_vectors * vision.hidden_size, dtype=dtype, device=device
        )
        self._vectors = self.table.split(vision.hidden_size, dim=1)

    def components(self, num_pairs: int) -> list[int]:
        """See components_of."""
        return components_of(self.vision, num_pairs)

    def sees_later(self, sliding_window: int) -> bool:
        """Whether tokens of an image see each other in a layer with this window, or with 0."""
        vision = self.vision
        return vision.sees_whole_images and (
            sliding_window > 0 or not vision.only_windows_see_whole_images
        )

    def store(self, rows: torch.Tensor, num_rows: int, first_row: int) -> None:
        """rows [num_rows, num_vectors * hidden_size], which the encoder has returned for an image,
        become those of the table from first_row on. Raises ValueError for another number of rows.
        """
        if len(rows) != num_rows:
            raise ValueError(f"the encoder returns {len(rows)} rows for an image of {num_rows}")
        self.table[first_row : first_row + num_rows].copy_(rows)

    def begin(self, residual: torch.Tensor, metadata: AttentionMetadata) -> None:
        """In place, residual [T, hidden_size]: the stream before the first layer."""
        assert metadata.images is not None
        self.ops.replace_rows(residual, metadata.images.rows, self._vectors[0])

    def after_layer(self, layer: int, residual: torch.Tensor, metadata: AttentionMetadata) -> None:
        """In place, residual [T, hidden_size]: the stream after a layer."""
        if layer + 1 < len(self._vectors):
            assert metadata.images is not None
            self.ops.add_rows(residual, metadata.images.rows, self._vectors[layer + 1])

    def changes_stream_after(self, layer: int) -> bool:
        """Whether after_layer does anything."""
        return layer + 1 < len(self._vectors)
