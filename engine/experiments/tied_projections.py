r"""One matrix for queries and keys, two, or one whose keys change signs: the logits, their symmetry and the diagonal.

With :math:`q_i=x_iW_q` and :math:`k_j=x_jW_k` the logits are :math:`x_i\,W_qW_k^\top x_j^\top/\sqrt{d_k}`.

``tied``       W_k = W_q: a Gram matrix of the q_i, symmetric and without negative eigenvalues, |q_i|² on the diagonal
``symmetric``  W_k = W_q with the second half of its columns negated: symmetric too, with eigenvalues of both signs
``separate``   two matrices, drawn independently

Then, as switches: rotary positions, lengths taken away from the keys or from both (the Reformer does the former), a
bias on the logit of the previous token, and masks, one of which leaves the token itself out. A query that would see
nothing then sees itself, as in the Reformer.

Tokens are N(0, 1) and independent, matrices N(0, ``weight_std``²), so coordinates of q have variance
:math:`d_{model}\,weight\_std^2`. The same draws serve all three.

Source: vaswani2017, section 3.2.2; transformers-reformer (normalized keys, the token itself left out).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, mask_logits, softmax, unit_norm
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.chunks import chunks, items_per_chunk
from engine.masks import keep_causal
from engine.positions import rotary_angles, rotate

if TYPE_CHECKING:
    import torch

PROJECTIONS = ("tied", "separate", "symmetric")


@dataclass(frozen=True)
class Params(BaseParams):
    projections: str = choice(*PROJECTIONS)
    seq_len: int = number(32, low=2, high=256, log2=True)
    d_model: int = number(64, low=1, high=4096, log2=True)
    d_k: int = number(16, low=1, high=256, log2=True)
    weight_std: float = number(0.125, low=0.005, high=1, step=0.005)
    qk_lengths: str = choice("as_projected", "unit_keys", "unit_both")
    rope: bool = flag(False)
    mask: str = choice("no_mask", "no_self", "causal", "strict")
    previous_bias: float = number(0.0, low=0, high=16, step=1)
    batch: int = number(8, low=1, high=64, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.rope and self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="rope_needs_pairs")


METRICS = (
    Metric("self_weight_mean"),
    Metric("self_weight_times_uniform"),
    Metric("logits_asymmetry"),
    Metric("weights_asymmetry"),
    Metric("self_is_top_share"),
    Metric("self_logit_mean"),
    Metric("previous_weight_mean"),
    Metric("logits_eigenvalue_min"),
    Metric("logits_eigenvalue_max"),
    Metric("symmetric_share"),
    Metric("qk_parameters"),
)
PLOTS = (
    Plot("weights", table="map", mark="heat", x="key_position", y="query_position", value="attention_weight"),
    Plot("logits", table="map", mark="heat", x="key_position", y="query_position", value="logits"),
    Plot("self_weight", table="by_spread", x="coordinate_std", y="self_weight_mean", by="projections", x_scale="log2"),
    Plot("eigenvalues", table="eigenvalues", x="eigenvalue_number", y="logits_eigenvalue", by="projections"),
)
BUDGET_S = 0.05

SPREADS = tuple(2.0 ** (half / 2) for half in range(-4, 4))  # of q's coordinates
TABLE_ITEMS = 4  # sequences behind the curve of the diagonal
N_SHOWN = 24  # tokens of the maps


def memory_bytes(params: Params) -> int:
    """The matrices and their product, a chunk of sequences, and the rows behind the curve and the eigenvalues."""
    items = max(_items(params), min(params.batch, TABLE_ITEMS))
    tokens = items * params.seq_len * (2 * params.d_model + 12 * params.d_k)
    logits = (10 * items + 16) * params.seq_len**2
    matrices = 9 * params.d_model * params.d_k + 16 * params.d_k**2  # some of them in float64
    return 4 * (tokens + logits + matrices) + 2**18


def run(params: Params, run: Run) -> Result:
    """Logits and weights of ``batch`` sequences under the chosen projections; all three side by side in two tables.

    ``logits_asymmetry``: the largest difference of a logit and its mirror image, before masking, over the logits' root
    mean square; ``weights_asymmetry``: the same of the weights, as it is. ``self_weight_times_uniform``: the weight on
    the token itself, times the number of keys its row can see. ``logits_eigenvalue_min``, ``_max``: of the symmetric
    part of the first sequence's logits, over the largest absolute one, in float64. ``symmetric_share``: of the squared
    entries of W_q W_kᵀ, the part in its symmetric half. ``qk_parameters``: the numbers that are drawn for both.

    Shapes: x (item, seq_len, d_model), q and k (item, seq_len, d_k).
    """
    W_q = params.weight_std * run.randn(params.d_model, params.d_k)
    W_other = params.weight_std * run.randn(params.d_model, params.d_k)
    run.progress(0.05)
    keep = _keep(params, run.device)
    n_visible = keep.sum(dim=-1)
    sums = dict.fromkeys(("self_weight", "times_uniform", "top", "self_logit", "previous", "square"), 0.0)
    logits_gap = weights_gap = 0.0
    first: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for start, n_items in chunks(params.batch, _items(params)):
        run.progress(0.05 + 0.75 * start / params.batch)
        x = run.randn(n_items, params.seq_len, params.d_model)
        q = x @ W_q
        logits = _logits(params, q, _keys(params.projections, x, q, W_other))
        weights = softmax(mask_logits(logits, keep))
        on_self = weights.diagonal(dim1=-2, dim2=-1)
        sums["self_weight"] += on_self.sum().item()
        sums["times_uniform"] += (on_self * n_visible).sum().item()
        sums["top"] += (on_self >= weights.amax(dim=-1)).sum().item()
        sums["self_logit"] += logits.diagonal(dim1=-2, dim2=-1).sum().item()
        sums["previous"] += weights.diagonal(offset=-1, dim1=-2, dim2=-1).sum().item()
        sums["square"] += logits.square().sum().item()
        logits_gap = max(logits_gap, (logits - logits.mT).abs().max().item())
        weights_gap = max(weights_gap, (weights - weights.mT).abs().max().item())
        if first is None:
            first = x[: min(n_items, TABLE_ITEMS)], logits[0], weights[0]
    assert first is not None
    x, logits, weights = first

    n_rows = params.batch * params.seq_len
    spectra = {name: _eigenvalues(params, x[:1], W_q, W_other, name) for name in PROJECTIONS}
    run.progress(0.9)
    chosen = spectra[params.projections]
    size = max(float(np.abs(chosen).max()), np.finfo(float).tiny)
    metrics = {
        "self_weight_mean": sums["self_weight"] / n_rows,
        "self_weight_times_uniform": sums["times_uniform"] / n_rows,
        "logits_asymmetry": logits_gap / math.sqrt(sums["square"] / (n_rows * params.seq_len)),
        "weights_asymmetry": weights_gap,
        "self_is_top_share": sums["top"] / n_rows,
        "self_logit_mean": sums["self_logit"] / n_rows,
        "previous_weight_mean": sums["previous"] / (params.batch * (params.seq_len - 1)),
        "logits_eigenvalue_min": float(chosen.min()) / size,
        "logits_eigenvalue_max": float(chosen.max()) / size,
        "symmetric_share": _symmetric_share(W_q, _key_matrix(params.projections, W_q, W_other)),
        "qk_parameters": float(W_q.numel() + (W_other.numel() if params.projections == "separate" else 0)),
    }
    tables = {
        "map": _map(logits, weights),
        "by_spread": _by_spread(params, x, W_q, W_other, keep),
        "eigenvalues": {
            "eigenvalue_number": np.tile(np.arange(1, params.seq_len + 1), len(PROJECTIONS)),
            "logits_eigenvalue": np.concatenate([np.sort(values)[::-1] for values in spectra.values()]),
            "projections": np.repeat(PROJECTIONS, params.seq_len),
        },
    }
    return Result(metrics, tables)


def _items(params: Params) -> int:
    return items_per_chunk(params.batch, numbers=params.seq_len * params.d_model, logits=params.seq_len**2)


def _keep(params: Params, device: torch.device) -> torch.Tensor:
    """Which keys a query sees; itself, where there would be nothing else. Shapes: (seq_len, seq_len)."""
    import torch

    keep = torch.ones(params.seq_len, params.seq_len, dtype=torch.bool, device=device)
    if params.mask in ("causal", "strict"):
        keep = keep_causal(params.seq_len, device=device)
    if params.mask in ("no_self", "strict"):
        keep = keep & ~torch.eye(params.seq_len, dtype=torch.bool, device=device)
        keep[0, 0] = params.mask == "strict"
    return keep


def _signs(like: torch.Tensor) -> torch.Tensor:
    """1 for the first half of the columns, -1 for the second. Shapes: (d_k,)."""
    signs = like.new_ones(like.shape[-1])
    signs[(like.shape[-1] + 1) // 2 :] = -1
    return signs


def _keys(projections: str, x: torch.Tensor, q: torch.Tensor, W_other: torch.Tensor) -> torch.Tensor:
    """The keys of the same tokens. Shapes: x (..., d_model), q (..., d_k); returns as q."""
    if projections == "separate":
        return x @ W_other
    return q if projections == "tied" else q * _signs(q)


def _key_matrix(projections: str, W_q: torch.Tensor, W_other: torch.Tensor) -> torch.Tensor:
    if projections == "separate":
        return W_other
    return W_q if projections == "tied" else W_q * _signs(W_q)


def _logits(params: Params, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled logits, before the mask. A vector without length is set to the typical one, √d_k: the scale stays."""
    import torch

    if params.qk_lengths != "as_projected":
        k = math.sqrt(params.d_k) * unit_norm(k)
    if params.qk_lengths == "unit_both":
        q = math.sqrt(params.d_k) * unit_norm(q)
    if params.rope:
        angles = rotary_angles(torch.arange(params.seq_len, device=q.device), params.d_k)
        q, k = rotate(q, angles), rotate(k, angles)
    logits = attention_logits(q, k)
    if params.previous_bias:
        at = torch.arange(1, params.seq_len, device=q.device)
        logits[..., at, at - 1] += params.previous_bias
    return logits


