"""Tables of the heat maps that several experiments draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.base import Table

if TYPE_CHECKING:
    import torch


def weight_map(weights: torch.Tensor, n_shown: int) -> Table:
    """A row for each query and key, of the first ``n_shown``. Shapes: weights (q_len, kv_len), of one head."""
    shown = weights[:n_shown, :n_shown].cpu().double().numpy()
    queries, keys = np.indices(shown.shape)
    return {
        "query_position": queries.ravel(),
        "key_position": keys.ravel(),
        "attention_weight": shown.ravel().astype(np.float32),
    }
