r"""Multi-head latent attention in its two forms: keys and values expanded for every head, or one latent for all.

With c = norm(W_down x) as the latent of a token, the keys and values of head h are :math:`W_{UK}^h c` and
:math:`W_{UV}^h c`. A logit can be bracketed in two ways,

.. math:: q^\top (W_{UK}\,c) = (W_{UK}^\top q)^\top c,\qquad \sum_j w_j W_{UV}\,c_j = W_{UV}\sum_j w_j c_j

so attention can run on the latents alone, with a query of ``kv_rank`` numbers a head. ``rope_on_keys`` turns the
expanded keys and their queries: between W_q and W_UK then stands a rotation by the distance,
:math:`W_q^\top R_{s-t} W_{UK}`, and no single matrix serves all distances. ``decoupled`` leaves these dimensions alone
and joins ``d_rope`` rotary ones, whose key all heads share and which is cached beside the latent. ``norm_on_keys``
normalizes each head's key, which the latent form can't know without its length.

Every rank is at most that of the latent: that of the keys of all heads side by side, and that of keys and values
together. Heads that share keys (``n_kv_heads``) are a latent as well, of :math:`2\,h_{kv}\,d_k` numbers, with a W_UK
that copies. Ranks and matrices are those of float64; ``number_format`` is that of the two forms.

Sources: deepseek2024, sections 2.1.2 and 2.1.3 (both forms, the rotary dimensions); deepseek-v3-code, ``MLA.forward``
(the norm of the latent, the scale, the order of the products); meng2025, abstract of version 2 (GQA as a latent).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention, context, mask_logits, qk_product, scale_value, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.positions import BASE
from engine.rotary import exact_angles, turn

if TYPE_CHECKING:
    import torch

NUMBER_FORMATS = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Params(BaseParams):
    rope: str = choice("decoupled", "rope_on_keys", "no_rope")
    kv_rank: int = number(32, low=8, high=128, step=8)
    n_heads: int = number(4, low=1, high=16, log2=True)
    d_k: int = number(16, low=2, high=64, log2=True)
    d_rope: int = number(8, low=2, high=64, step=2)
    seq_len: int = number(64, low=2, high=256, step=2)
    d_model: int = number(64, low=8, high=256, log2=True)
    number_format: str = choice(*NUMBER_FORMATS)
    latent_norm: str = choice("norm_on_latent", "norm_on_keys", "no_norm")
    absorbed_scale: str = choice("head_width", "latent_width")
    n_kv_heads: int = number(1, low=1, high=16, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            values = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="width_is_even")
        if self.d_rope % 2:
            yield Problem("rule", "d_rope", self.d_rope, rule="model_width_is_even")

    def unread(self) -> frozenset[str]:
        return frozenset() if self.rope == "decoupled" else frozenset({"d_rope"})


METRICS = (
    Metric("absorbed_difference"),
    Metric("fixed_matrix_error"),
    Metric("keys_rank"),
    Metric("same_distance_difference"),
    Metric("stored_norms_difference"),
    Metric("keys_values_rank"),
    Metric("joint_logits_rank"),
    Metric("mha_keys_rank"),
    Metric("gqa_keys_rank"),
    Metric("gqa_as_latent_difference"),
)
PLOTS = (
    Plot("distances", table="by_distance", x="token_distance", y="matrix_difference", by="rope"),
    Plot("formats", table="by_number_format", x="number_format", y="absorbed_difference_log10", mark="bar"),
    Plot("spectrum", table="spectrum", x="singular_index", y="singular_share", by="matrix", y_scale="log10"),
)
BUDGET_S = 0.1

DRAWN_FLOOR = 1e-18  # smaller shares, which are rounding, are drawn here: a logarithmic axis has no 0


class _Layer(NamedTuple):
    """Shapes: x (seq_len, d_model); W_q, W_k, W_v (heads, d_k, d_model), W_o (n_heads, d_model, d_k), W_down (kv_rank,
    d_model), W_uk, W_uv (n_heads, d_k, kv_rank), W_qr (n_heads, d_rope, d_model), W_kr (d_rope, d_model)."""

    x: torch.Tensor
    W_q: torch.Tensor
    W_o: torch.Tensor
    W_down: torch.Tensor
    W_uk: torch.Tensor
    W_uv: torch.Tensor
    W_qr: torch.Tensor
    W_kr: torch.Tensor
    W_k: torch.Tensor
    W_v: torch.Tensor


def memory_bytes(params: Params) -> int:
    """Matrices, what they make of the tokens, logits of all heads, matrices by distance twice over, in float64."""
    n, heads, rank, width = params.seq_len, params.n_heads, params.kv_rank, params.d_k + params.d_rope
    matrices = heads * (8 * width * params.d_model + 4 * params.d_k * rank) + rank * params.d_model
    tokens = n * (4 * params.d_model + heads * (8 * width + 4 * rank) + 4 * rank)
    return 8 * (2 * matrices + 2 * tokens + 10 * heads * n * n + 8 * n * params.d_model * rank)


def run(params: Params, run: Run) -> Result:
    """One layer of drawn weights over one causal sequence, in both forms.

    ``absorbed_difference``         largest difference of the outputs, relative to their root mean square
    ``stored_norms_difference``     the same with the length of every head's key handed to the latent form
    ``fixed_matrix_error``          what the best single matrix misses of those of all distances, root mean square
    ``same_distance_difference``    largest difference of these matrices between positions at the same distance
    ``joint_logits_rank``           rank of the logits of all heads, put below one another
    ``mha_keys_rank``, ``gqa_...``  with a matrix of its own for each head, or for ``n_kv_heads``
    """
    layer = _draw(params, run)
    run.progress(0.1)
    differences = {name: _difference(params, layer, name) for name in NUMBER_FORMATS}
    run.progress(0.3)
    by_rope = {rope: _absorbed_matrices(params, layer, rope) for rope in ("decoupled", "rope_on_keys")}
    matrices, same_distance = by_rope["rope_on_keys" if params.rope == "rope_on_keys" else "decoupled"]
    mean = matrices.mean(dim=0)
    run.progress(0.5)

    latent = _latent(params, layer)
    keys = _side_by_side(latent @ layer.W_uk.mT)
    q, k = _joined(params, layer, latent)
    compared = {
        "latent_keys": keys,
        "gqa_keys": _side_by_side(layer.x @ layer.W_k[: params.n_kv_heads].mT),
        "mha_keys": _side_by_side(layer.x @ layer.W_k.mT),
    }
    spectra = {name: _singular(matrix) for name, matrix in compared.items()}
    ranks = {name: _rank(spectra[name], max(matrix.shape)) for name, matrix in compared.items()}
    run.progress(0.7)
    both = _side_by_side([keys, *(latent @ layer.W_uv.mT)])
    joint = qk_product(q, k).flatten(0, 1)
    metrics = {
        "absorbed_difference": differences[params.number_format],
        "fixed_matrix_error": float((matrices - mean).norm() / matrices.norm()),
        "keys_rank": ranks["latent_keys"],
        "same_distance_difference": same_distance,
        "stored_norms_difference": _difference(params, layer, params.number_format, norms=True),
        "keys_values_rank": _rank(_singular(both), max(both.shape)),
        "joint_logits_rank": _rank(_singular(joint), max(joint.shape)),
        "mha_keys_rank": ranks["mha_keys"],
        "gqa_keys_rank": ranks["gqa_keys"],
        "gqa_as_latent_difference": _gqa_as_latent(params, layer),
    }
    tables = {
        "by_distance": {
            "rope": np.repeat(list(by_rope), params.seq_len),
            "token_distance": np.tile(np.arange(params.seq_len), len(by_rope)),
            "matrix_difference": np.concatenate([_from_the_first(found) for found, _ in by_rope.values()]),
        },
        "by_number_format": {
            "number_format": np.array(NUMBER_FORMATS),
            "absorbed_difference_log10": np.log10([max(d, DRAWN_FLOOR) for d in differences.values()]),
        },
        "spectrum": _spectrum_table(spectra),
    }
    return Result(metrics, tables)


def _draw(params: Params, run: Run) -> _Layer:
    """Tokens of variance 1, and matrices that keep it."""

    def draw(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double() / math.sqrt(shape[-1])

    heads, d_k, d_model, rank = params.n_heads, params.d_k, params.d_model, params.kv_rank
    return _Layer(
        x=draw(params.seq_len, d_model) * math.sqrt(d_model),
        W_q=draw(heads, d_k, d_model),
        W_o=draw(heads, d_model, d_k),
        W_down=draw(rank, d_model),
        W_uk=draw(heads, d_k, rank),
        W_uv=draw(heads, d_k, rank),
        W_k=draw(heads, d_k, d_model),
        W_v=draw(heads, d_k, d_model),
        W_qr=draw(heads, params.d_rope, d_model),
        W_kr=draw(params.d_rope, d_model),
    )


# --------------------------------------------------------------------------------------------------------------------
# The two forms


def _latent(params: Params, layer: _Layer) -> torch.Tensor:
    """What is cached. Shapes: (seq_len, kv_rank)."""
    latent = layer.x @ layer.W_down.mT
    return _rms_norm(latent) if params.latent_norm == "norm_on_latent" else latent


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(dim=-1, keepdim=True).sqrt()


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x / _rms(x)


def _queries(params: Params, layer: _Layer) -> torch.Tensor:
    """The queries of the content dimensions, turned where the expanded keys are. Shapes: (n_heads, seq_len, d_k)."""
    q = layer.x @ layer.W_q.mT
    return _turned(q) if params.rope == "rope_on_keys" else q


def _turned(x: torch.Tensor) -> torch.Tensor:
    """x turned by the positions 0, 1, ... of its next to last axis."""
    import torch

    angles = exact_angles(torch.arange(x.shape[-2]), x.shape[-1], BASE)
    return turn(x, angles, "half_split")


def _rotary(params: Params, layer: _Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """The joined rotary dimensions, none unless decoupled. Shapes: (n_heads, seq_len, d_rope), (seq_len, d_rope)."""
    q, k = layer.x @ layer.W_qr.mT, layer.x @ layer.W_kr.mT
    return (_turned(q), _turned(k)) if params.rope == "decoupled" else (q[..., :0], k[..., :0])


def _joined(params: Params, layer: _Layer, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of the expanded form. Shapes: (n_heads, seq_len, width) each."""
    import torch

    q_rope, k_rope = _rotary(params, layer)
    k = latent @ layer.W_uk.mT
    if params.latent_norm == "norm_on_keys":
        k = _rms_norm(k)
    if params.rope == "rope_on_keys":
        k = _turned(k)
    k_rope = k_rope.expand(params.n_heads, -1, -1)  # one key for all heads
    return torch.cat([_queries(params, layer), q_rope], -1), torch.cat([k, k_rope], -1)


