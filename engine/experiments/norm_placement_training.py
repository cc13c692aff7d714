r"""Deep narrow models that learn to reverse a sequence, with the norm at different places, drawn while they train.

The model reads ``SEQ_LEN`` tokens, all of them visible at every position, and names at each position the token that
stands as far from the other end. Embeddings of token and position are added and normalized; behind the stack stand a
last norm and the unembedding. Matrices start from N(0, 1/fan_in), embeddings from N(0, 1). Five models of each seed
start from the same numbers and see the same batches:

``pre_norm``          x + f(norm(x))
``post_norm``         norm(x + f(x))
``post_norm_warmup``  the same, the learning rate raised in a straight line over the first ``warmup_steps``
``deep_norm``         norm(α x + f(x)), α = (2L)^¼; W_v, W_o, W_up and W_down start (8L)^-¼ times as large
``sandwich``          x + norm(f(norm(x)))

Adam with PyTorch's defaults, at a constant rate but for the warm-up. Training is not a race here: which rate and
how many steps a placement needs is what can be moved.

Sources: xiong2020, section 3.2 (the warm-up) and 4 (training without); torchscale-code (constants of ``deep_norm``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, number
from engine.residual_stream import Wiring, deep_norm_scales, draw_stack, walk_side_by_side
from engine.side_by_side import times
from engine.training import Adam, stream

if TYPE_CHECKING:
    import torch

TRAINS = True
VARIANTS = ("pre_norm", "post_norm", "post_norm_warmup", "deep_norm", "sandwich")
VOCABULARY, SEQ_LEN, D_MODEL, D_FF, N_HEADS = 8, 6, 32, 64, 2
BATCH, N_EVALUATION = 8, 32  # sequences, each with SEQ_LEN tokens to name
BLOCK_STEPS = 10  # batches drawn at once; a constant, so that a longer run begins with the same batches
N_RECORDS = 25  # points of a curve after the one at step 0


@dataclass(frozen=True)
class Params(BaseParams):
    learning_rate: float = number(0.003, low=0.00001, high=0.1)
    warmup_steps: int = number(200, low=1, high=4000)
    n_layers: int = number(8, low=1, high=24)
    steps: int = number(400, low=10, high=4000, step=10)
    n_seeds: int = number(1, low=1, high=6)


METRICS = (
    *(Metric(f"loss_mean_{variant}", "nats") for variant in VARIANTS),
    *(Metric(f"early_update_{variant}") for variant in VARIANTS),
    *(Metric(f"without_last_layer_{variant}", "nats") for variant in VARIANTS),
    *(Metric(f"without_first_layer_{variant}", "nats") for variant in VARIANTS),
)
PLOTS = (
    Plot("loss", "curves", "step", "loss_mean", by="variant", low="loss_low", high="loss_high", y_unit="nats"),
    Plot("model_update", "curves", "step", "model_update", by="variant"),
    Plot("gradient_norm", "curves", "step", "gradient_norm", by="variant", y_scale="log10"),
    Plot("layer_removed", "removed", "layer_from_1", "loss_without_layer", by="variant", y_unit="nats"),
)
BUDGET_S = 10.0


def memory_bytes(params: Params) -> int:
    """Weights with gradients and moments, and what backward keeps of a measurement, whose sequences are the most."""
    models = params.n_seeds * len(VARIANTS)
    weights = params.n_layers * (4 * D_MODEL + 2 * D_FF) * D_MODEL + (2 * VOCABULARY + SEQ_LEN) * D_MODEL
    tokens = N_EVALUATION * SEQ_LEN
    kept = (params.n_layers + 1) * tokens * (20 * D_MODEL + 4 * D_FF + 4 * N_HEADS * SEQ_LEN)
    return 4 * models * (6 * weights + kept) + 2**20


def run(params: Params, run: Run) -> Result:
    """Train all of them, and measure them 25 times on the way, on fixed sequences.

    ``model_update``: RMS by which the normalized outputs differ from those at step 0. ``early_update``: the same after
    a twenty-fifth of the steps. ``gradient_norm``: of all weights, on the evaluation sequences, geometric mean over the
    seeds. ``loss_without_layer``: the loss at the end, when one layer is left out. Means are over the seeds.
    """
    first_seed = run.generator.initial_seed()
    models = _Models(params, run, [first_seed + i for i in range(params.n_seeds)])
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    records: dict[int, _Record] = {}
    latest: Result | None = None
    for step in range(params.steps + 1):
        run.progress(0.95 * step / (params.steps + 1), latest)
        if step in due:
            records[step] = models.measure()
            run.progress(0.95 * (step + 0.5) / (params.steps + 1), latest)
            latest = _result(params, records, None, step / params.steps)
        if step < params.steps:
            models.train(step)
    without = []
    for layer in range(params.n_layers):
        run.progress(0.95 + 0.05 * layer / params.n_layers, latest)
        without.append(models.losses(without=layer))
    return _result(params, records, np.array(without), 1.0)


class _Record(NamedTuple):
    """The models at one step. Shapes: (seed, variant) each."""

    loss: np.ndarray
    update: np.ndarray
    gradient: np.ndarray


class _Models:
    """The models of all seeds and variants as one with a leading axis, the variants running fastest."""

    def __init__(self, params: Params, run: Run, seeds: list[int]) -> None:
        import torch

        self.params, self.device, self.n_seeds = params, run.device, len(seeds)
        self.dtype = torch.float64 if run.dtype == torch.float64 else torch.float32  # lower ones round updates away
        alpha, beta = deep_norm_scales(params.n_layers)
        wirings = {
            "pre_norm": Wiring("pre_norm"),
            "post_norm": Wiring("post_norm"),
            "post_norm_warmup": Wiring("post_norm"),
            "deep_norm": Wiring("post_norm", skip_scale=alpha),
            "sandwich": Wiring("sandwich"),
        }
        self.wirings = [wirings[variant] for variant in VARIANTS] * len(seeds)
        self.weights = self._drawn(seeds, beta)
        self.optimizer = Adam(list(self.weights.values()), params.learning_rate)
        self.batches = self._training_batches(seeds)
        self.evaluation = torch.stack(
            [torch.randint(VOCABULARY, (N_EVALUATION, SEQ_LEN), generator=stream(s, "evaluation")) for s in seeds]
        ).to(self.device)
        self.outputs_at_start: torch.Tensor | None = None

    def _drawn(self, seeds: list[int], beta: float) -> dict[str, torch.Tensor]:
        import torch

        drawn = []
        for seed in seeds:
            generator = stream(seed, "init")

            def randn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
                return torch.randn(*shape, generator=generator)

            of_seed = draw_stack(randn, self.params.n_layers, D_MODEL, D_FF)
            of_seed["E_token"] = randn(VOCABULARY, D_MODEL)
            of_seed["E_position"] = randn(SEQ_LEN, D_MODEL)
            of_seed["W_u"] = randn(D_MODEL, VOCABULARY) / math.sqrt(D_MODEL)
            drawn.append(of_seed)
        weights = {}
        for name in drawn[0]:
            small = beta if name in ("W_v", "W_o", "W_up", "W_down") else 1.0
            parts = [
                weight[name] * (small if variant == "deep_norm" else 1.0) for weight in drawn for variant in VARIANTS
            ]
            weights[name] = torch.stack(parts).to(self.device, self.dtype).requires_grad_()
        return weights

    def _training_batches(self, seeds: list[int]) -> Iterator[torch.Tensor]:
        """One batch for each seed, step after step. Shapes: (seed, batch, seq_len)."""
        import torch

        streams = [stream(seed, "train") for seed in seeds]
        while True:
            shape = (BLOCK_STEPS, BATCH, SEQ_LEN)
            block = torch.stack([torch.randint(VOCABULARY, shape, generator=g) for g in streams]).to(self.device)
            yield from block.unbind(1)

    def _outputs(self, tokens: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the unembedding reads. Shapes: tokens (seed, batch, seq_len); (model, batch, seq_len, d_model)."""
        from torch.nn.functional import layer_norm, one_hot

        shown = one_hot(tokens.repeat_interleave(len(VARIANTS), dim=0), VOCABULARY).to(self.dtype)
        x = times(shown, weights["E_token"]) + weights["E_position"][:, None]
        x = layer_norm(x, (D_MODEL,))
        stack = {name: weight for name, weight in weights.items() if weight.dim() == 4}
        for step in walk_side_by_side(stack, x, self.wirings, n_heads=N_HEADS):
            x = step.stream
        return layer_norm(x, (D_MODEL,))

    def _losses(self, tokens: torch.Tensor, outputs: torch.Tensor, W_u: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of each model. Shapes: (model,)."""
        from torch.nn.functional import cross_entropy

        target = tokens.flip(-1).repeat_interleave(len(VARIANTS), dim=0)
        loss = cross_entropy(times(outputs, W_u).flatten(0, 2), target.flatten(), reduction="none")
        return loss.view(target.shape[0], -1).mean(dim=1)

    def _gradients(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        import torch

        outputs = self._outputs(tokens, self.weights)
        loss = self._losses(tokens, outputs, self.weights["W_u"])
        found = torch.autograd.grad(loss.sum(), list(self.weights.values()))
        return outputs.detach(), loss.detach(), list(found)

    def train(self, step: int) -> None:
        """One step of Adam at each model's own rate."""
        import torch

        *_, gradients = self._gradients(next(self.batches))
        share = min(1.0, (step + 1) / self.params.warmup_steps)
        shares = [share if variant == "post_norm_warmup" else 1.0 for variant in VARIANTS] * self.n_seeds
        self.optimizer.learning_rate = self.params.learning_rate * torch.tensor(
            shares, device=self.device, dtype=self.dtype
        )
        for weight, gradient in zip(self.optimizer.weights, gradients, strict=True):
            weight.grad = gradient
        self.optimizer.step()

    def measure(self) -> _Record:
        import torch

        outputs, loss, gradients = self._gradients(self.evaluation)
        if self.outputs_at_start is None:
            self.outputs_at_start = outputs
        update = (outputs - self.outputs_at_start).square().mean(dim=(1, 2, 3)).sqrt()
        gradient = torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients]).sum(dim=0).sqrt()
        return _Record(*(self._by_seed(values) for values in (loss, update, gradient)))

    def losses(self, without: int) -> np.ndarray:
        """On the evaluation sequences, one layer left out. Shapes: (seed, variant)."""
        import torch

        kept = [layer for layer in range(self.params.n_layers) if layer != without]
        weights = {name: w[:, kept] if w.dim() == 4 else w for name, w in self.weights.items()}
        with torch.no_grad():
            outputs = self._outputs(self.evaluation, weights)
            return self._by_seed(self._losses(self.evaluation, outputs, weights["W_u"]))

    def _by_seed(self, values: torch.Tensor) -> np.ndarray:
        return np.array(values.cpu().double().view(self.n_seeds, len(VARIANTS)).numpy())


