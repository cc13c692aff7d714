"""scale_training against models trained one at a time by PyTorch's own optimizers, in float64."""

import functools
import itertools
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import engine.training
from engine.base import ParamsError, make_run
from engine.registry import Experiment, get
from tests import recall_reference
from tests.harness import assert_law_catches, assert_stops_at_once, mutant, run

NAME = "scale_training"
MEASURES = ("loss", "accuracy", "entropy_nats", "logits_abs_max", "grad_W_q_norm", "grad_W_v_norm")
SETTINGS = [
    {"d_k": 16, "kv_len": 4, "steps": 25, "n_seeds": 2},
    {
        "d_k": 8,
        "kv_len": 5,
        "steps": 25,
        "n_seeds": 2,
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "tau_start": "one",
        "n_heads": 2,
        "factor": 0.5,
    },
    # 64 slots: the evaluation set goes through in uneven blocks
    {"d_k": 4, "kv_len": 64, "steps": 10, "n_seeds": 1, "init": "linear_default", "with_inv_d_k": False},
    {"d_k": 4, "kv_len": 3, "steps": 10, "n_seeds": 1, "init": "normal_002", "with_tau": False},
    {"d_k": 4, "kv_len": 3, "steps": 10, "n_seeds": 1, "init": "folded", "n_heads": 4},
]
# float64 on both sides, summed in another order (1e-16), and up to 25 steps of Adam, which divides by gradients
# that may be small: measured below 1e-11
ROUNDING = 1e-8


@functools.cache
def reference_curves(seed: int, items: tuple) -> dict[tuple[str, str], np.ndarray]:
    """Curves of every rule and seed at every step, for parameters as pairs. Shapes: (step, seed)."""
    p = dict(items)
    d_k, factor = p["d_k"], p.get("factor", 1.0)
    start_tau = 1 if p.get("tau_start") == "one" else d_k**0.5
    scales = {"none": 1, "inv_sqrt_d_k": d_k**-0.5, "inv_d_k": 1 / d_k, "learnable_tau": 1 / start_tau}
    curves = {}
    for rule, scale in scales.items():
        if (rule == "inv_d_k" and not p.get("with_inv_d_k", True)) or (
            rule == "learnable_tau" and not p.get("with_tau", True)
        ):
            continue
        runs = [
            recall_reference.train(
                seed + i,
                scale=factor * scale,
                learned=rule == "learnable_tau",
                steps=p["steps"],
                d_k=d_k,
                kv_len=p["kv_len"],
                n_heads=p.get("n_heads", 1),
                init=p.get("init", "unit"),
                optimizer=p.get("optimizer", "adam"),
                lr=p.get("learning_rate", 0.003),
            )[0]
            for i in range(p["n_seeds"])
        ]
        curves |= {(rule, name): np.stack([r[name] for r in runs], axis=1) for name in MEASURES}
    return curves


