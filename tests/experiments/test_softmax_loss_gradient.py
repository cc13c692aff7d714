"""softmax_loss_gradient against decimal arithmetic, its own draws in numpy, and autograd where autograd is exact."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from engine.attention import softmax_gradient
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "softmax_loss_gradient"
SETTINGS = [
    {},
    {"gap": 0.0, "kv_len": 2},
    {"gap": 1.5, "kv_len": 5, "label": "right"},
    {"gap": 20.0, "label": "right"},
    {"gap": 30.0, "kv_len": 3, "upstream_std": 4.0},
    {"gap": 100.0},
    {"gap": 128.0, "label": "right", "kv_len": 2},
]


def softmax_of(z: list[Decimal]) -> list[Decimal]:
    e = [x.exp() for x in z]
    return [x / sum(e) for x in e]


def product(w: list[Decimal], g: list[Decimal]) -> float:
    """Norm of J g, with 150 digits: 1 - w needs 112 of them at a gap of 128."""
    mean = sum(a * b for a, b in zip(w, g, strict=True))
    return float(sum((a * (b - mean)) ** 2 for a, b in zip(w, g, strict=True)).sqrt())


def exact(p: dict) -> dict[str, float]:
    with localcontext() as arithmetic:
        arithmetic.prec = 150
        n, key = p["kv_len"], 0 if p["label"] == "right" else 1
        w = softmax_of([Decimal(p["gap"])] + [Decimal(0)] * (n - 1))
        y = [Decimal(int(i == key)) for i in range(n)]
        frobenius = sum((w[i] * (int(i == j) - w[j])) ** 2 for i in range(n) for j in range(n)).sqrt()
        return {
            # the loss's own formula, not the chain rule
            "grad_cross_entropy_norm": float(sum((a - b) ** 2 for a, b in zip(w, y, strict=True)).sqrt()),
            "grad_squared_error_norm": product(w, [2 * (a - b) for a, b in zip(w, y, strict=True)]),
            "grad_softmax_twice_norm": product(w, [a - b for a, b in zip(softmax_of(w), y, strict=True)]),
            "jacobian_norm": float(frobenius),
            "upstream_cross_entropy_max": float(1 / w[key]),
            "weight_max": float(w[0]),
        }


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params(**given).as_dict() | {"n_rows": 64}
        result, draws = recorded(experiment, seed=6, **p)
        for name, want in exact(p).items():
            # float64: exp(-128) carries 128 roundings, every product a few
            assert result.metrics[name] == pytest.approx(want, rel=1e-12, abs=0), (given, name)
        v, grad_context = draws[:2]
        grad_context = p["upstream_std"] * grad_context / np.linalg.norm(grad_context, axis=1, keepdims=True)
        g = np.einsum("rkd,rd->rk", v, grad_context)
        e = np.exp(np.r_[0.0, np.full(p["kv_len"] - 1, -p["gap"])])
        w = e / e.sum()
        # (J g)_i = Σ_j w_i w_j (g_i - g_j): nothing near 1 is subtracted
        jg = np.einsum("i,j,rij->ri", w, w, g[:, :, None] - g[:, None, :])
        rms = math.sqrt((jg**2).sum(axis=1).mean())
        assert result.metrics["grad_attention_rms"] == pytest.approx(rms, rel=1e-11, abs=0), given
        to_values = p["upstream_std"] * np.linalg.norm(w)
        assert result.metrics["grad_values_norm"] == pytest.approx(to_values, rel=1e-12), given
        curves = result.tables["upstream"]
        for upstream, metric in (
            ("cross_entropy", "grad_cross_entropy_norm"),
            ("squared_error", "grad_squared_error_norm"),
            ("softmax_twice", "grad_softmax_twice_norm"),
        ):
            for gap in (0.0, 7.5, 40.0):
                at = (curves["upstream"] == upstream) & (curves["gap"] == gap)
                want = exact(p | {"gap": gap})[metric]
                assert curves["logits_gradient"][at].item() == pytest.approx(want, rel=1e-6, abs=0), (
                    upstream,
                    gap,
                )  # float32


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"cross_entropy": -y / weights,', '"cross_entropy": -y,'),
        ('"squared_error": 2 * error,', '"squared_error": error,'),
        ('"softmax_twice": softmax(weights) - y,', '"softmax_twice": weights - y,'),
        ("error[..., 0] = -weights[..., 1:].sum(dim=-1)", "pass"),  # 1 - w as a difference
        ('key = 0 if label == "right" else 1\n    y = ', "key = 1\n    y = "),
        ("logits[:, 0] = torch.from_numpy(gaps)", "logits[:] = torch.from_numpy(gaps)[:, None]"),  # all of them large
        ("math.sqrt((attention**2).mean())", "attention.mean()"),
        ("row_norm(grad_v.flatten(1))", "row_norm(grad_v[:, 0])"),
        ("grad_context / grad_context.norm(dim=-1, keepdim=True)", "grad_context"),
        ("params.upstream_std * grad_context", "grad_context"),
        ("softmax_gradient(weights.expand(n, -1), grad_weights)", "weights * grad_weights"),  # J taken as diagonal
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


# the gap at which 1/w overflows: the logarithm of the smallest number that is too large for the format
FORMATS = {"float32": 128 * math.log(2), "float16": 11.09, "bfloat16": 128 * math.log(2), "float64": 1024 * math.log(2)}
GRID = {"float32": 0.125, "float16": 0.125, "bfloat16": 0.5, "float64": 0.125}  # of the search, or of the logits


def formats_law(experiment: Experiment) -> None:
    for number_format, wanted in FORMATS.items():
        result = run(experiment, number_format=number_format, kv_len=4, log_epsilon=1e-3)
        found = result.metrics
        # 1/w overflows, and infinity times w less infinity is no number. Above a gap of some 10, w is exp(-gap); a
        # format that drops numbers without a leading 1 bit loses w itself, up to two bits (1.4) earlier
        assert wanted - 1.5 - GRID[number_format] <= found["log_grad_until"] <= wanted + GRID[number_format]
        assert found["log_loss_until"] >= found["log_grad_until"]
        assert found["fused_grad_until"] == 768
        table = result.tables["formats"]
        rows = {way: table["cross_entropy"] == way for way in ("fused", "log_softmax", "log_epsilon")}
        gap = table["gap"][rows["fused"]].astype(float)
        rest = 1 / (np.exp(gap) + 3)  # weight of the label, and of the two others
        exact_norm = np.sqrt((1 - 3 * rest) ** 2 + (1 - rest) ** 2 + 2 * rest**2)
        rounding = {"float32": 1e-5, "float64": 1e-6, "float16": 3e-2, "bfloat16": 0.1}[number_format]
        fused, log, epsilon = (table["logits_gradient"][at] for at in rows.values())
        assert fused == pytest.approx(exact_norm, rel=rounding)
        ends = gap <= found["log_grad_until"]
        if number_format != "float16":  # whose weights are coarse long before they are 0
            assert log[ends & (gap < wanted - 2)] == pytest.approx(exact_norm[ends & (gap < wanted - 2)], rel=rounding)
        assert np.all(log[~ends] == 0)
        # with ε the gradient is multiplied by w/(w + ε), which is 1/2 where w = ε
        damped = exact_norm * rest / (rest + 1e-3)
        assert epsilon[gap < 2] == pytest.approx(damped[gap < 2], rel=5 * rounding)
        assert np.all(epsilon[gap > 20] < 1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[:, key] + epsilon)", "[:, key])"),
        ("grid[lost[0] - 1]", "grid[lost[-1]]"),
        ("np.where(np.isfinite(found), found, 0.0)", "np.nan_to_num(found, nan=1.0)"),
        (".to(getattr(torch, params.number_format))", ".to(torch.float32)"),
        ('losses[:, None] if of == "losses" else gradients', "losses[:, None]"),
        ("(SEARCH_STEP, COARSE_STEP)):", "):"),
    ],
)
def test_formats_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(formats_law, NAME, old, new)


@pytest.mark.parametrize("label", ["wrong", "right"])
@pytest.mark.parametrize("gap", [0.0, 3.0, 12.0])
def test_agrees_with_autograd_where_autograd_is_exact(gap, label):
    """Each loss written as one writes it, differentiated by PyTorch in float64."""
    key = 0 if label == "right" else 1
    z = torch.zeros(1, 16, dtype=torch.float64)
    z[0, 0] = gap
    z.requires_grad_()
    target, y = torch.tensor([key]), torch.eye(16, dtype=torch.float64)[key]
    losses = {
        "grad_cross_entropy_norm": cross_entropy(z, target),
        "grad_squared_error_norm": ((torch.softmax(z, -1) - y) ** 2).sum(),
        "grad_softmax_twice_norm": cross_entropy(torch.softmax(z, -1), target),
    }
    got = run(get(NAME), gap=gap, label=label).metrics
    for name, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss, z, retain_graph=True)
        # autograd's 1 - w is off by 1e-16 where it should be e^-12 = 6e-6, squared for the squared error
        assert got[name] == pytest.approx(gradient.norm().item(), rel=1e-6, abs=1e-15), name


def test_softmax_gradient_is_autograds():
    """The engine's chain rule through the softmax against PyTorch's, for random weights and random vectors."""
    generator = torch.Generator().manual_seed(8)
    z = (3 * torch.randn(50, 9, generator=generator, dtype=torch.float64)).requires_grad_()
    g = torch.randn(50, 9, generator=generator, dtype=torch.float64)
    weights = torch.softmax(z, -1)
    (wanted,) = torch.autograd.grad((weights * g).sum(), z)
    torch.testing.assert_close(softmax_gradient(weights.detach(), g), wanted, rtol=0, atol=1e-14)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=1, **params).metrics


def test_limits():
    level = metrics(gap=0.0, kv_len=2)
    # two equal keys: w - y = (1/2, -1/2), and J halves a difference
    assert level["grad_cross_entropy_norm"] == pytest.approx(math.sqrt(0.5), rel=1e-12)
    assert level["grad_squared_error_norm"] == pytest.approx(math.sqrt(0.5), rel=1e-12)
    assert level["jacobian_norm"] == pytest.approx(0.5, rel=1e-12)
    wrong, right = metrics(gap=60.0), metrics(gap=60.0, label="right")
    assert wrong["grad_cross_entropy_norm"] == pytest.approx(math.sqrt(2), rel=1e-12)
    assert right["grad_cross_entropy_norm"] < 1e-24
    assert max(wrong["grad_squared_error_norm"], wrong["grad_softmax_twice_norm"], wrong["grad_attention_rms"]) < 1e-24
    assert wrong["grad_values_norm"] == pytest.approx(1, rel=1e-12)
    assert metrics(gap=0.0, kv_len=16)["grad_values_norm"] == pytest.approx(1 / 4, rel=1e-12)


@pytest.mark.parametrize("gap", [0.0, 4.0, 30.0])
def test_random_gradients_from_above_measure_the_frobenius_norm(gap):
    found = metrics(gap=gap, n_rows=8192)
    # E|Jg|² = |J|_F² for g of N(0, I). Its spread is at most that of one squared normal number, √2; the root halves it
    assert found["grad_attention_rms"] == pytest.approx(found["jacobian_norm"], rel=5 * math.sqrt(2 / 8192) / 2)