def _expanded(params: Params, layer: _Layer) -> torch.Tensor:
    """Output of the layer with keys and values of every head. Shapes: (seq_len, d_model)."""
    latent = _latent(params, layer)
    q, k = _joined(params, layer, latent)
    heads = attention(q, k, latent @ layer.W_uv.mT, keep=_causal(params.seq_len))
    return (heads @ layer.W_o.mT).sum(dim=0)


def _absorbed(params: Params, layer: _Layer, *, norms: bool = False) -> torch.Tensor:
    """The same on the latents: W_uk goes to the queries before they meet a key, W_uv to the mean of the latents.

    ``norms``: the size of each head's key is cached beside the latent, where the expanded form normalizes keys.
    Shapes: (seq_len, d_model).
    """
    latent = _latent(params, layer)
    q_rope, k_rope = _rotary(params, layer)
    content = qk_product(_queries(params, layer) @ layer.W_uk, latent)  # one key of kv_rank numbers for all heads
    if norms and params.latent_norm == "norm_on_keys":
        content = content / _rms(latent @ layer.W_uk.mT).mT
    width = params.kv_rank if params.absorbed_scale == "latent_width" else params.d_k
    logits = (content + qk_product(q_rope, k_rope)) * scale_value("inv_sqrt_d_k", width + k_rope.shape[-1])
    means = context(softmax(mask_logits(logits, _causal(params.seq_len))), latent)
    return (means @ layer.W_uv.mT @ layer.W_o.mT).sum(dim=0)


