r"""How far attention weights can be moved in a trained model, and how far the prediction moves with them.

One head at a time, in all rows of a text: its weights *permuted* among the keys of each row, or made *uniform*. And
some rows moved as far as possible without any change of the context, *in the null space*: as the context is
:math:`w^\top V`, every :math:`\delta` with :math:`V^\top\delta=0` and :math:`\sum_i\delta_i=0` is hidden from all
that follows. With n keys there are such :math:`\delta` whenever :math:`n > d_v + 1`, and earlier where values span
fewer dimensions: in the first layer equal characters have equal values. How far they reach is limited by
:math:`w+\delta\ge0`. The farthest row maximizes a convex function, which is hard in general: what is found is a lower
bound.

Which key matters is asked by the gradient of the prediction with respect to the weights.

That very different weights can give the same prediction was held against reading them as explanations (jain2019). The
answer: it depends on what is to count as one, and has to be measured against uniform weights among others
(wiegreffe2019). In texts longer than a head is wide, weights are not identifiable from its output (brunner2020).

Sources: jain2019, abstract; wiegreffe2019, abstract; brunner2020, abstract.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import softmax_gradient
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number, text
from engine.inputs import EXAMPLE, LONGEST, SOURCES, n_unknown, read_texts, too_short, unread
from engine.language_model import (
    D_K,
    D_MODEL,
    HEADS,
    N_HEADS,
    N_LAYERS,
    SEQ_LEN,
    Trace,
    Weights,
    forward,
    load_weights,
    shapes,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    source: str = choice(*SOURCES)
    text: str = text(EXAMPLE, most=LONGEST)
    heads: str = choice("all", "one_head")
    layer: int = number(0, low=0, high=N_LAYERS - 1)
    head: int = number(0, low=0, high=N_HEADS - 1)
    n_texts: int = number(1, low=1, high=8, log2=True)
    seq_len: int = number(96, low=2, high=SEQ_LEN)

    def rules(self) -> Iterator[Problem]:
        yield from too_short(self.source, self.text)

    def unread(self) -> frozenset[str]:
        return unread(self.source) | ({"layer", "head"} if self.heads == "all" else set())


METRICS = (
    Metric("weights_moved_tv"),
    Metric("output_moved_tv"),
    Metric("output_moved_js_nats", "nats"),
    Metric("output_moved_tv_max"),
    Metric("top_token_changed_share"),
    Metric("needed_heads_share"),
    Metric("uniform_output_moved_tv"),
    Metric("null_space_tv"),
    Metric("null_space_output_moved"),
    Metric("top_weight"),
    Metric("top_weight_null_space"),
    Metric("determined_share"),
    Metric("top_key_first_share"),
    Metric("n_unknown"),
)
PLOTS = (
    Plot("moved", table="moved", x="weights_moved_tv", y="output_moved_tv", by="change", mark="point"),
    Plot("by_head", table="moved", x="head", y="top_token_changed_share", by="change", mark="bar"),
    Plot("null_space", table="null_space", x="kv_len", y="null_space_tv", by="values"),
    Plot("dimensions", table="null_space", x="kv_len", y="dimensions", by="values", theory="theory_dimensions"),
)
BUDGET_S = 0.3

CHANGES = ("permuted", "uniform", "null_space")
MEASURES = ("weights_moved_tv", "output_moved_tv", "output_moved_js_nats", "top_token_changed_share")
KV_LENS = (8, 16, 24, 32, 36, 48, 64, 96)  # rows that are moved in the null space, and the last row
NEEDED = 0.1  # a head is needed when permuting it changes the most likely token at more than this share of the places
TOKENS_AT_ONCE = 1536  # of the copies of a text in one pass: some 70 ms
CENTRING, AWAY, CLIMBING = 6, 2, 10  # steps of the search for the farthest row
STEP = 0.9  # of the way to where the first weight becomes 0
ROUNDING = 1e-9  # a direction, or a singular value, below this part of the largest is rounding


def memory_bytes(params: Params) -> int:
    """Copies of a text in one pass, one text with its trace and gradients, the model in float64, and one search."""
    seq_len = len(params.text) if params.source == "text" else params.seq_len
    n_heads = len(_chosen(params))
    a_copy = seq_len * (8 * N_HEADS * seq_len + 24 * D_MODEL)
    one_text = N_LAYERS * seq_len * (12 * N_HEADS * seq_len + 40 * D_MODEL)
    changed = 8 * n_heads * seq_len * seq_len
    search = 2 * 8 * (n_heads + N_HEADS) * seq_len * (D_K + 1)
    model = sum(math.prod(shape) for shape in shapes().values())
    return 4 * (min(n_heads, _copies(seq_len)) * a_copy + 2 * one_text + changed) + 8 * (search + model)


def run(params: Params, run: Run) -> Result:
    """Change one head at a time and compare the predictions at the places whose next token can be known.

    The rows in the null space are sought in float64 on the CPU, whatever the run's dtype, and predictions compared at
    their own places.
    """
    import torch

    weights = load_weights(run.device, run.dtype)
    exact = {name: weight.cpu().double() for name, weight in weights.items()}
    texts = read_texts(run, params.source, params.text, params.n_texts, params.seq_len)
    n_texts, seq_len = texts.tokens.shape
    heads = _chosen(params)
    kv_lens = sorted({n for n in KV_LENS if n < seq_len} | {seq_len})
    chunks = [heads[start : start + _copies(seq_len)] for start in range(0, len(heads), _copies(seq_len))]
    n_steps = n_texts * (1 + len(kv_lens) + len(CHANGES) * len(chunks))
    done = 0

    def step() -> None:
        nonlocal done
        run.progress(done / n_steps)
        done += 1

    moved: dict[str, list[np.ndarray]] = {change: [] for change in CHANGES}  # (n_heads, MEASURES), a text at a time
    sought: list[tuple[str, int, float, int]] = []  # values, kv_len, total variation and dimensions of a row
    tops: list[np.ndarray] = []
    first: list[float] = []
    for tokens, period in zip(texts.tokens.split(1), texts.period.tolist(), strict=True):
        step()
        counted = _counted(seq_len, period, run.device)
        before, rows, gradients = _with_gradients(weights, tokens)
        rows, gradients = rows[heads], gradients[heads]
        first.append(_top_key_first(rows, gradients)[:, counted].mean().item())

        trace = Trace()
        forward(exact, tokens.cpu(), trace=trace)
        exact_rows, v = torch.cat(trace.weights, 1)[0, heads], torch.cat(trace.v, 1)[0, heads]
        in_null_space = rows.clone()
        for kv_len in kv_lens:
            step()
            own = exact_rows[:, kv_len - 1, :kv_len]
            last = own[-N_HEADS:]  # one layer's rows, over values that are in general position
            drawn = run.randn(len(last), kv_len, D_K).cpu().double()
            found, dimensions = _farthest(torch.cat((own, last)), torch.cat((v[:, :kv_len], drawn)))
            distances = _tv(found, torch.cat((own, last))).tolist()
            names = [HEADS[head][:2] for head in heads] + ["random_values"] * len(last)
            sought += zip(names, [kv_len] * len(names), distances, dimensions.tolist(), strict=True)
            in_null_space[:, kv_len - 1, :kv_len] = found[: len(heads)].to(run.dtype).to(run.device)
        top = own.argmax(-1, keepdim=True)
        tops.append(torch.cat((own.gather(1, top), found[: len(heads)].gather(1, top)), 1).numpy())

        at_kv_lens = torch.tensor(kv_lens, device=run.device) - 1
        for change, changed, places in (
            ("permuted", _permuted(rows, run), counted),
            ("uniform", _uniform(rows), counted),
            ("null_space", in_null_space, at_kv_lens),
        ):
            parts = []
            for some in chunks:
                step()
                mine = slice(heads.index(some[0]), heads.index(some[-1]) + 1)
                after = _predict(weights, tokens, some, changed[mine])
                parts.append(_compare(rows[mine], changed[mine], before, after, places))
            moved[change].append(torch.cat(parts).cpu().double().numpy())

    of = {change: np.mean(per_text, axis=0) for change, per_text in moved.items()}  # (n_heads, MEASURES)
    permuted = dict(zip(MEASURES, of["permuted"].T, strict=True))
    last_rows = [tv for values, kv_len, tv, _ in sought if kv_len == seq_len and values != "random_values"]
    top_weight, top_weight_moved = np.concatenate(tops).mean(axis=0)
    metrics = {
        "weights_moved_tv": permuted["weights_moved_tv"].mean(),
        "output_moved_tv": permuted["output_moved_tv"].mean(),
        "output_moved_js_nats": permuted["output_moved_js_nats"].mean(),
        "output_moved_tv_max": permuted["output_moved_tv"].max(),
        "top_token_changed_share": permuted["top_token_changed_share"].mean(),
        "needed_heads_share": (permuted["top_token_changed_share"] > NEEDED).mean(),
        "uniform_output_moved_tv": of["uniform"][:, MEASURES.index("output_moved_tv")].mean(),
        "null_space_tv": np.mean(last_rows),
        "null_space_output_moved": of["null_space"][:, MEASURES.index("output_moved_tv")].max(),
        "top_weight": top_weight,
        "top_weight_null_space": top_weight_moved,
        "determined_share": np.mean([dims == 0 for values, _, _, dims in sought if values != "random_values"]),
        "top_key_first_share": np.mean(first),
        "n_unknown": n_unknown(params.source, params.text),
    }
    tables = {"moved": _moved_table(heads, of), "null_space": _null_space_table(sought)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _chosen(params: Params) -> list[int]:
    """Numbers of the heads that are changed, layer by layer."""
    return list(range(len(HEADS))) if params.heads == "all" else [N_HEADS * params.layer + params.head]


def _copies(seq_len: int) -> int:
    """Copies of a text in one pass."""
    return max(1, TOKENS_AT_ONCE // seq_len)


def _counted(seq_len: int, period: int, device: torch.device) -> torch.Tensor:
    """Places that have a choice of keys and whose next token can be known; at least the last. Shapes: (n_places,)."""
    import torch

    return torch.arange(min(max(1, period), seq_len - 1), seq_len, device=device)


def _with_gradients(weights: Weights, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, weights, and the gradient of the top tokens' log-probabilities with respect to the weights.

    They are summed over places; a row moves its own and those behind it.

    Shapes: tokens (1, seq_len); returns (seq_len, n_tokens) and twice (all heads, seq_len, seq_len).
    """
    import torch

    kept: list[torch.Tensor] = []

    def keep(_: int, row: torch.Tensor) -> torch.Tensor:
        kept.append(row.requires_grad_())
        return row

    log_p = forward(weights, tokens, edit_weights=keep)[0].log_softmax(-1)
    gradients = torch.autograd.grad(log_p.amax(-1).sum(), kept)
    return log_p.detach(), torch.cat(kept, 1)[0].detach(), torch.cat(gradients, 1)[0]


