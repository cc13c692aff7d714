r"""Move all tokens of a text by the same distance: what of the attention stays, and under which encoding.

One head reads tokens x at positions p and at p + s, with the same weights. What depends on relative positions alone
does not notice. Rotating q and k keeps the logits, :math:`(R_{m+s}q)^\top R_{n+s}k = q^\top R_{n-m}k`, because the
rotations are powers of one. What is tried beside it:

``rotate_qkv``   v rotated as well: :math:`\sum_n w_{mn}R_{n+s}v_n` turns with s
``rotate_qkvo``  and the context rotated back at the query, :math:`R_{m+s}^\top`: relative again
``rotate_x``     the token rotated before W_q and W_k, which stand between the two rotations then
``add_to_x``     sinusoids added to the token, as in the first Transformer

What is rotated may be rotated in five ways:

``planes``        RoPE's own: pair j by :math:`t\,\theta_j`
``one_rotation``  :math:`e^{tA}`, A any skew-symmetric matrix: no planes are chosen, A brings its own
``grid_axial``    two coordinates, each with half of the pairs
``grid_mixed``    two coordinates, every pair turned by :math:`a_j x + b_j y`
``grid_two_rotations``  :math:`e^{xA}e^{yB}` with A and B that do not commute

Sources: Su et al. 2021, RoFormer (arXiv:2104.09864), section 3.2.2; Su 2025, https://kexue.fm/archives/10862 (rotated
values); https://github.com/naver-ai/rope-vit, models/vit_rope.py (axial and mixed).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.positions import BASE, rotate
from engine.rotary import exact_angles

if TYPE_CHECKING:
    import torch

ROTATIONS = ("planes", "one_rotation", "grid_axial", "grid_mixed", "grid_two_rotations")


@dataclass(frozen=True)
class Params(BaseParams):
    scheme: str = choice("rotate_qk", "rotate_qkv", "rotate_qkvo", "rotate_x", "add_to_x")
    rotation: str = choice(*ROTATIONS)
    position_shift: int = number(500, low=1, high=16384, log2=True)
    d_k: int = number(64, low=4, high=128, log2=True)
    seq_len: int = number(16, low=2, high=64)
    base: float = number(BASE, low=10, high=10_000_000)

    def unread(self) -> frozenset[str]:
        return frozenset({"rotation"} if self.scheme == "add_to_x" else ())

    def rules(self) -> Iterator[Problem]:
        if self.d_k % 4:
            yield Problem("rule", "d_k", self.d_k, rule="width_is_four_times")


METRICS = (
    Metric("logits_change"),
    Metric("weights_change_tv"),
    Metric("context_change"),
    Metric("position_effect"),
)
PLOTS = (
    Plot("logits", table="logits", x="position_shift", y="logits_change", by="scheme", x_scale="log2"),
    Plot("values", table="values", x="position_shift", y="context_change", by="scheme", x_scale="log2"),
    Plot("rotations", table="rotations", x="position_shift", y="logits_change", by="rotation", x_scale="log2"),
)
BUDGET_S = 0.05

SHIFTS = (1, 4, 16, 64, 256, 1024)
OF_LOGITS = ("rotate_qk", "rotate_x", "add_to_x")
OF_VALUES = ("rotate_qk", "rotate_qkv", "rotate_qkvo")


class _Head(NamedTuple):
    """A head with one text, and what the rotations need beside it; float64 on the CPU, as the law is exact."""

    x: torch.Tensor  # (seq_len, d_k): the model is as wide as its one head
    W_q: torch.Tensor
    W_k: torch.Tensor
    W_v: torch.Tensor
    eigenvalues: torch.Tensor  # (2, d_k), of i times a skew-symmetric matrix for each axis, with its
    eigenvectors: torch.Tensor  # (2, d_k, d_k), complex
    frequencies: torch.Tensor  # (2, d_k / 2), of the mixed rotation


class _Seen(NamedTuple):
    """What the head computes at every shift. Shapes: (n_shifts, seq_len, seq_len), the context (..., seq_len, d_k)."""

    logits: torch.Tensor
    weights: torch.Tensor
    context: torch.Tensor


def memory_bytes(params: Params) -> int:
    """Tokens, logits and contexts at all shifts, complex where a rotation is free, beside the matrices."""
    at_shifts = (3 + len(SHIFTS)) * params.seq_len
    return 16 * (16 * at_shifts * params.d_k + 4 * at_shifts * params.seq_len + 16 * params.d_k**2)


def run(params: Params, run: Run) -> Result:
    """The chosen encoding at one shift, and several at many shifts.

    Changes are root mean squares over that of the logits, or of the context, at shift 0; ``position_effect`` is the
    change of the logits when all tokens are put at one place instead.
    """
    import torch

    head = _draw(params, run)
    run.progress(0.1)
    seen = _read(params, head, params.scheme, params.rotation, torch.tensor([0, params.position_shift]))
    nowhere = attention_logits(head.x @ head.W_q, head.x @ head.W_k)  # so they are with all tokens at position 0
    metrics = {
        "logits_change": _change(seen.logits)[1].item(),
        "weights_change_tv": ((seen.weights[1] - seen.weights[0]).abs().sum(dim=-1) / 2).mean().item(),
        "context_change": _change(seen.context)[1].item(),
        "position_effect": _change(torch.stack((seen.logits[0], nowhere)))[1].item(),
    }

    shifts = torch.tensor([0, *SHIFTS])
    schemes, rotations = {}, {}
    for scheme in dict.fromkeys(OF_LOGITS + OF_VALUES):
        run.progress(0.3)
        schemes[scheme] = _read(params, head, scheme, "planes", shifts)
    for rotation in ROTATIONS:
        run.progress(0.7)
        rotations[rotation] = _read(params, head, "rotate_qk", rotation, shifts)
    tables = {
        "logits": _table("scheme", "logits", {scheme: schemes[scheme] for scheme in OF_LOGITS}),
        "values": _table("scheme", "context", {scheme: schemes[scheme] for scheme in OF_VALUES}),
        "rotations": _table("rotation", "logits", rotations),
    }
    return Result(metrics, tables)


def _draw(params: Params, run: Run) -> _Head:
    """Tokens of variance 1, matrices that keep it, generators that turn by up to some 2 radians a position."""
    import torch

    def normal(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double()

    d_k = params.d_k
    x = normal(params.seq_len, d_k)
    W_q, W_k, W_v = normal(3, d_k, d_k) / math.sqrt(d_k)
    square = normal(2, d_k, d_k)
    generators = (square - square.mT) / math.sqrt(2 * d_k)
    eigenvalues, eigenvectors = torch.linalg.eigh(1j * generators)
    return _Head(x, W_q, W_k, W_v, eigenvalues, eigenvectors, normal(2, d_k // 2))


def _read(params: Params, head: _Head, scheme: str, rotation: str, shifts: torch.Tensor) -> _Seen:
    """What the head computes when the text begins at each of the shifts. Shapes: shifts (n_shifts,)."""
    import torch

    def turn(x: torch.Tensor, back: bool = False) -> torch.Tensor:
        return _turn(params, head, rotation, x, shifts, back)

    x = head.x.expand(len(shifts), -1, -1)
    if scheme == "rotate_x":
        x = turn(x)
    elif scheme == "add_to_x":
        angles = exact_angles(shifts[:, None] + torch.arange(params.seq_len), params.d_k, params.base)
        x = x + torch.cat((angles.sin(), angles.cos()), dim=-1)
    q, k, v = x @ head.W_q, x @ head.W_k, x @ head.W_v
    if scheme in ("rotate_qk", "rotate_qkv", "rotate_qkvo"):
        q, k = turn(q), turn(k)
    if scheme in ("rotate_qkv", "rotate_qkvo"):
        v = turn(v)
    logits = attention_logits(q, k)
    weights = softmax(logits)
    read = context(weights, v)
    if scheme == "rotate_qkvo":
        read = turn(read, back=True)
    return _Seen(logits, weights, read)


def _turn(
    params: Params, head: _Head, rotation: str, x: torch.Tensor, shifts: torch.Tensor, back: bool
) -> torch.Tensor:
    """``x`` rotated, or rotated back, at its positions. Shapes: x (n_shifts, seq_len, d_k), shifts (n_shifts,)."""
    import torch

    order = torch.arange(params.seq_len)
    place = shifts[:, None] + order  # (n_shifts, seq_len)
    side = math.isqrt(params.seq_len - 1) + 1
    across, down = shifts[:, None] + order % side, shifts[:, None] + order // side
    if rotation == "one_rotation":
        return _turn_freely(x, head, 0, -place if back else place)
    if rotation == "grid_two_rotations":
        if back:
            return _turn_freely(_turn_freely(x, head, 0, -across), head, 1, -down)
        return _turn_freely(_turn_freely(x, head, 1, down), head, 0, across)
    if rotation == "planes":
        angles = exact_angles(place, params.d_k, params.base)
    elif rotation == "grid_mixed":
        angles = across[..., None] * head.frequencies[0] + down[..., None] * head.frequencies[1]
    else:  # each axis has a head of half the width to itself
        halves = [exact_angles(along, params.d_k // 2, params.base) for along in (across, down)]
        angles = torch.cat(halves, dim=-1)
    return rotate(x, -angles if back else angles)


def _turn_freely(x: torch.Tensor, head: _Head, axis: int, positions: torch.Tensor) -> torch.Tensor:
    r"""Each row of ``x`` under :math:`e^{tA}` at its position t, A the skew-symmetric matrix of the axis.

    :math:`\mathrm i A` is Hermitian: with its real eigenvalues :math:`\lambda` and eigenvectors U,
    :math:`e^{tA} = U e^{-\mathrm i t\lambda} U^{*}`.

    Shapes: x (..., seq_len, d_k), positions (..., seq_len).
    """
    import torch

    vectors = head.eigenvectors[axis]
    turned = positions[..., None] * head.eigenvalues[axis]
    phases = torch.polar(torch.ones_like(turned), -turned)
    return ((x.to(vectors.dtype) @ vectors.conj() * phases) @ vectors.mT).real


def _change(values: torch.Tensor) -> torch.Tensor:
    """Root mean square of each difference from the first, over the first's. Shapes: (n, rows, columns) to (n,)."""
    size = values[0].square().mean().sqrt()
    return (values - values[0]).square().mean(dim=(-2, -1)).sqrt() / size


def _table(names: str, what: str, seen: dict[str, _Seen]) -> Table:
    """The change of the logits or of the context at every shift, for each of the series."""
    changes = [_change(getattr(one, what))[1:].numpy() for one in seen.values()]
    return {
        names: np.repeat(list(seen), len(SHIFTS)),
        "position_shift": np.tile(SHIFTS, len(seen)),
        f"{what}_change": np.concatenate(changes).astype(np.float32),
    }
