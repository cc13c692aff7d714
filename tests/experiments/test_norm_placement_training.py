"""norm_placement_training against one model at a time, with torch.optim's Adam."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from engine import training
from engine.base import make_run
from engine.registry import Experiment, get
from engine.residual_stream import Wiring, draw_stack, walk
from tests.harness import assert_law_catches, assert_stops_at_once, run

NAME = "norm_placement_training"
VARIANTS = ("pre_norm", "post_norm", "post_norm_warmup", "deep_norm", "sandwich")
SETTINGS = {"steps": 30, "n_seeds": 2, "n_layers": 3, "learning_rate": 0.004, "warmup_steps": 20}
SEED = 5


def reference(seed: int, variant: str) -> dict[str, list[float]]:
    """Losses, distances and gradients at every step, and the losses at the end with a layer left out."""
    n = SETTINGS["n_layers"]
    generator = training.stream(seed, "init")

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = draw_stack(randn, n, 32, 64)
    if variant == "deep_norm":
        weights |= {name: weights[name] * (8 * n) ** -0.25 for name in ("W_v", "W_o", "W_up", "W_down")}
    E, P, U = randn(8, 32), randn(6, 32), randn(32, 8) / math.sqrt(32)
    wirings = {"deep_norm": Wiring("post_norm", skip_scale=(2 * n) ** 0.25), "post_norm_warmup": Wiring("post_norm")}
    wiring = wirings.get(variant) or Wiring(variant)
    learned = [w.double().requires_grad_() for w in (*weights.values(), E, P, U)]
    adam = torch.optim.Adam(learned, lr=SETTINGS["learning_rate"])

    def outputs(tokens: torch.Tensor, layers: list[int]) -> torch.Tensor:
        stack = {name: w[None, layers] for name, w in zip(weights, learned, strict=False)}
        x = layer_norm(learned[-3][tokens] + learned[-2], (32,))[None]
        for step in walk(stack, x, wiring, n_heads=2):
            x = step.stream
        return layer_norm(x[0], (32,))

    def loss(tokens: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        return cross_entropy((read @ learned[-1]).flatten(0, 1), tokens.flip(-1).flatten())

    evaluation = torch.randint(8, (32, 6), generator=training.stream(seed, "evaluation"))
    batches = training.stream(seed, "train")
    found: dict[str, list[float]] = {"loss": [], "update": [], "gradient": []}
    start = None
    for step in range(SETTINGS["steps"] + 1):
        read = outputs(evaluation, list(range(n)))
        here = loss(evaluation, read)
        start = read.detach() if start is None else start
        gradients = torch.autograd.grad(here, learned)
        found["loss"].append(here.item())
        found["update"].append((read - start).square().mean().sqrt().item())
        found["gradient"].append(math.sqrt(sum(g.square().sum().item() for g in gradients)))
        if step % 10 == 0:
            block = torch.randint(8, (10, 8, 6), generator=batches)
        if variant == "post_norm_warmup":
            adam.param_groups[0]["lr"] = SETTINGS["learning_rate"] * min(1, (step + 1) / SETTINGS["warmup_steps"])
        if step < SETTINGS["steps"]:
            adam.zero_grad()
            loss(block[step % 10], outputs(block[step % 10], list(range(n)))).backward()
            adam.step()
    found["without"] = [loss(evaluation, outputs(evaluation, [i for i in range(n) if i != j])).item() for j in range(n)]
    return found


@pytest.fixture(scope="module")
def references() -> dict[str, list[dict[str, list[float]]]]:
    return {v: [reference(SEED + i, v) for i in range(SETTINGS["n_seeds"])] for v in VARIANTS}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(step + 1) / self.params.warmup_steps", "step / self.params.warmup_steps"),
        ('share if variant == "post_norm_warmup" else 1.0', "share"),
        ('Wiring("post_norm", skip_scale=alpha)', 'Wiring("post_norm")'),
        ('small if variant == "deep_norm" else 1.0', "1.0"),
        ("tokens.flip(-1)", "tokens.roll(1, -1)"),
        ("if layer != without", "if layer != without + 1"),
        ("outputs - self.outputs_at_start", "outputs"),
        (
            "by_seed(values) for values in (loss, update, gradient)",
            "by_seed(values) for values in (loss, update, loss)",
        ),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new, references):
    def law(experiment: Experiment) -> None:
        result = run(experiment, seed=SEED, dtype="float64", **SETTINGS)
        curves, removed = result.tables["curves"], result.tables["removed"]
        close = {"rtol": 1e-6, "atol": 1e-8}  # float64 on both sides, grouped otherwise, over 30 steps
        for variant in VARIANTS:
            rows = curves["variant"] == variant
            at = curves["step"][rows]
            loss, update, gradient = (
                np.array([found[name] for found in references[variant]])[:, at]
                for name in ("loss", "update", "gradient")
            )
            np.testing.assert_allclose(curves["loss_mean"][rows], loss.mean(axis=0), **close, err_msg=variant)
            np.testing.assert_allclose(curves["loss_low"][rows], loss.min(axis=0), **close)
            np.testing.assert_allclose(curves["loss_high"][rows], loss.max(axis=0), **close)
            np.testing.assert_allclose(curves["model_update"][rows], update.mean(axis=0), **close)
            np.testing.assert_allclose(curves["gradient_norm"][rows], np.exp(np.log(gradient).mean(axis=0)), **close)
            without = np.mean([found["without"] for found in references[variant]], axis=0)
            np.testing.assert_allclose(
                removed["loss_without_layer"][removed["variant"] == variant], without, rtol=1e-6, err_msg=variant
            )
            assert result.metrics[f"loss_mean_{variant}"] == pytest.approx(loss[:, -1].mean(), rel=1e-6)
            assert result.metrics[f"early_update_{variant}"] == pytest.approx(update[:, 1].mean(), rel=1e-6)
            assert result.metrics[f"without_first_layer_{variant}"] == pytest.approx(without[0], rel=1e-6)
            assert result.metrics[f"without_last_layer_{variant}"] == pytest.approx(without[-1], rel=1e-6)

    assert_law_catches(law, NAME, old, new)


def test_the_first_step_of_warmup_is_a_share_of_the_rate_and_no_other_variant_changes():
    few, many = (run(get(NAME), steps=20, n_layers=2, warmup_steps=n).metrics for n in (1, 4000))
    assert few["loss_mean_post_norm"] == few["loss_mean_post_norm_warmup"]  # warm-up over by the first step
    assert many["early_update_post_norm_warmup"] < 0.1 * many["early_update_post_norm"]
    for variant in set(VARIANTS) - {"post_norm_warmup"}:
        assert few[f"loss_mean_{variant}"] == many[f"loss_mean_{variant}"]


def test_a_stop_takes_effect_at_once_and_partial_results_are_drawn():
    seen, experiment = [], get(NAME)
    params = experiment.Params(steps=50, n_layers=2)
    experiment.run(params, make_run(0, on_progress=lambda fraction, partial: seen.append(partial)))
    assert {p.done for p in seen if p is not None} >= {0.0, 0.4}
    assert_stops_at_once(experiment, params)