def _eigenvalues(
    params: Params, x: torch.Tensor, W_q: torch.Tensor, W_other: torch.Tensor, projections: str
) -> np.ndarray:
    """Of the symmetric part of one sequence's logits, in float64. Shapes: x (1, seq_len, d_model); (seq_len,)."""
    import torch

    x, W_q, W_other = x.cpu().double(), W_q.cpu().double(), W_other.cpu().double()
    q = x @ W_q
    logits = _logits(params, q, _keys(projections, x, q, W_other))[0]
    return np.array(torch.linalg.eigvalsh((logits + logits.mT) / 2).numpy())


def _symmetric_share(W_q: torch.Tensor, W_k: torch.Tensor) -> float:
    r"""Of :math:`M=W_qW_k^\top`: :math:`\|(M+M^\top)/2\|^2/\|M\|^2`, without building M, which is d_model wide.

    The squares are :math:`(\|M\|^2+\mathrm{tr}\,M^2)/2`; both come from products of d_k columns.
    """
    W_q, W_k = W_q.cpu().double(), W_k.cpu().double()
    square = ((W_q.mT @ W_q) * (W_k.mT @ W_k)).sum()
    across = W_k.mT @ W_q
    trace = (across * across.mT).sum()
    return float((1 + trace / square) / 2)


