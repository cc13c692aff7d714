"""aligned_keys against the same draws in numpy, key by key, and against the law of the target's logit."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "aligned_keys"
SETTINGS = [
    {},
    {"d_k": 16, "scale": "inv_d_k", "alignment": 1.0},
    {"d_k": 256, "scale": "base_over_d", "alignment": 0.0},
    {"kv_len": 2, "scale": "log_n", "alignment": 0.5},
    {"d_k": 4096, "alignment": 0.1, "batch": 16},  # several chunks
]


def scale_of(p: dict, rule: str) -> float:
    root = math.sqrt(p["d_k"])
    return {"inv_sqrt_d_k": 1 / root, "inv_d_k": 1 / root**2, "base_over_d": 8 / root**2}.get(
        rule, math.log(p["kv_len"]) / root
    )


def rows_of(p: dict, rule: str, alignment: float, draws: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and weights of every query, its own keys written out one after the other, the target last."""
    q, noise, others = (np.concatenate(draws[i::3]) for i in range(3))
    assert others.shape == (p["batch"], p["kv_len"] - 1, p["d_k"])
    logits = []
    for item in range(p["batch"]):
        for i in range(p["q_len"]):
            target = alignment * q[item, i] + math.sqrt(1 - alignment**2) * noise[item, i]
            keys = np.vstack([others[item], target])
            logits.append(keys @ q[item, i] * scale_of(p, rule))
    logits = np.array(logits)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return logits, weights / weights.sum(axis=-1, keepdims=True)


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | {"batch": 3, "q_len": 8} | given
        result, draws = recorded(experiment, seed=2, **p)
        logits, weights = rows_of(p, p["scale"], p["alignment"], draws)
        entropy = -(weights * np.log(weights)).sum(axis=-1).mean()
        metrics = {
            "target_logit_mean": logits[:, -1].mean(),
            "other_logits_std": math.sqrt((logits[:, :-1] ** 2).mean()),
            "target_weight_mean": weights[:, -1].mean(),
            "target_weight_median": np.percentile(weights[:, -1], 50),
            "entropy_nats": entropy,
            "entropy_share": entropy / math.log(p["kv_len"]),
        }
        assert result.metrics == pytest.approx(metrics, rel=1e-6), p  # the squares of the others are summed in float32
        table = result.tables["target_weight"]
        for rule in ("inv_sqrt_d_k", "inv_d_k", "base_over_d", "log_n"):
            mine = table["scale"] == rule
            assert table["alignment"][mine] == pytest.approx(np.arange(21) / 20)
            for i in (0, 6, 20):
                want = rows_of(p, rule, i / 20, draws)[1][:, -1].mean()
                assert table["target_weight_mean"][mine][i] == pytest.approx(want, rel=1e-6), (
                    p,
                    rule,
                    i,
                )  # float32 column


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("logits = qk * scale", "logits = qk"),
        ("across = math.sqrt(1 - along**2)", "across = 1 - along"),  # target of another length
        ("softmax(logits)", "softmax(logits.transpose(-1, -2)).transpose(-1, -2)"),
        ("[(q * target).sum(dim=-1, keepdim=True), ", "["),  # no target among the keys
        ('"base_over_d": 8 / params.d_k', '"base_over_d": 8 / math.sqrt(params.d_k)'),
        ("math.log(params.kv_len) / math.sqrt(params.d_k)", "math.log(params.d_k) / math.sqrt(params.d_k)"),
        ("np.outer(ALIGNMENTS, per_row(q_squared))", "np.outer(ALIGNMENTS**2, per_row(q_squared))"),
        ("(qk[..., 1:] * c).logsumexp(dim=-1)", "(qk * c).logsumexp(dim=-1)"),  # the target counted among the others
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=1, **params).metrics


@pytest.mark.parametrize("d_k", [1, 16, 256])
@pytest.mark.parametrize("alignment", [0.0, 0.3, 1.0])
def test_the_target_grows_with_d_k_and_the_others_with_its_root(d_k, alignment):
    n_rows = 16 * 64
    found = metrics(d_k=d_k, alignment=alignment, scale="inv_d_k")
    # one coordinate's product has mean ρ and variance 1 + ρ²
    error = math.sqrt((1 + alignment**2) / d_k / n_rows)
    assert abs(found["target_logit_mean"] - alignment) < 5 * error
    # variance of the mean of (q·k)²: single products, and |q|² and |k|² that a row or a column shares
    relative = math.sqrt(((2 + 6 / d_k) / (64 * 63) + 2 / d_k / 64 + 2 / d_k / 63) / 16)
    assert abs(found["other_logits_std"] ** 2 * d_k - 1) < 5 * relative


def test_each_scale_keeps_its_own_case_the_same_at_every_width():
    widths = (64, 1024)
    independent = [metrics(d_k=d, alignment=0, scale="inv_sqrt_d_k") for d in widths]
    aligned = [metrics(d_k=d, alignment=0.3, scale="base_over_d") for d in widths]
    # entropies of 1024 rows vary by 0.1 around 3.7; the target's logit is 8 · 0.3 at every width
    assert independent[0]["entropy_nats"] == pytest.approx(independent[1]["entropy_nats"], abs=0.05)
    assert aligned[0]["target_logit_mean"] == pytest.approx(2.4, abs=5 * 8 * math.sqrt(1.09 / 64 / 1024))
    assert aligned[1]["target_logit_mean"] == pytest.approx(2.4, abs=5 * 8 * math.sqrt(1.09 / 1024 / 1024))
    crossed = [metrics(d_k=d, alignment=0.3, scale="inv_sqrt_d_k") for d in widths]
    assert crossed[1]["target_weight_mean"] > 5 * crossed[0]["target_weight_mean"]


def test_at_d_k_64_the_base_rule_is_the_usual_one():
    assert metrics(scale="base_over_d") == metrics(scale="inv_sqrt_d_k")


def test_an_independent_target_is_a_key_like_the_others():
    found = metrics(alignment=0.0, kv_len=64, scale="inv_d_k")
    assert found["target_weight_mean"] == pytest.approx(1 / 64, rel=5 * 0.125 / math.sqrt(1024))  # logits spread by 1/8


def test_a_weight_of_one_half_needs_a_margin_of_ln_n_and_half_a_variance():
    """Sum of exponentials of n - 1 normal logits: ln(n - 1) + 1/2; a target of exactly that mean is near one half."""
    margin = math.log(63) + 0.5
    found = metrics(d_k=1024, alignment=margin / 32, batch=32)
    # the target's logit varies by 1.1, so its median over 2048 rows by 0.03, and the weight by a quarter of that; the
    # logarithm of a mean lies above the mean of logarithms by some hundredths at 63 keys
    assert found["target_weight_median"] == pytest.approx(0.5, abs=5 * 0.03 / 4 + 0.02)


def test_refusals():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="too_many_key_numbers"):
        params(d_k=4096, kv_len=1024)
    with pytest.raises(ParamsError, match="too_many_logits"):
        params(q_len=512, kv_len=4096)
    with pytest.raises(ParamsError, match="from 0 to 1"):
        params(alignment=1.5)
