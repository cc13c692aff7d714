r"""Stacks of layers at initialization that differ only in where LayerNorm stands: streams, gradients, and one step.

``pre_norm``     x + f(norm(x))
``post_norm``    norm(x + f(x))
``output_norm``  x + norm(f(x))
``sandwich``     x + norm(f(norm(x)))
``deep_norm``    norm(α x + f(x)), α = (2L)^¼; W_v, W_o, W_up and W_down are drawn (8L)^-¼ times as large

All start from the same numbers: weights N(0, 1/fan_in), W_q and W_k multiplied by ``qk_init_gain`` (with 0 attention is
uniform, as Xiong's theorem has it), inputs N(0, 1). The class logits are :math:`W_u` times the normalized last stream
(the last norm of ``post_norm`` and ``deep_norm`` is that of their last layer), the loss is the cross-entropy with
random targets, averaged over tokens.

Then the weights of all layers take one small step, and the streams are compared with those before: along the sign of
the gradient, which is Adam's first step; along the gradient; or in a random direction, each weight by the step times
N(0, 1/fan_in).

Source: xiong2020, sections 3.1 to 3.4 (post and pre, theorem 1); torchscale-code (the constants of ``deep_norm``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, flag, number
from engine.chunks import chunks
from engine.residual_stream import Wiring, deep_norm_scales, draw_stack, walk_side_by_side
from engine.side_by_side import bare_layer_norm, times

if TYPE_CHECKING:
    import torch

PLACEMENTS = ("pre_norm", "post_norm", "output_norm", "sandwich", "deep_norm")
BATCH, N_CLASSES, N_HEADS = 2, 16, 2


@dataclass(frozen=True)
class Params(BaseParams):
    norm_placement: str = choice(*PLACEMENTS)
    all_placements: bool = flag(True)
    n_layers: int = number(8, low=1, high=32, log2=True)
    d_model: int = number(16, low=8, high=64, log2=True)
    seq_len: int = number(8, low=2, high=32, log2=True)
    qk_init_gain: float = number(1.0, low=0, high=2, step=0.25)
    final_norm: bool = flag(True)
    step_direction: str = choice("gradient_sign", "along_gradient", "random_direction")
    weight_step: float = number(0.0001, low=0.000001, high=0.01)
    n_draws: int = number(1, low=1, high=16, log2=True)


METRICS = (
    Metric("stream_variance_last"),
    Metric("layer_gradient_last"),
    Metric("output_moved"),
    Metric("stream_variance_first"),
    Metric("layer_gradient_first"),
    Metric("branch_to_stream_first"),
    Metric("branch_to_stream_last"),
    Metric("class_logits_std"),
)
COLUMNS = ("stream_variance", "branch_to_stream", "layer_gradient", "output_moved")
PLOTS = (
    Plot("stream_variance", "by_layer", "layer_from_1", "stream_variance", by="norm_placement", y_scale="log2"),
    Plot("branch_to_stream", "by_layer", "layer_from_1", "branch_to_stream", by="norm_placement"),
    Plot("layer_gradient", "by_layer", "layer_from_1", "layer_gradient", by="norm_placement", y_scale="log10"),
    Plot("output_moved", "by_layer", "layer_from_1", "output_moved", by="norm_placement", y_scale="log10"),
)
BUDGET_S = 0.1

CHUNK_NUMBERS = 2**14


def memory_bytes(params: Params) -> int:
    """Of one chunk of draws: the weights with gradients and a moved copy, what backward keeps, the streams before."""
    models = len(_shown(params)) * _draws_at_once(params)
    weights = params.n_layers * 12 * params.d_model**2 + N_CLASSES * params.d_model
    tokens = BATCH * params.seq_len
    pairs = BATCH * N_HEADS * params.seq_len**2
    kept = params.n_layers * (50 * tokens * params.d_model + 6 * pairs)
    return 8 * models * (4 * weights + kept) + 2**16 * params.n_draws + 2**20


def run(params: Params, run: Run) -> Result:
    """All placements of each draw side by side, or the chosen one alone; the metrics are those of ``norm_placement``.

    ``stream_variance``: mean square of the stream after a layer. ``branch_to_stream``: RMS of what the feed-forward
    network gives, over that of the stream it is added to (times α in ``deep_norm``). ``layer_gradient``: norm of the
    loss's gradient for W_down of a layer. ``output_moved``: RMS by which the normalized stream after a layer moves with
    the step of all layers. Each is the geometric mean over the draws, since single ones differ by factors.
    """
    found: dict[str, list[torch.Tensor]] = {name: [] for name in (*COLUMNS, "class_logits_std")}
    size = _draws_at_once(params)
    for start, count in chunks(params.n_draws, size):
        fraction = start / params.n_draws
        run.progress(fraction)
        for name, values in _probe(params, run, count, (fraction, count / params.n_draws)).items():
            found[name].append(values)
    means = {name: _geometric_mean(parts) for name, parts in found.items()}  # (placement, layer) each
    chosen = _shown(params).index(params.norm_placement)
    mine = {name: values[chosen] for name, values in means.items()}
    metrics = {
        "stream_variance_last": mine["stream_variance"][-1],
        "layer_gradient_last": mine["layer_gradient"][-1],
        "output_moved": mine["output_moved"][-1],
        "stream_variance_first": mine["stream_variance"][0],
        "layer_gradient_first": mine["layer_gradient"][0],
        "branch_to_stream_first": mine["branch_to_stream"][0],
        "branch_to_stream_last": mine["branch_to_stream"][-1],
        "class_logits_std": mine["class_logits_std"][0],
    }
    by_layer: Table = {
        "layer_from_1": np.tile(np.arange(1, params.n_layers + 1), len(_shown(params))),
        "norm_placement": np.repeat(_shown(params), params.n_layers),
    }
    by_layer |= {name: means[name].flatten() for name in COLUMNS}
    return Result({name: float(value) for name, value in metrics.items()}, {"by_layer": by_layer})


def _shown(params: Params) -> tuple[str, ...]:
    """The placements that walk side by side. Alone, the chosen one costs a fifth and gives the same numbers."""
    return PLACEMENTS if params.all_placements else (params.norm_placement,)


def _draws_at_once(params: Params) -> int:
    numbers = len(_shown(params)) * BATCH * params.seq_len * params.d_model
    return max(1, min(params.n_draws, CHUNK_NUMBERS // numbers))


def _geometric_mean(parts: list[torch.Tensor]) -> np.ndarray:
    """Over the draws, with a floor for what is exactly 0. Shapes: (draws, placement, layer) each."""
    import torch

    return np.array(torch.cat(parts).cpu().double().clamp_min(1e-30).log().mean(dim=0).exp().numpy())


def _probe(params: Params, run: Run, count: int, span: tuple[float, float]) -> dict[str, torch.Tensor]:
    """What is measured of ``count`` draws. Shapes: (draw, placement, layer), the last 1 for the class logits."""
    import torch
    from torch.nn.functional import cross_entropy

    weights, W_u, x, target, random = _drawn(params, run, count)
    wirings = _wirings(params) * count
    for weight in weights.values():
        weight.requires_grad_()
    variances, shares, streams = [], [], []
    before = x
    for i, step in enumerate(walk_side_by_side(weights, x, wirings, n_heads=N_HEADS)):
        if i % 2:
            skipped = before.detach() * _per_model([wiring.skip_scale for wiring in wirings], x)
            variances.append(_mean_square(step.stream))
            shares.append((_mean_square(step.branch) / _mean_square(skipped)).sqrt())
            streams.append(bare_layer_norm(step.stream.detach()))
            run.progress(span[0] + span[1] * 0.3 * i / (2 * params.n_layers))
        before = step.stream
    class_logits = times(_read(params, before), W_u)
    losses = cross_entropy(class_logits.flatten(0, 2), target.flatten(), reduction="none")
    loss = losses.view(len(wirings), -1).mean(dim=1).sum()
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    run.progress(span[0] + span[1] * 0.7)

    with torch.no_grad():
        moved = {
            name: weight - params.weight_step * _direction(params, gradients[name], random.get(name))
            for name, weight in weights.items()
        }
        changes = []
        for i, step in enumerate(walk_side_by_side(moved, x, wirings, n_heads=N_HEADS)):
            if i % 2:
                changes.append(_mean_square(bare_layer_norm(step.stream) - streams[i // 2]).sqrt())
    found = {
        "stream_variance": torch.stack(variances, dim=1),
        "branch_to_stream": torch.stack(shares, dim=1),
        "layer_gradient": gradients["W_down"].flatten(2).norm(dim=2),
        "output_moved": torch.stack(changes, dim=1),
        "class_logits_std": _mean_square(class_logits).sqrt()[:, None],
    }
    return {name: values.detach().unflatten(0, (count, len(_shown(params)))) for name, values in found.items()}


def _drawn(params: Params, run: Run, count: int):  # type: ignore[no-untyped-def]
    """Weights, the unembedding, inputs, targets and a random direction: the same for all placements of a draw.

    Shapes: weights and direction (draw · placement, n_layers, in, out); W_u (draw · placement, d_model, N_CLASSES); x
    (draw · placement, batch, seq_len, d_model); target (draw · placement, batch, seq_len).
    """
    import torch

    dtype = torch.float64 if run.dtype == torch.float64 else torch.float32  # lower ones would round the step away

    def once_each(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).to(dtype).repeat_interleave(len(_shown(params)), dim=0)

    sizes = (params.n_layers, params.d_model, 4 * params.d_model)
    stacks, directions, others = [], [], []
    for _ in range(count):
        stacks.append(draw_stack(run.randn, *sizes))
        if params.step_direction == "random_direction":
            directions.append(draw_stack(run.randn, *sizes))
        W_u = run.randn(params.d_model, N_CLASSES) / math.sqrt(params.d_model)
        x = run.randn(BATCH, params.seq_len, params.d_model)
        target = (run.rand(BATCH, params.seq_len) * N_CLASSES).long().clamp_max(N_CLASSES - 1)
        others.append((W_u, x, target))
    scales = _initial_scales(params, stacks[0])
    weights = {
        name: once_each([s[name] for s in stacks]) * _per_model(scales[name] * count, stacks[0][name], dtype)
        for name in stacks[0]
    }
    random = {name: once_each([d[name] for d in directions]) for name in weights} if directions else {}
    W_u, x = (once_each([parts[i] for parts in others]) for i in (0, 1))
    target = torch.stack([parts[2] for parts in others]).repeat_interleave(len(_shown(params)), dim=0)
    return weights, W_u, x, target, random


def _initial_scales(params: Params, names: Iterable[str]) -> dict[str, list[float]]:
    """By what the weights of each placement are multiplied."""
    scales = {}
    for name in names:
        gain = params.qk_init_gain if name in ("W_q", "W_k") else 1.0
        small = deep_norm_scales(params.n_layers)[1] if name not in ("W_q", "W_k") else 1.0
        scales[name] = [gain * (small if placement == "deep_norm" else 1.0) for placement in _shown(params)]
    return scales


def _wirings(params: Params) -> list[Wiring]:
    alpha, _ = deep_norm_scales(params.n_layers)
    return [Wiring("post_norm", skip_scale=alpha) if p == "deep_norm" else Wiring(p) for p in _shown(params)]


def _direction(params: Params, gradient: torch.Tensor, random: torch.Tensor | None) -> torch.Tensor:
    if random is not None:
        return random
    return gradient.sign() if params.step_direction == "gradient_sign" else gradient


def _read(params: Params, stream: torch.Tensor) -> torch.Tensor:
    """What the unembedding reads: for ``post_norm`` and ``deep_norm`` a norm more would change nothing."""
    return bare_layer_norm(stream) if params.final_norm else stream


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    """Shapes: (model, batch, seq_len, anything) to (model,)."""
    return x.detach().square().mean(dim=(1, 2, 3))


def _per_model(values: list[float], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    import torch

    return torch.tensor(values, device=like.device, dtype=dtype or like.dtype).view(-1, 1, 1, 1)