def _by_spread(params: Params, x: torch.Tensor, W_q: torch.Tensor, W_other: torch.Tensor, keep: torch.Tensor) -> Table:
    """The weight on the token itself under all three projections, as the matrices are drawn larger."""
    drawn = params.weight_std * math.sqrt(params.d_model)
    q = x @ W_q / drawn
    rows = []
    for projections in PROJECTIONS:
        k = _keys(projections, x, q, W_other / drawn)
        for spread in SPREADS:
            weights = softmax(mask_logits(_logits(params, spread * q, spread * k), keep))
            rows.append((spread, projections, weights.diagonal(dim1=-2, dim2=-1).cpu().double().mean().item()))
    names = ("coordinate_std", "projections", "self_weight_mean")
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}


def _map(logits: torch.Tensor, weights: torch.Tensor) -> Table:
    """A row a query and key, of the first tokens of the first sequence. Shapes: (seq_len, seq_len) each."""
    shown = [matrix[:N_SHOWN, :N_SHOWN].cpu().double().numpy() for matrix in (logits, weights)]
    queries, keys = np.indices(shown[0].shape)
    return {
        "query_position": queries.ravel(),
        "key_position": keys.ravel(),
        "logits": shown[0].ravel().astype(np.float32),
        "attention_weight": shown[1].ravel().astype(np.float32),
    }