def _top_key_first(rows: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    r"""1 where, to first order, no key's removal moves the prediction more than that of the largest weight's key.

    Removing key j raises the others by :math:`1/(1-w_j)`, which moves the prediction by
    :math:`-\frac{w_j}{1-w_j}(g_j-\sum_iw_ig_i)`. Shapes: (..., q_len, kv_len) each; returns (..., q_len).
    """
    import torch

    left = (1 - rows).clamp_min(torch.finfo(rows.dtype).eps)
    effects = (softmax_gradient(rows, gradients) / left).abs()
    return (effects.argmax(-1) == rows.argmax(-1)).to(rows.dtype)


def _permuted(rows: torch.Tensor, run: Run) -> torch.Tensor:
    """Each row's weights in a random order among the keys that it may see. Shapes: (n_heads, seq_len, seq_len)."""
    import torch

    seen = torch.ones(rows.shape[-2:], dtype=torch.bool, device=rows.device).tril()
    order = run.rand(*rows.shape).masked_fill(~seen, 2.0).argsort(dim=-1, stable=True)  # what is not seen stays behind
    return rows.gather(-1, order)


def _uniform(rows: torch.Tensor) -> torch.Tensor:
    """The same weight on every key that a row may see. Shapes: (n_heads, seq_len, seq_len)."""
    import torch

    even = torch.ones_like(rows[0]).tril()
    return (even / even.sum(-1, keepdim=True)).expand_as(rows)


def _predict(weights: Weights, tokens: torch.Tensor, heads: list[int], changed: torch.Tensor) -> torch.Tensor:
    """Log-probabilities with one head's weights replaced in each copy of the text.

    Shapes: tokens (1, seq_len), changed (n_heads, seq_len, seq_len); returns (n_heads, seq_len, n_tokens).
    """

    def edit(layer: int, rows: torch.Tensor) -> torch.Tensor:
        edited = rows.clone()
        for copy, head in enumerate(heads):
            if head // N_HEADS == layer:
                edited[copy, head % N_HEADS] = changed[copy]
        return edited

    return forward(weights, tokens.expand(len(heads), -1), edit_weights=edit).log_softmax(-1)


def _compare(
    rows: torch.Tensor, changed: torch.Tensor, before: torch.Tensor, after: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """The MEASURES of each head, as means over places. Shapes: returns (n_heads, MEASURES)."""
    import torch

    before, after = before[places], after[:, places]
    p, q = before.exp(), after.exp()
    log_mean = torch.logaddexp(before, after) - math.log(2)
    js = (p * (before - log_mean) + q * (after - log_mean)).sum(-1) / 2
    top_changed = (before.argmax(-1) != after.argmax(-1)).to(p.dtype)
    by_place = (_tv(rows[:, places], changed[:, places]), _tv(p, q), js.clamp_min(0), top_changed)
    return torch.stack([measure.mean(-1) for measure in by_place], -1)


def _tv(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Total variation of two distributions, half the sum of the differences. Shapes: (..., n) to (...,)."""
    return (p - q).abs().sum(-1) / 2


# --------------------------------------------------------------------------------------------------------------------
# Rows with the same context


def _farthest(rows: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows far from the given ones with the same context, and the dimensions of the null space they were moved in.

    Total variation is the largest sum of differences over any set of keys, so for a fixed set it is a linear program,
    and its best set is that of the keys that have grown. Affine scaling climbs: a step in the null space in
    coordinates divided by the row itself stays positive, and the set is taken anew after each. It starts near the
    middle of all rows with this context, once towards the even keys and once towards the odd ones, for with one
    dimension there are just two ends.

    Shapes: rows (n_rows, kv_len), v (n_rows, kv_len, d_v), float64; returns (n_rows, kv_len) and (n_rows,).
    """
    import torch

    n_rows, kv_len = rows.shape
    seen, size, _ = torch.linalg.svd(torch.cat((v, torch.ones_like(v[..., :1])), -1), full_matrices=False)
    spanned = size > ROUNDING * size[:, :1]
    seen, used = (torch.cat((part, part)) for part in (seen, spanned))
    start = torch.cat((rows, rows))
    sides = torch.where(torch.arange(kv_len) % 2 == 0, 1.0, -1.0).to(rows.dtype)
    sides = torch.cat((sides.expand(n_rows, -1), -sides.expand(n_rows, -1)))

    row = start
    for number_of in range(CENTRING + AWAY + CLIMBING):
        if number_of < CENTRING:
            wanted = torch.ones_like(row)  # to the largest product of the weights
        else:
            wanted = row * (sides if number_of < CENTRING + AWAY else row > start)
        # QR stays exact where weights differ by many powers of ten; the columns of what is not spanned come last
        basis = torch.linalg.qr(seen * row[..., None])[0] * used[:, None, :]
        direction = wanted
        for _ in range(2):  # the second time takes away the rounding of the first
            direction = direction - (basis @ (basis.mT @ direction[..., None]))[..., 0]
        largest = direction.abs().amax(-1, keepdim=True)
        direction = direction * (largest > ROUNDING * wanted.abs().amax(-1, keepdim=True))
        shrinks = -direction.amin(-1, keepdim=True)
        row = row * (1 + torch.where(shrinks > 0, STEP / shrinks, 0.0) * direction)

    both = row.unflatten(0, (2, n_rows))
    farther = _tv(both[1], rows) > _tv(both[0], rows)
    return torch.where(farther[:, None], both[1], both[0]), kv_len - spanned.sum(-1)


# --------------------------------------------------------------------------------------------------------------------
# Tables


def _moved_table(heads: list[int], of: dict[str, np.ndarray]) -> Table:
    """Each head under each change."""
    columns = dict(zip(MEASURES, np.concatenate([of[change] for change in CHANGES]).T, strict=True))
    return {
        "head": np.array([HEADS[head] for head in heads] * len(CHANGES)),
        "change": np.repeat(CHANGES, len(heads)),
        **{name: column.astype(np.float32) for name, column in columns.items()},
    }


def _null_space_table(sought: list[tuple[str, int, float, int]]) -> Table:
    """Means over the rows of one layer, or over the random values, for each number of keys."""
    groups = sorted({(values, kv_len) for values, kv_len, _, _ in sought})
    means = [
        np.mean([(tv, dims) for *group, tv, dims in sought if tuple(group) == wanted], axis=0) for wanted in groups
    ]
    kv_len = np.array([kv_len for _, kv_len in groups])
    return {
        "values": np.array([values for values, _ in groups]),
        "kv_len": kv_len,
        "null_space_tv": np.array([tv for tv, _ in means]),
        "dimensions": np.array([dims for _, dims in means]),
        "theory_dimensions": np.maximum(0, kv_len - D_K - 1),
    }
