"""Small models side by side: every tensor of weights has a leading axis ``model``, and one product serves them all.

The loss is summed over that axis, so no gradient passes between models, and each trains as it would alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def times(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """x W of each model, as one product a model.

    Shapes: (model, batch, n, d_in) and (model, d_in, d_out); returns (model, batch, n, d_out).
    """
    return (x.flatten(1, 2) @ W).unflatten(1, x.shape[1:3])


def look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[m, index[m]] for every model m: one lookup in the tables laid under one another.

    Shapes: table (model, n, width), index (model, ...) of whole numbers; returns (model, ..., width).
    """
    import torch
    from torch.nn.functional import embedding

    first = torch.arange(table.shape[0], device=index.device) * table.shape[1]
    return embedding(index + first.view(-1, *[1] * (index.dim() - 1)), table.flatten(0, 1))


def bare_layer_norm(x: torch.Tensor) -> torch.Tensor:
    """LayerNorm over the last axis without gain and bias. Shapes: as x."""
    from torch.nn.functional import layer_norm

    return layer_norm(x, x.shape[-1:])


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of each target.

    Shapes: (model, batch, n, n_tokens), and (batch, n) for all models or (model, batch, n); returns (model, batch, n).
    """
    log_p = logits.log_softmax(dim=-1)
    return -log_p.gather(-1, targets.expand(logits.shape[:-1])[..., None])[..., 0]