def law(experiment: Experiment, settings=SETTINGS) -> None:
    for p in settings:
        result = run(experiment, seed=7, dtype="float64", **p)
        table = result.tables["curves"]
        expected = reference_curves(7, tuple(p.items()))
        assert list(dict.fromkeys(table["scale"])) == list(dict.fromkeys(rule for rule, _ in expected)), p
        for (rule, name), curve in expected.items():
            rows = table["scale"] == rule
            at = table["step"][rows]
            for suffix, of_seeds in (("mean", np.mean), ("low", np.min), ("high", np.max)):
                # columns are float32: 6e-8 of the value
                np.testing.assert_allclose(
                    table[f"{name}_{suffix}"][rows],
                    of_seeds(curve[at], axis=1),
                    rtol=2e-7,
                    atol=1e-7,
                    err_msg=f"{p} {rule} {name}",
                )
        for rule in dict.fromkeys(rule for rule, _ in expected):
            end = {name: expected[rule, name][-1] for name in MEASURES}
            start = {name: expected[rule, name][0] for name in MEASURES}
            m = result.metrics
            close = {
                f"accuracy_min_{rule}": end["accuracy"].min(),
                f"accuracy_mean_{rule}": end["accuracy"].mean(),
                f"accuracy_max_{rule}": end["accuracy"].max(),
                f"loss_min_{rule}": end["loss"].min(),
                f"loss_mean_{rule}": end["loss"].mean(),
                f"loss_max_{rule}": end["loss"].max(),
                f"entropy_nats_start_mean_{rule}": start["entropy_nats"].mean(),
                f"entropy_nats_mean_{rule}": end["entropy_nats"].mean(),
                f"logits_abs_max_start_{rule}": start["logits_abs_max"].max(),
                f"logits_abs_max_{rule}": end["logits_abs_max"].max(),
                f"grad_W_q_norm_start_mean_{rule}": start["grad_W_q_norm"].mean(),
                f"grad_W_v_norm_start_mean_{rule}": start["grad_W_v_norm"].mean(),
            }
            assert {k: m[k] for k in close} == pytest.approx(close, rel=ROUNDING, abs=ROUNDING), (p, rule)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first_seed + i for i", "first_seed for i"),  # every seed the same model
        ('learned=[rule == "learnable_tau"', "learned=[False"),  # τ stays where it started
        ("return params.factor * scale_value", "return scale_value"),  # factor dropped
        ("models.gradient()\n", "models.gradient(); models.update()\n"),  # two updates a step
        ("result.logits.abs().amax", "result.logits.amax"),  # the largest logit, not the largest |logit|
        ("total / n_sequences", "total / rows"),  # mean over another count
        ("curve[at, i]", "curve[at, 0]"),  # metrics of another rule
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def with_broken_training(monkeypatch, old: str, new: str) -> Experiment:
    """The experiment on top of engine/training.py with one piece of its source replaced."""
    source = Path(engine.training.__file__).read_text("utf-8")
    assert source.count(old) == 1, old
    module = types.ModuleType("engine.training")
    monkeypatch.setitem(sys.modules, "engine.training", module)
    exec(compile(source.replace(old, new), "engine/training.py", "exec"), module.__dict__)
    return mutant(NAME, "TRAINS = True", "TRAINS = True ")  # loads the experiment anew, on the broken module


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" * scale[:, None, :, None]", " + 0 * scale[:, None, :, None]"),  # scale dropped
        ("logits.softmax(dim=-1)", "logits.softmax(dim=1)"),  # softmax over the batch
        ("x_q = layer_norm(residual, width)", "x_q = residual"),  # no norm on the query's side
        (
            'torch.where(self._learned, self.weights["log_scale"].exp()',
            'torch.where(~self._learned, self.weights["log_scale"].exp()',
        ),
        ("second.mul_(0.999)", "second.mul_(0.99)"),  # another Adam
        ("velocity.mul_(0.9)", "velocity.mul_(0.99)"),  # another momentum
        ("loss.sum().backward()", "loss.mean().backward()"),  # gradients that depend on how many models there are
        (
            'streams = [stream(seed, "train")',
            'streams = [stream(seed, "evaluation")',
        ),  # trained on the evaluation set's stream
        (".transpose(1, 2).flatten(2)", ".transpose(1, 2).flip(2).flatten(2)"),  # heads in another order than W_o's
    ],
)
def test_law_catches_a_broken_model_or_loop(monkeypatch, old, new):
    with pytest.raises(AssertionError):
        law(with_broken_training(monkeypatch, old, new), SETTINGS[:2])


def test_float32_follows_the_float64_reference():
    p = {"d_k": 256, "kv_len": 16, "steps": 25, "n_seeds": 1, "with_tau": False}
    table = run(get(NAME), seed=7, **p).tables["curves"]
    # rounding (6e-8) stays small where training is smooth; unscaled it grows with every step (7e-5 after these 25)
    for rule, tolerance in (("inv_sqrt_d_k", 5e-6), ("inv_d_k", 5e-6), ("none", 5e-3)):
        rows = table["scale"] == rule
        expected = reference_curves(7, tuple(p.items()))[rule, "loss"][table["step"][rows], 0]
        np.testing.assert_allclose(table["loss_mean"][rows], expected, rtol=0, atol=tolerance)


SMALL = {"d_k": 16, "kv_len": 4, "steps": 50}


def curve(seed: int, rule: str, **params) -> np.ndarray:
    table = run(get(NAME), seed=seed, **SMALL | params).tables["curves"]
    return table["loss_mean"][table["scale"] == rule]


def test_a_seed_has_its_own_curve_whatever_trains_beside_it():
    together = run(get(NAME), seed=5, dtype="float64", n_seeds=3, **SMALL).tables["curves"]
    for rule in ("none", "inv_sqrt_d_k"):
        alone = [curve(5 + i, rule, dtype="float64", n_seeds=1, with_tau=False, with_inv_d_k=False) for i in range(3)]
        rows = together["scale"] == rule
        np.testing.assert_allclose(together["loss_mean"][rows], np.mean(alone, axis=0), rtol=3e-7)  # float32 columns
        for one, other in itertools.combinations(alone, 2):
            assert np.abs(one - other).max() > 0.01