def _result(params: Params, records: dict[int, _Record], without: np.ndarray | None, done: float) -> Result:
    """Metrics and curves of what is recorded so far; of a removed layer nothing is known before the end: as the loss.

    Shapes: without (layer, seed, variant).
    """
    steps, found = list(records), list(records.values())
    last, early = found[-1], found[min(1, len(found) - 1)]
    if without is None:
        without = np.repeat(last.loss[None], params.n_layers, axis=0)
    metrics: dict[str, float] = {}
    for prefix, values in (
        ("loss_mean", last.loss.mean(axis=0)),
        ("early_update", early.update.mean(axis=0)),
        ("without_last_layer", without[-1].mean(axis=0)),
        ("without_first_layer", without[0].mean(axis=0)),
    ):
        metrics |= {f"{prefix}_{variant}": float(value) for variant, value in zip(VARIANTS, values, strict=True)}
    loss = np.array([record.loss for record in found])  # (step, seed, variant)
    curves: Table = {
        "step": np.repeat(steps, len(VARIANTS)),
        "variant": np.tile(VARIANTS, len(steps)),
        "loss_mean": loss.mean(axis=1).flatten(),
        "loss_low": loss.min(axis=1).flatten(),
        "loss_high": loss.max(axis=1).flatten(),
        "model_update": np.array([record.update.mean(axis=0) for record in found]).flatten(),
        "gradient_norm": np.exp([np.log(record.gradient.clip(1e-30)).mean(axis=0) for record in found]).flatten(),
    }
    removed: Table = {
        "layer_from_1": np.repeat(np.arange(1, params.n_layers + 1), len(VARIANTS)),
        "variant": np.tile(VARIANTS, params.n_layers),
        "loss_without_layer": without.mean(axis=1).flatten(),
    }
    return Result(metrics, {"curves": curves, "removed": removed}, done)
