r"""One-layer transformers trained live under several scales of q·k, several seeds side by side.

Every model learns associative recall (``engine/training.py``); the scales of one seed share initialization and
batches, so the scale is all that differs. ``factor`` multiplies every scale; ``learnable_tau`` trains log τ per head
and starts where ``tau_start`` says.

It shows where :math:`d_k\,\mathrm{Var}(q)\,\mathrm{Var}(k) \gg 2\ln n` (wide heads, unit-variance initialization,
many slots, few steps), and it does not show with narrow heads, small initial weights, few slots or many steps: all of
these are parameters.

Source: vaswani2017, section 3.2.1 (the suspicion that is tried here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from engine.attention import entropy_nats, scale_value
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.training import BATCH, D_MODEL, DRAW_STEPS, Models, Sequences, Sizes, losses

TRAINS = True
RULES = ("none", "inv_sqrt_d_k", "inv_d_k", "learnable_tau")
N_EVALUATION = 256  # sequences: an accuracy has a standard error of at most 0.031
N_RECORDS = 25  # points of a curve after the one at step 0
SOLVED = 0.9
MAX_COLUMNS = 2**14  # columns of W_q in all models together: a step then stays below 0.2 s
EVALUATION_NUMBERS = 2**20  # numbers in one block of slots that are evaluated at once, 4 MB


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(256, low=1, high=512, log2=True)
    kv_len: int = number(16, low=2, high=64, log2=True)
    n_heads: int = number(1, low=1, high=8, log2=True)
    init: str = choice("unit", "linear_default", "normal_002", "folded")
    factor: float = number(1.0, low=0.0625, high=16, log2=True)
    with_inv_d_k: bool = flag(True)
    with_tau: bool = flag(True)
    tau_start: str = choice("sqrt_d_k", "one")
    optimizer: str = choice("adam", "sgd")
    learning_rate: float = number(0.003, low=0.0001, high=1.0)
    steps: int = number(250, low=10, high=4000, step=10)
    n_seeds: int = number(3, low=1, high=10)

    def unread(self) -> frozenset[str]:
        return frozenset(() if self.with_tau else {"tau_start"})

    def rules(self) -> Iterator[Problem]:
        if D_MODEL % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": D_MODEL})
        columns = len(self.trained()) * self.n_seeds * self.n_heads * self.d_k
        if columns > MAX_COLUMNS:
            most = MAX_COLUMNS // (columns // self.n_seeds)
            yield Problem(
                "rule",
                "n_seeds",
                self.n_seeds,
                rule="too_many_models",
                values={"columns": columns, "limit": MAX_COLUMNS, "n_seeds": most},
            )

    def trained(self) -> tuple[str, ...]:
        """The rules that are trained; a rule that is not has no metrics in the result."""
        left_out = {"inv_d_k": not self.with_inv_d_k, "learnable_tau": not self.with_tau}
        return tuple(rule for rule in RULES if not left_out.get(rule))


CURVES = ("loss", "accuracy", "entropy_nats", "logits_abs_max", "grad_W_q_norm", "grad_W_v_norm")
METRICS = (
    *(
        Metric(f"{name}_{rule}", unit)
        for rule in RULES
        for name, unit in (
            ("accuracy_min", "1"),
            ("accuracy_mean", "1"),
            ("accuracy_max", "1"),
            ("loss_min", "nats"),
            ("loss_mean", "nats"),
            ("loss_max", "nats"),
            ("entropy_nats_start_mean", "nats"),
            ("entropy_nats_mean", "nats"),
            ("logits_abs_max_start", "1"),
            ("logits_abs_max", "1"),
            ("grad_W_q_norm_start_mean", "1"),
            ("grad_W_v_norm_start_mean", "1"),
            ("solved_step_mean", "1"),
        )
    ),
    Metric("learned_factor_mean"),
)


def _plot(curve: str, y_unit: str, y_scale: Literal["linear", "log10"]) -> Plot:
    low, mean, high = (f"{curve}_{suffix}" for suffix in ("low", "mean", "high"))
    return Plot(curve, "curves", "step", mean, by="scale", low=low, high=high, y_unit=y_unit, y_scale=y_scale)


PLOTS = (
    _plot("loss", "nats", "linear"),
    _plot("accuracy", "1", "linear"),
    _plot("entropy_nats", "nats", "linear"),
    _plot("logits_abs_max", "1", "log10"),
    _plot("grad_W_q_norm", "1", "log10"),
    _plot("grad_W_v_norm", "1", "log10"),
)
BUDGET_S = 10.0


def memory_bytes(params: Params) -> int:
    """Weights with gradients and Adam's two moments, a step's activations, a block of batches, the evaluation set."""
    models = len(params.trained()) * params.n_seeds
    weights = 4 * 8 * models * Sizes(params.d_k, params.kv_len, params.n_heads).n_weights
    slots = models * BATCH * params.kv_len * D_MODEL
    heads = models * BATCH * params.n_heads * (params.d_k + 2 * D_MODEL + 3 * params.kv_len)
    activations = 8 * (8 * slots + 4 * heads + 4 * max(EVALUATION_NUMBERS, slots))
    drawn = (12 + 12 + 8) * 2 * params.kv_len * (DRAW_STEPS * BATCH * params.n_seeds + N_EVALUATION * models)
    return weights + activations + drawn


def run(params: Params, run: Run) -> Result:
    """Train all models together, a record of every curve 25 times on the way.

    A record is taken before the step it names: loss (in nats), accuracy, entropy and largest |logit| on the fixed
    sequences of the seed, gradient norms on the batch of that step. ``low`` and ``high`` are the lowest and highest
    seed.

    ``solved_step_mean_*``: mean over the seeds of the first recorded step with accuracy of at least 0.9; a seed that
    never got there counts as the last step, so the mean is then a lower bound. ``learned_factor_mean``: the learned
    scale times √d_k, so that 1 is 1/√d_k.
    """
    rules = params.trained()
    first_seed = run.generator.initial_seed()
    models = Models(
        Sizes(params.d_k, params.kv_len, params.n_heads),
        scales=[_scale(params, rule) for rule in rules],
        learned=[rule == "learnable_tau" for rule in rules],
        seeds=[first_seed + i for i in range(params.n_seeds)],
        init=params.init,
        optimizer=params.optimizer,
        learning_rate=params.learning_rate,
        device=run.device,
        dtype=run.dtype,
    )
    evaluation = models.evaluation_set(N_EVALUATION)
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    records: dict[int, dict[str, np.ndarray]] = {}
    latest: Result | None = None
    for step in range(params.steps + 1):
        done = step / (params.steps + 1)
        run.progress(done, latest)
        models.gradient()
        if step in due:
            records[step] = _measure(models, evaluation, partial(run.progress, done, latest))
            latest = _result(params, records, models, step / params.steps)
        if step < params.steps:
            models.update()
    assert latest is not None
    return latest


def _scale(params: Params, rule: str) -> float:
    """What multiplies q·k at step 0."""
    tau = params.d_k**0.5 if params.tau_start == "sqrt_d_k" else 1.0
    return params.factor * scale_value(rule, params.d_k, tau=tau)


def _measure(models: Models, evaluation: Sequences, progress: Callable[[], None]) -> dict[str, np.ndarray]:
    """One point of every curve, for every model; the evaluation set goes through in blocks. Shapes: (model,) each."""
    import torch

    n_models, n_sequences, kv_len = evaluation.cues.shape
    rows = min(n_sequences, max(1, EVALUATION_NUMBERS // (n_models * kv_len * D_MODEL)))
    zeros = torch.zeros_like(models.weights["log_scale"][:, 0])
    sums = {name: zeros.clone() for name in ("loss", "accuracy", "entropy_nats", "logits_abs_max")}
    for start in range(0, n_sequences, rows):
        block = Sequences(*(part[:, start : start + rows] for part in evaluation))
        result = models.evaluate(block)
        count = block.target.shape[1]
        sums["loss"] += losses(result, block.target) * count
        sums["accuracy"] += (result.class_logits.argmax(dim=-1) == block.target).sum(dim=-1)
        sums["entropy_nats"] += entropy_nats(result.weights.to(zeros.dtype)).mean(dim=-1).sum(dim=-1)
        sums["logits_abs_max"] = torch.maximum(
            sums["logits_abs_max"], result.logits.abs().amax(dim=(1, 2, 3)).to(zeros.dtype)
        )
        progress()
    measured = {name: total if name == "logits_abs_max" else total / n_sequences for name, total in sums.items()}
    measured |= {f"grad_{name}_norm": models.gradient_norm(name) for name in ("W_q", "W_v")}
    return {name: values.cpu().double().numpy() for name, values in measured.items()}


def _result(params: Params, records: dict[int, dict[str, np.ndarray]], models: Models, done: float) -> Result:
    """Metrics and curves of what is recorded so far."""
    rules = params.trained()
    steps = np.array(list(records))
    # (record, rule, seed) for each measure
    curves = {
        n: np.stack([r[n] for r in records.values()]).reshape(len(records), len(rules), params.n_seeds) for n in CURVES
    }

    metrics: dict[str, float] = {}
    for i, rule in enumerate(rules):
        start, end = ({name: curve[at, i] for name, curve in curves.items()} for at in (0, -1))
        solved = curves["accuracy"][:, i] >= SOLVED  # (record, seed)
        solved_step = np.where(solved.any(axis=0), steps[solved.argmax(axis=0)], steps[-1])
        of_rule = {
            "accuracy_min": end["accuracy"].min(),
            "accuracy_mean": end["accuracy"].mean(),
            "accuracy_max": end["accuracy"].max(),
            "loss_min": end["loss"].min(),
            "loss_mean": end["loss"].mean(),
            "loss_max": end["loss"].max(),
            "entropy_nats_start_mean": start["entropy_nats"].mean(),
            "entropy_nats_mean": end["entropy_nats"].mean(),
            "logits_abs_max_start": start["logits_abs_max"].max(),
            "logits_abs_max": end["logits_abs_max"].max(),
            "grad_W_q_norm_start_mean": start["grad_W_q_norm"].mean(),
            "grad_W_v_norm_start_mean": start["grad_W_v_norm"].mean(),
            "solved_step_mean": solved_step.mean(),
        }
        metrics |= {f"{name}_{rule}": float(value) for name, value in of_rule.items()}
    if params.with_tau:
        learned = models.scale().detach()[rules.index("learnable_tau") * params.n_seeds :][: params.n_seeds]
        metrics["learned_factor_mean"] = learned.cpu().double().mean().item() * params.d_k**0.5

    table: Table = {
        "step": np.repeat(steps, len(rules)),
        "scale": np.tile(np.array(rules), len(steps)),
    }
    for name, curve in curves.items():
        for suffix, values in (("mean", curve.mean(axis=2)), ("low", curve.min(axis=2)), ("high", curve.max(axis=2))):
            table[f"{name}_{suffix}"] = values.ravel().astype(np.float32)
    return Result(metrics, {"curves": table}, done)