def _causal(seq_len: int) -> torch.Tensor:
    import torch

    return torch.ones(seq_len, seq_len, dtype=torch.bool).tril()


def _difference(params: Params, layer: _Layer, number_format: str, *, norms: bool = False) -> float:
    """Of the latent form from the expanded one."""
    import torch

    rounded = _Layer(*(t.to(getattr(torch, number_format)) for t in layer))
    return _relative(_absorbed(params, rounded, norms=norms), _expanded(params, rounded))


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the root mean square of what is wanted."""
    found, wanted = found.cpu().double(), wanted.cpu().double()
    return float((found - wanted).abs().max() / wanted.square().mean().sqrt())


def _gqa_as_latent(params: Params, layer: _Layer) -> float:
    """Difference of heads that share keys and values from the latent form with k and v as the latent.

    W_uk and W_uv are zeros and ones then: they copy the part of the latent of a head's group. Without RoPE.
    """
    import torch

    n_kv_heads, group = params.n_kv_heads, params.n_heads // params.n_kv_heads
    q = layer.x @ layer.W_q.mT
    k, v = (layer.x @ W[:n_kv_heads].mT for W in (layer.W_k, layer.W_v))
    wanted = attention(q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), keep=_causal(params.seq_len))
    latent = _side_by_side([*k, *v])
    copies = torch.eye(latent.shape[-1], dtype=latent.dtype).unflatten(0, (2, n_kv_heads, params.d_k))
    W_uk, W_uv = copies.repeat_interleave(group, dim=1)
    logits = qk_product(q @ W_uk, latent) * scale_value("inv_sqrt_d_k", params.d_k)
    found = context(softmax(mask_logits(logits, _causal(params.seq_len))), latent) @ W_uv.mT
    return _relative(found, wanted)


# --------------------------------------------------------------------------------------------------------------------
# Matrices between a token and a latent, and ranks


def _absorbed_matrices(params: Params, layer: _Layer, rope: str) -> tuple[torch.Tensor, float]:
    """The matrix between x_t and the latent c_s for the first head and every distance t - s, counted from s = 0; and
    how far the one between the last token and a key at the same distance is from it.

    Shapes: (seq_len, d_model, kv_rank).
    """
    n = params.seq_len
    W_q, W_uk = layer.W_q[0].mT.expand(n, -1, -1), layer.W_uk[0].mT.expand(n, -1, -1)
    if rope == "rope_on_keys":  # every position turns the columns of its matrix
        W_q, W_uk = (_turned(W.transpose(0, 1)).transpose(0, 1) for W in (W_q, W_uk))
    from_first = W_q @ W_uk[0].mT
    from_last = W_q[-1] @ W_uk.flip(0).mT
    return from_first, float((from_first - from_last).abs().max() / from_first.abs().max())


def _from_the_first(matrices: torch.Tensor) -> np.ndarray:
    """How far each matrix is from that at distance 0, relative to the size of that one."""
    return np.asarray((matrices - matrices[0]).flatten(1).norm(dim=1) / matrices[0].norm())


def _side_by_side(parts: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """What the heads have for a token, in one row."""
    import torch

    return torch.cat(tuple(parts), dim=-1)


def _singular(matrix: torch.Tensor) -> torch.Tensor:
    import torch

    singular: torch.Tensor = torch.linalg.svdvals(matrix)
    return singular


def _rank(singular: torch.Tensor, longer: int) -> float:
    """Singular values above longer · 2.2e-16 of the largest, as in numpy's ``matrix_rank``."""
    import torch

    return float((singular > longer * torch.finfo(singular.dtype).eps * singular[0]).sum())


def _spectrum_table(spectra: dict[str, torch.Tensor]) -> Table:
    return {
        "matrix": np.concatenate([np.repeat(name, len(s)) for name, s in spectra.items()]),
        "singular_index": np.concatenate([np.arange(1, len(s) + 1) for s in spectra.values()]),
        "singular_share": np.concatenate([(s / s[0]).clamp_min(DRAWN_FLOOR).numpy() for s in spectra.values()]),
    }