def test_the_same_seed_gives_the_same_curve_again_and_a_longer_run_begins_with_it():
    np.testing.assert_array_equal(curve(3, "none", n_seeds=2), curve(3, "none", n_seeds=2))
    # 25 records each: those of 100 steps fall on every fourth, those of 50 on every second
    np.testing.assert_allclose(curve(3, "none", n_seeds=1)[::2], curve(3, "none", n_seeds=1, steps=100)[:13], rtol=1e-6)


def test_it_shows_in_the_setting_where_it_shows():
    m = run(get(NAME), seed=20).metrics  # three seeds
    assert m["accuracy_min_inv_sqrt_d_k"] > 0.95
    assert m["accuracy_max_none"] < 0.5
    assert m["accuracy_min_inv_d_k"] > 0.9
    assert m["accuracy_min_learnable_tau"] > 0.95
    # not because the gradient is small: it is the larger one
    assert m["grad_W_q_norm_start_mean_none"] > m["grad_W_q_norm_start_mean_inv_sqrt_d_k"]


@pytest.mark.parametrize(
    "params",
    [
        {"init": "linear_default", "d_k": 64, "steps": 400},
        {"kv_len": 4, "steps": 300},
        {"d_k": 8, "n_heads": 4, "steps": 400},
    ],
)
def test_it_does_not_show_where_it_should_not(params):
    m = run(get(NAME), seed=30, with_tau=False, **params).metrics
    assert m["accuracy_min_none"] > 0.95
    assert m["accuracy_min_inv_sqrt_d_k"] > 0.95


def test_progress_draws_partial_results_and_a_stop_takes_effect_at_once():
    seen = []

    def look(fraction, partial):
        seen.append((fraction, partial))

    experiment = get(NAME)
    final = experiment.run(experiment.Params(**SMALL), make_run(0, on_progress=look))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] < 1
    partials = [partial for _, partial in seen if partial is not None]
    assert {p.done for p in partials} >= {0.0, 0.4}
    assert final.done == 1.0
    for partial in partials:
        rows = len(partial.tables["curves"]["step"])
        assert set(partial.metrics) == set(final.metrics)
        for name, column in partial.tables["curves"].items():
            np.testing.assert_array_equal(column, final.tables["curves"][name][:rows])

    assert_stops_at_once(experiment, experiment.Params(**SMALL))


def test_metrics_of_all_rules_and_only_of_those_trained():
    experiment = get(NAME)
    few = {"d_k": 4, "kv_len": 2, "steps": 10, "n_seeds": 1}
    assert set(run(experiment, **few).metrics) == set(experiment.metric_names)
    left = set(run(experiment, with_tau=False, with_inv_d_k=False, **few).metrics)
    assert left == {n for n in experiment.metric_names if n.endswith(("_none", "_inv_sqrt_d_k"))}


def test_solved_step_is_the_first_record_at_90_percent_or_the_number_of_steps():
    result = run(get(NAME), seed=1, n_seeds=1, kv_len=4, d_k=64, steps=100, with_tau=False, with_inv_d_k=False)
    table = result.tables["curves"]
    for rule in ("none", "inv_sqrt_d_k"):
        rows = table["scale"] == rule
        first = next(
            (s for s, a in zip(table["step"][rows], table["accuracy_mean"][rows], strict=True) if a >= 0.9), 100
        )
        assert result.metrics[f"solved_step_mean_{rule}"] == first
    assert result.metrics["solved_step_mean_inv_sqrt_d_k"] < 100


def test_learned_factor_starts_at_one_and_moves():
    few = {"d_k": 16, "kv_len": 4, "n_seeds": 2}
    assert run(get(NAME), steps=10, learning_rate=0.0001, **few).metrics["learned_factor_mean"] == pytest.approx(
        1, abs=0.002
    )  # 10 steps of 1e-4
    assert run(get(NAME), steps=10, learning_rate=0.0001, tau_start="one", **few).metrics[
        "learned_factor_mean"
    ] == pytest.approx(4, abs=0.01)
    assert abs(run(get(NAME), steps=100, **few).metrics["learned_factor_mean"] - 1) > 0.01


def test_half_precision_trains_with_float32_weights():
    for dtype in ("bfloat16", "float16"):
        m = run(get(NAME), dtype=dtype, d_k=16, kv_len=4, steps=100, n_seeds=1).metrics
        assert all(np.isfinite(list(m.values())))
        assert m["accuracy_min_inv_sqrt_d_k"] > 0.9


def test_refuses_what_makes_no_sense():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="heads_divide_width"):
        params(n_heads=3)
    with pytest.raises(ParamsError, match=r"too_many_models.*'n_seeds': 1"):
        params(n_seeds=3, d_k=512, n_heads=8)
    params(n_seeds=1, d_k=512, n_heads=8)
    params(n_seeds=10, d_k=256)
