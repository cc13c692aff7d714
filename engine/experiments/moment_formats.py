r"""Adam's two moments kept in few bits: which of them can be, and what its step makes of the loss.

.. math::
    m \leftarrow \beta_1 m + (1-\beta_1) g,\quad v \leftarrow \beta_2 v + (1-\beta_2) g^2,\quad
    \text{step} = \frac{\hat m}{\sqrt{\hat v} + \epsilon}

A step of v changes it by at most :math:`1-\beta_2` of itself downward. With :math:`\beta_2 = 0.999` that is 0.1 %, less
than half of what bfloat16 can tell apart: v never falls, and rises only where :math:`g^2` is several times v. In
float16 the squares of small gradients are below its smallest number, v is 0, and :math:`\epsilon` divides.

Gradients are independent normal numbers, of one standard deviation up to the middle of the run and of another behind
it. They, and all arithmetic, are float32; what is rounded is what is kept from one step to the next. The steps are
compared with those of moments in float32, for the same gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number

if TYPE_CHECKING:
    import torch

FORMATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Params(BaseParams):
    moment_dtype: str = choice(*FORMATS)
    moments_kept_low: str = choice("second_moment", "first_moment", "both_moments")
    beta_2: float = number(0.999, low=0.5, high=0.9999)
    gradient_std: float = number(0.001, low=1e-9, high=10)
    later_gradient_std: float = number(0.001, low=1e-9, high=10)
    epsilon_log10: int = number(-8, low=-15, high=-3)
    n_adam_steps: int = number(256, low=16, high=4096, log2=True)
    n_kept_numbers: int = number(64, low=1, high=512, log2=True)


METRICS = (
    Metric("second_moment_ratio"),
    Metric("adam_step_ratio"),
    Metric("zero_moment_share"),
    Metric("second_moment_fell_share"),
    Metric("adam_step_rms"),
    Metric("exact_adam_step_rms"),
)
PLOTS = (
    Plot("second_moment", table="by_step", x="step", y="second_moment", by="moment_dtype"),
    Plot("updates", table="by_step", x="step", y="adam_step_size", by="moment_dtype", y_scale="log10"),
)
BUDGET_S = 0.02

BETA_1 = 0.9
N_RECORDS = 32
SMALLEST = 1e-9  # a step below this is drawn here


def memory_bytes(params: Params) -> int:
    """The gradients, the moments of one format, and the temporaries of measuring them."""
    return 64 * params.n_adam_steps * (params.n_kept_numbers + 8) + 2**19


def run(params: Params, run: Run) -> Result:
    """The same gradients for moments in each format; the metrics are those of the chosen one, over the last quarter.

    ``second_moment_ratio``: mean of v over the mean of v in float32. ``adam_step_ratio``: root mean square of the step
    over that of float32. ``second_moment_fell_share``: share of the updates that made v smaller.

    Shapes: gradients (n_adam_steps, n_kept_numbers).
    """
    import torch

    gradients = run.randn(params.n_adam_steps, params.n_kept_numbers).float()
    half = params.n_adam_steps // 2
    gradients = torch.cat((params.gradient_std * gradients[:half], params.later_gradient_std * gradients[half:]))
    found = {}
    for n, name in enumerate(FORMATS):
        moments = _moments(params, gradients, getattr(torch, name), run, n / len(FORMATS))
        found[name] = _measure(params, *moments)
    mine, exact = found[params.moment_dtype], found["float32"]
    last = slice(-(params.n_adam_steps // 4), None)
    metrics = {
        "second_moment_ratio": mine["second"][last].mean() / exact["second"][last].mean(),
        "adam_step_ratio": _rms(mine["update"][last]) / _rms(exact["update"][last]),
        "zero_moment_share": mine["zeros"][last].mean(),
        "second_moment_fell_share": mine["fell"][last].mean(),
        "adam_step_rms": _rms(mine["update"][last]),
        "exact_adam_step_rms": _rms(exact["update"][last]),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"by_step": _table(params, found)})


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _moments(
    params: Params, gradients: torch.Tensor, dtype: torch.dtype, run: Run, begun: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v as they are kept after each update. Shapes: (n_adam_steps, n_kept_numbers) each."""
    import torch

    first_dtype, second_dtype = (
        dtype if params.moments_kept_low in (which, "both_moments") else torch.float32
        for which in ("first_moment", "second_moment")
    )
    added, added_square = (1 - BETA_1) * gradients, (1 - params.beta_2) * gradients.square()
    first = second = torch.zeros_like(gradients[0])
    firsts, seconds = [], []
    for n in range(len(gradients)):
        if n % 256 == 0:
            run.progress(begun + n / len(gradients) / len(FORMATS))
        first = (BETA_1 * first + added[n]).to(first_dtype).float()
        second = (params.beta_2 * second + added_square[n]).to(second_dtype).float()
        firsts.append(first)
        seconds.append(second)
    return torch.stack(firsts), torch.stack(seconds)


def _measure(params: Params, first: torch.Tensor, second: torch.Tensor) -> dict[str, np.ndarray]:
    """Means over the numbers after each update; of the step, its root mean square. Shapes: (n_adam_steps,) each."""
    import torch

    updates = torch.arange(1, len(first) + 1, device=first.device)[:, None]
    second_hat = second / (1 - params.beta_2**updates)
    step = first / (1 - BETA_1**updates) / (second_hat.sqrt() + 10.0**params.epsilon_log10)
    fell = torch.cat((torch.zeros_like(second[:1]), (second[1:] < second[:-1]).float()))
    columns = {
        "second": second.mean(dim=1),
        "update": step.square().mean(dim=1).sqrt(),
        "zeros": (second == 0).float().mean(dim=1),
        "fell": fell.mean(dim=1),
    }
    return {name: column.cpu().double().numpy() for name, column in columns.items()}


def _table(params: Params, found: dict[str, dict[str, np.ndarray]]) -> Table:
    """Mean of v, and the root mean square of the step, along the updates in each format."""
    at = np.unique(np.linspace(0, params.n_adam_steps - 1, N_RECORDS).round().astype(int))
    return {
        "step": np.tile(at + 1, len(FORMATS)),
        "moment_dtype": np.repeat(FORMATS, len(at)),
        "second_moment": np.concatenate([of["second"][at] for of in found.values()]),
        "adam_step_size": np.concatenate([np.maximum(of["update"][at], SMALLEST) for of in found.values()]),
    }
