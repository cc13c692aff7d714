r"""What the sinusoidal table can do and what it cannot, beside the codes that one might take instead of it.

With frequencies :math:`\theta_i = base^{-2i/d}` and a pair :math:`(\sin p\theta_i, \cos p\theta_i)` for each of them

.. math:: PE(p)\cdot PE(p+k) = \sum_i \cos k\theta_i, \qquad PE(p+k) = M_k\,PE(p)

where :math:`M_k` turns pair i by :math:`k\theta_i`, at every p alike. Here neither is written down: products are taken
of all pairs of positions, and the map is found by least squares from the first ``n_fit`` positions and tried on all
later ones, pair by pair or as one full matrix.

What else is measured: how far apart the two nearest positions are, over the root mean square of the norms; how many
directions the table fills; and what of the products is left when W_q, W_k and the tokens' content come in.

Layouts: ``sin_cos_interleaved`` is the paper's, ``sines_then_cosines`` holds all sines before all cosines,
``tensor2tensor`` does so with exponents that reach the base itself, :math:`i/(d/2-1)` in place of :math:`2i/d`.

Everything is computed in float64 on the CPU, so that what is left of a law is rounding.

Sources: vaswani2017, section 3.5; tensor2tensor-code, ``add_timing_signal_1d``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import qk_product
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.encodings import SINUSOIDAL_BASE, sinusoidal

if TYPE_CHECKING:
    import torch

SINUSOIDS = ("sinusoidal", "one_wave")  # codes made of pairs of a sine and a cosine
COMPARED = ("sinusoidal", "one_wave", "integers", "binary", "random_table")  # always on the chart of distances


@dataclass(frozen=True)
class Params(BaseParams):
    code: str = choice("sinusoidal", "one_wave", "sines", "integers", "normalized", "binary", "random_table")
    d_model: int = number(64, low=4, high=512, log2=True)
    base: float = number(SINUSOIDAL_BASE, low=2, high=10_000_000)
    layout: str = choice("sin_cos_interleaved", "sines_then_cosines", "tensor2tensor")
    single_wavelength: float = number(100.0, low=2, high=100_000)
    seq_len: int = number(128, low=16, high=1024, log2=True)
    offset: int = number(7, low=1, high=512)
    fit_map: str = choice("pair_blocks", "full_matrix")
    n_fit: int = number(32, low=1, high=256, log2=True)
    bias: bool = flag(False)
    projection: str = choice("no_projection", "random_projection", "shared_orthogonal", "pair_rotations")
    content_std: float = number(0.0, low=0, high=10, step=0.1)

    def unread(self) -> frozenset[str]:
        one_number, one_pair = self.code in ("integers", "normalized"), self.code == "one_wave"
        return frozenset({"fit_map", "projection"} if one_number else {"fit_map"} if one_pair else ())

    def rules(self) -> Iterator[Problem]:
        if self.d_model % 2:
            yield Problem("rule", "d_model", self.d_model, rule="model_width_is_even")
        if self.n_fit + self.offset >= self.seq_len:
            yield Problem("rule", "n_fit", self.n_fit, rule="positions_left_to_test", values={"n": self.seq_len})
        if self.projection == "pair_rotations" and self.code not in SINUSOIDS:
            yield Problem("rule", "projection", self.projection, rule="rotations_need_pairs")


METRICS = (
    Metric("product_spread"),
    Metric("shift_error"),
    Metric("separation"),
    Metric("position_norm_min"),
    Metric("position_norm_max"),
    Metric("similarity_at_offset"),
    Metric("similarity_min"),
    Metric("first_rise"),
    Metric("shift_error_seen"),
    Metric("map_not_orthogonal"),
    Metric("nearest_gap"),
    Metric("wavelength_min"),
    Metric("wavelength_max"),
    Metric("still_share"),
    Metric("table_dimensions"),
    Metric("off_distance_share"),
    Metric("direction_share"),
)
PLOTS = (
    Plot("table", table="table", mark="heat", x="coordinate", y="position", value="position_value"),
    Plot(
        "products",
        table="products",
        x="signed_distance",
        y="similarity",
        by="stage",
        low="similarity_low",
        high="similarity_high",
    ),
    Plot("shift", table="shift", x="position", y="map_error", by="error_is", y_scale="log10"),
    Plot("separation", table="separation", x="seq_len", y="separation", by="code", x_scale="log2", y_scale="log10"),
)
BUDGET_S = 0.06

HELD = 0.99  # of the table's variance, by which its dimensions are counted
STILL = 0.1  # a coordinate that moves by less over all positions hardly tells any of them apart
SHOWN_POSITIONS, SHOWN_COORDINATES, SHOWN_DISTANCES = 16, 32, 32
DRAWN_ERROR = 1e-17  # what is exactly 0 is drawn here, on a logarithmic axis
DRAWN_SEPARATION = 1e-4  # and of distances also what is smaller
ROWS = 64  # of positions whose distances to all others are taken at once


def memory_bytes(params: Params) -> int:
    """Tables of the compared codes, logits, distances and products of all pairs of positions, in float64."""
    width = max(params.d_model, 2 * int(math.log2(params.seq_len)) + 2)
    matrices = 8 * width**2
    pairs = 13 * params.seq_len**2
    return 8 * (10 * params.seq_len * width + matrices + pairs) + 2**20


def run(params: Params, run: Run) -> Result:
    """The chosen code at positions 0 to seq_len - 1, and all that is measured of it.

    Shapes: table (seq_len, width); logits (seq_len, seq_len).
    """
    import torch

    random_table = run.randn(params.seq_len, params.d_model).cpu().double()
    table = _code(params, params.code, random_table)
    norms = table.norm(dim=1)
    size = norms.square().mean()
    run.progress(0.1)

    products = qk_product(table, table)
    low, mean, high = (_by_distance(products, reduce) for reduce in ("amin", "mean", "amax"))
    similarity = mean[params.seq_len - 1 :] / size  # at distances 0, 1, 2, ...
    rises = (similarity.diff() > 1e-12).nonzero()  # by more than rounding
    run.progress(0.2)

    seen, unseen, not_orthogonal = _fit(params, table)
    run.progress(0.4)

    distances = {code: _distances(params, code, random_table, run) for code in dict.fromkeys((params.code, *COMPARED))}
    nearest = int(distances[params.code].argmin())
    run.progress(0.7)

    centred = table - table.mean(dim=0)
    # the smaller of the two products; the other has the same eigenvalues, and zeros
    squares = centred.T @ centred if params.seq_len > table.shape[1] else centred @ centred.T
    variances = torch.linalg.eigvalsh(squares).flip(0).clamp(min=0)
    held = variances.cumsum(0) / variances.sum()
    reach = table.amax(dim=0) - table.amin(dim=0)
    run.progress(0.8)

    logits, logits_size = _logits(params, table, run)
    centre = logits - logits.mean()
    by_distance = _by_distance(logits, "mean")[_diagonals(params.seq_len)]
    turned = (logits - logits.T) / 2
    wavelengths = _wavelengths(params, table)
    metrics = {
        "product_spread": ((high - low).max() / size).item(),
        "shift_error": _relative(unseen).item(),
        "separation": (distances[params.code].min() / size.sqrt()).item(),
        "position_norm_min": norms.min().item(),
        "position_norm_max": norms.max().item(),
        "similarity_at_offset": similarity[params.offset].item(),
        "similarity_min": similarity.min().item(),
        "first_rise": float(rises[0].item() + 1 if len(rises) else params.seq_len),
        "shift_error_seen": _relative(seen).item(),
        "map_not_orthogonal": not_orthogonal,
        "nearest_gap": float(abs(nearest // params.seq_len - nearest % params.seq_len)),
        "wavelength_min": wavelengths.min().item(),
        "wavelength_max": wavelengths.max().item(),
        "still_share": (reach < STILL).cpu().double().mean().item(),
        "table_dimensions": float((held < HELD).sum().item() + 1),
        "off_distance_share": ((logits - by_distance).square().sum() / centre.square().sum()).item(),
        "direction_share": (turned.square().sum() / centre.square().sum()).item(),
    }
    tables = {
        "table": _table(params, table),
        "products": _products(params, (low, mean, high), size, logits, logits_size),
        "shift": _shift(params, table, torch.cat((seen[0], unseen[0])), size),
        "separation": _separations(params, distances, random_table),
    }
    return Result(metrics, tables)


def _code(params: Params, code: str, random_table: torch.Tensor) -> torch.Tensor:
    """One code of the positions 0 to seq_len - 1, float64 on the CPU. Shapes: returns (seq_len, width)."""
    import torch

    positions = torch.arange(params.seq_len).cpu().double()
    if code == "integers":
        return positions[:, None]
    if code == "normalized":
        return positions[:, None] / params.seq_len
    if code == "binary":
        bits = torch.arange(max(1, (params.seq_len - 1).bit_length()))
        return ((positions.long()[:, None] >> bits) & 1).cpu().double()
    if code == "random_table":
        return random_table
    if code == "one_wave":
        angles = positions * (2 * math.pi / params.single_wavelength)
        return torch.stack((angles.sin(), angles.cos()), dim=1)
    if code == "sines":
        return sinusoidal(positions, params.d_model, params.base)[:, 0::2]
    if params.layout == "tensor2tensor":
        steps = torch.arange(params.d_model // 2, dtype=torch.float64) / max(1, params.d_model // 2 - 1)
        angles = positions[:, None] * params.base**-steps
        return torch.cat((angles.sin(), angles.cos()), dim=1)
    table = sinusoidal(positions, params.d_model, params.base)
    return table if params.layout == "sin_cos_interleaved" else torch.cat((table[:, 0::2], table[:, 1::2]), dim=1)


def _pairs(params: Params, table: torch.Tensor) -> torch.Tensor:
    """The coordinates ordered so that those of a pair stand side by side. Shapes: (seq_len, width) both ways."""
    import torch

    if params.code != "sinusoidal" or params.layout == "sin_cos_interleaved":
        return table
    return torch.stack(table.chunk(2, dim=1), dim=2).flatten(1)


_Misses = tuple["torch.Tensor", "torch.Tensor"]  # squared error and squared size at each position


def _fit(params: Params, table: torch.Tensor) -> tuple[_Misses, _Misses, float]:
    """The linear map from a position to the one ``offset`` later, of the first n_fit positions; errors there and later.

    Also how far the map is from keeping lengths, the largest entry of M^T M - I over the blocks.
    """
    import torch

    ordered = _pairs(params, table)
    sources, targets = ordered[: -params.offset], ordered[params.offset :]
    error = torch.zeros(len(sources), dtype=table.dtype)
    not_orthogonal = 0.0
    width = 2 if params.fit_map == "pair_blocks" else table.shape[1]
    for start, aims in zip(sources.split(width, dim=1), targets.split(width, dim=1), strict=True):
        inputs = torch.cat((start, torch.ones(len(start), 1, dtype=start.dtype)), dim=1) if params.bias else start
        # the smallest solution where several fit the same positions
        found = torch.linalg.lstsq(inputs[: params.n_fit], aims[: params.n_fit], driver="gelsd").solution
        error += (inputs @ found - aims).square().sum(dim=1)
        linear = found[: start.shape[1]]
        gram = linear @ linear.T - torch.eye(len(linear), dtype=linear.dtype)
        not_orthogonal = max(not_orthogonal, gram.abs().max().item())
    sizes = targets.square().sum(dim=1)
    n = params.n_fit
    return (error[:n], sizes[:n]), (error[n:], sizes[n:]), not_orthogonal


def _relative(misses: _Misses) -> torch.Tensor:
    """Root mean square of the errors over that of the targets."""
    error, sizes = misses
    return (error.sum() / sizes.sum()).sqrt()


def _distances(params: Params, code: str, random_table: torch.Tensor, run: Run) -> torch.Tensor:
    """Distance of each two positions, that of one to itself infinite. Shapes: (seq_len, seq_len)."""
    import torch

    table = _code(params, code, random_table)
    found = []
    for rows in table.split(ROWS):
        # by differences: from products small distances would drown in rounding
        found.append(torch.cdist(rows, table, compute_mode="donot_use_mm_for_euclid_dist"))
        run.progress(0.5)
    return torch.cat(found).fill_diagonal_(torch.inf)


def _logits(params: Params, table: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """q·k of all positions, with the chosen matrices before the product, and the root mean square norms multiplied.

    Shapes: (seq_len, seq_len) and ().
    """
    import torch

    seq_len, width = table.shape
    content = run.randn(seq_len, width).cpu().double()
    W_q, W_k = (run.randn(width, width).cpu().double() / width**0.5 for _ in range(2))
    q = k = _pairs(params, table) + params.content_std * content
    if params.projection == "random_projection":
        q, k = q @ W_q, k @ W_k
    elif params.projection == "shared_orthogonal":
        both = torch.linalg.qr(W_q).Q
        q, k = q @ both, k @ both
    elif params.projection == "pair_rotations":
        # each pair of q and of k turned and stretched in its own way: a complex factor
        factors = [torch.complex(W[0, 0::2], W[1, 0::2]) * width**0.5 for W in (W_q, W_k)]
        pairs = torch.complex(q[:, 0::2].contiguous(), q[:, 1::2].contiguous())
        q, k = (torch.view_as_real(pairs * factor).flatten(1) for factor in factors)
    size = (q.square().sum(dim=1).mean() * k.square().sum(dim=1).mean()).sqrt()
    return qk_product(q, k), size


def _wavelengths(params: Params, table: torch.Tensor) -> torch.Tensor:
    """Positions for a full turn of each pair, from its step between positions 0 and 1; 0 where there are no pairs."""
    import torch

    if params.code not in SINUSOIDS:
        return torch.zeros(1, dtype=table.dtype)
    ordered = _pairs(params, table)
    angles = torch.atan2(ordered[:2, 0::2], ordered[:2, 1::2])
    return 2 * math.pi / angles.diff(dim=0)[0].remainder(2 * math.pi)


def _diagonals(seq_len: int) -> torch.Tensor:
    """Row minus column, counted from 0, for each entry of a matrix. Shapes: (seq_len, seq_len)."""
    import torch

    places = torch.arange(seq_len)
    return places[:, None] - places + seq_len - 1


def _by_distance(matrix: torch.Tensor, reduce: str) -> torch.Tensor:
    """The mean, largest or smallest entry of each diagonal. Shapes: (seq_len, seq_len); (2 seq_len - 1,)."""
    empty = matrix.new_zeros(2 * len(matrix) - 1)
    numbers = _diagonals(len(matrix)).flatten()
    return empty.scatter_reduce(0, numbers, matrix.flatten(), reduce, include_self=False)


def _table(params: Params, table: torch.Tensor) -> Table:
    """The first positions, and coordinates from fast to slow: whole pairs, where the code has them."""
    import torch

    width = table.shape[1]
    some = table[:SHOWN_POSITIONS]
    if params.code in SINUSOIDS and width > SHOWN_COORDINATES:
        pairs = torch.linspace(0, width // 2 - 1, SHOWN_COORDINATES // 2).round().long()
        interleaved = params.layout == "sin_cos_interleaved"
        shown = torch.cat((2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + width // 2)).sort().values
    else:
        shown = torch.linspace(0, width - 1, min(SHOWN_COORDINATES, width)).round().long()
    return {
        "position": np.repeat(np.arange(len(some)), len(shown)),
        "coordinate": np.tile(shown.numpy(), len(some)),
        "position_value": some[:, shown].flatten().numpy().round(3).astype(np.float32),
    }


def _shift(params: Params, table: torch.Tensor, error: torch.Tensor, size: torch.Tensor) -> Table:
    """What the map misses at each position, and what one would miss without any, over the root mean square norm."""
    import torch

    unmoved = (table[params.offset :] - table[: -params.offset]).square().sum(dim=1)
    names = np.repeat(["fitted", "not_fitted", "no_map"], [params.n_fit, len(error) - params.n_fit, len(unmoved)])
    return {
        "position": np.tile(np.arange(len(error)), 2),
        "map_error": (torch.cat((error, unmoved)) / size).sqrt().numpy().clip(DRAWN_ERROR),
        "error_is": names,
    }


def _products(
    params: Params,
    products: tuple[torch.Tensor, ...],
    size: torch.Tensor,
    logits: torch.Tensor,
    logits_size: torch.Tensor,
) -> Table:
    """Products of the bare code and the logits, by distance, each over the norms of its vectors, with their range."""
    import torch

    most = min(params.seq_len - 1, SHOWN_DISTANCES)
    distances = torch.arange(-most, most + 1)
    places = distances + params.seq_len - 1
    after = tuple(_by_distance(logits, reduce) for reduce in ("amin", "mean", "amax"))
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("similarity_low", "similarity", "similarity_high")}
    for values, over in ((products, size), (after, logits_size.clamp(min=torch.finfo(logits.dtype).tiny))):
        for column, value in zip(columns, values, strict=True):
            columns[column].append((value[places] / over).numpy().round(4).astype(np.float32))
    return {
        "stage": np.repeat(["bare_code", "logits"], len(distances)),
        "signed_distance": np.tile(distances.numpy(), 2),
        **{name: np.concatenate(parts) for name, parts in columns.items()},
    }


def _separations(params: Params, distances: dict[str, torch.Tensor], random_table: torch.Tensor) -> Table:
    """Smallest distance over the root mean square norm among the first positions, for growing lengths."""
    lengths = [n for n in (4, 8, 16, 32, 64, 128, 256, 512) if n < params.seq_len] + [params.seq_len]
    columns: dict[str, list[float]] = {"seq_len": [], "separation": []}
    codes = []
    for code, apart in distances.items():
        sizes = _code(params, code, random_table).square().sum(dim=1)
        for n in lengths:
            codes.append(code)
            columns["seq_len"].append(n)
            columns["separation"].append(max((apart[:n, :n].min() / sizes[:n].mean().sqrt()).item(), DRAWN_SEPARATION))
    return {"code": np.array(codes), **{name: np.array(values) for name, values in columns.items()}}
