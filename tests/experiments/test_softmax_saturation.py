"""softmax_saturation against the same draws worked out in numpy, and against rows simulated in another way."""

import math

import numpy as np
import pytest

from engine.attention import SCALE_RULES
from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "softmax_saturation"
SMALL = {"batch": 4, "q_len": 16}
SETTINGS = [
    {},
    {"scale": "none", "d_k": 256},
    {"scale": "inv_d_k", "kv_len": 17},
    {"scale": "factor", "factor": 2.0, "d_k": 8},
    {"scale": "learnable_tau", "tau": 3.0, "dead_below": 0.1},
    {"scale": "cosine", "tau": 0.05, "d_k": 32, "kv_len": 8},
    {"scale": "none", "d_k": 4096, "batch": 8},  # several chunks
    {"scale": "none", "d_k": 1, "kv_len": 2},
]


def scale_of(rule: str, p: dict) -> float:
    tau = p.get("tau", 1.0)
    root = math.sqrt(p["d_k"])
    return {"none": 1, "inv_sqrt_d_k": 1 / root, "inv_d_k": 1 / p["d_k"], "factor": p.get("factor", 1.0) / root}.get(
        rule, 1 / tau
    )


def reference(rule: str, q: np.ndarray, k: np.ndarray, p: dict) -> dict[str, np.ndarray]:
    """Logits, weights, and per row the entropy and the Jacobian's norm, entry by entry."""
    if rule == "cosine":
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True)) for x in (q, k))
    logits = np.einsum("bqd,bkd->bqk", q, k) * scale_of(rule, p)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    entropy = -sum(w * np.log(w) for w in np.moveaxis(np.maximum(weights, 1e-300), -1, 0))
    # J_ii = w_i Σ_{j≠i} w_j and J_ij = -w_i w_j: 1 - w_i as a sum, else nothing is left of it on saturated rows
    n = weights.shape[-1]
    rest = weights @ (1 - np.eye(n))
    off = (weights[..., :, None] * weights[..., None, :]) ** 2 * (1 - np.eye(n))
    norm = np.sqrt(((weights * rest) ** 2).sum(axis=-1) + off.sum(axis=(-1, -2)))
    return {"logits": logits, "weights": weights, "entropy": entropy.ravel(), "norm": norm.ravel()}


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = {"d_k": 64, "kv_len": 64, "scale": "inv_sqrt_d_k", "dead_below": 1e-3} | SMALL | given
        result, draws = recorded(experiment, seed=5, **p)
        q, k = np.concatenate(draws[0::2]), np.concatenate(draws[1::2])
        assert q.shape == (p["batch"], p["q_len"], p["d_k"])
        assert k.shape == (p["batch"], p["kv_len"], p["d_k"])
        want = reference(p["scale"], q, k, p)
        weight_max = want["weights"].max(axis=-1)
        metrics = {
            "logits_std": math.sqrt((want["logits"] ** 2).mean()),
            "threshold_std": math.sqrt(2 * math.log(p["kv_len"])),
            "entropy_nats": want["entropy"].mean(),
            "entropy_share": want["entropy"].mean() / math.log(p["kv_len"]),
            "weight_max_mean": weight_max.mean(),
            "weight_max_median": np.percentile(weight_max, 50),
            "saturated_share": np.count_nonzero(weight_max > 0.9) / weight_max.size,
            "jacobian_norm_mean": want["norm"].mean(),
            "jacobian_norm_median": np.percentile(want["norm"], 50),
            "jacobian_norm_p10": np.percentile(want["norm"], 10),
            "dead_share": np.count_nonzero(want["norm"] < p["dead_below"]) / want["norm"].size,
        }
        # float64 on both sides: 1e-16, times the size of the largest logit (some 200) in a small weight, times sums
        assert result.metrics == pytest.approx(metrics, rel=1e-10, abs=1e-12), p
        table = result.tables["weight_by_rank"]
        for rule in {"none", "inv_sqrt_d_k", "inv_d_k", p["scale"]}:
            mean = np.sort(reference(rule, q, k, p)["weights"], axis=-1)[..., ::-1].mean(axis=(0, 1))
            rows = table["scale"] == rule
            # the weights are sorted in float32
            np.testing.assert_allclose(table["weight_mean"][rows], mean[table["rank"][rows] - 1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("logits = qk * scale_value(rule, params.d_k, factor=params.factor, tau=params.tau)", "logits = qk"),
        ("scale_value(rule, params.d_k, factor", "scale_value(rule, params.kv_len, factor"),
        ("softmax(logits)", "softmax(logits.transpose(-1, -2)).transpose(-1, -2)"),  # over the queries
        ("attention_logits(q, k, rule, tau=params.tau)", "attention_logits(q, k, rule)"),  # temperature dropped
        ("jacobian_norm(weights)", "weights.norm(dim=-1)"),
        ("entropy.mean() / math.log(params.kv_len)", "entropy.mean() / math.log(params.q_len)"),
        ("norm < params.dead_below", "norm < SATURATED * params.dead_below"),
        ("sum(axis=(0, 1), dtype=np.float64)[::-1]", "sum(axis=(0, 1), dtype=np.float64)"),  # ranks upside down
        ("run.randn(n, params.kv_len, params.d_k)", "run.randn(1, params.kv_len, params.d_k)"),  # one set of keys
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("d_k", [8, 64, 512])
def test_means_agree_with_rows_simulated_from_chi_square_norms(d_k):
    """Given q, the logits of a row are exactly N(0, |q|²): a second way that never draws k."""
    rng = np.random.default_rng(11)
    norm = np.sqrt(rng.chisquare(d_k, size=(20_000, 1)))
    logits = norm * rng.standard_normal((20_000, 64))
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    weight_max = weights.max(axis=-1)
    seeds = [run(get(NAME), seed=s, d_k=d_k, scale="none", batch=32).metrics for s in range(8)]
    for metric, rows in {"weight_max_mean": weight_max, "saturated_share": weight_max > 0.9}.items():
        runs = np.array([m[metric] for m in seeds])
        # rows that share keys are not quite independent, so the error of a run is taken from the spread of eight
        error = math.hypot(runs.std(ddof=1) / math.sqrt(8), rows.std() / math.sqrt(len(rows)))
        assert abs(runs.mean() - rows.mean()) < 6 * error, metric  # 6: the spread of eight is itself known to 25 %


def test_spread_of_the_logits_is_that_of_the_rule():
    batch, m, n = 16, 64, 64
    for d_k in (1, 16, 256):
        for rule in ("none", "inv_sqrt_d_k", "inv_d_k"):
            got = run(get(NAME), seed=2, d_k=d_k, scale=rule).metrics["logits_std"]
            # variance of the mean of (q·k)²: of single products, and of |q|² and |k|² that a row or column shares
            error = math.sqrt(((2 + 6 / d_k) / (m * n) + 2 / d_k / m + 2 / d_k / n) / batch)
            want = scale_of(rule, {"d_k": d_k}) * math.sqrt(d_k)
            assert abs(got**2 / want**2 - 1) < 5 * error, (d_k, rule)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=1, **params).metrics


def test_rules_that_are_the_same_number_give_the_same():
    default = metrics()
    assert metrics(scale="factor", factor=1.0) == default
    assert metrics(scale="learnable_tau", tau=8.0) == pytest.approx(default, rel=1e-6)  # 1/8 and 1/√64
    assert metrics(scale="learnable_tau") == metrics(scale="none")
    assert metrics(d_k=1, scale="none") == metrics(d_k=1) == metrics(d_k=1, scale="inv_d_k")


@pytest.mark.parametrize("kv_len", [2, 64, 1000])
def test_no_spread_gives_uniform_weights(kv_len):
    uniform = metrics(scale="cosine", tau=128, kv_len=kv_len)  # |logit| at most 1/128
    assert uniform["entropy_share"] == pytest.approx(1, abs=1e-4)
    assert uniform["weight_max_mean"] == pytest.approx(1 / kv_len, rel=1 / 64)
    assert uniform["jacobian_norm_mean"] == pytest.approx(math.sqrt(kv_len - 1) / kv_len, rel=1 / 64)
    assert uniform["saturated_share"] == uniform["dead_share"] == 0


def test_a_huge_spread_gives_one_hot_weights():
    hot = metrics(scale="learnable_tau", tau=2**-7, d_k=4096)  # logits spread by 8192, the first two some 2000 apart
    assert hot["weight_max_median"] == 1
    assert hot["jacobian_norm_median"] == 0
    assert hot["entropy_nats"] < 0.01
    assert hot["dead_share"] > 0.98


def test_norms_far_below_the_rounding_of_float32_are_kept():
    settings = {"seed": 4, "d_k": 1024, "scale": "none"}
    single = run(get(NAME), **settings).metrics
    double = run(get(NAME), dtype="float64", **settings).metrics
    assert double["jacobian_norm_p10"] < 1e-8
    # a logit of 100 is wrong by some ten roundings of 6e-8 × 100, and so, relatively, is a small weight
    assert single["jacobian_norm_p10"] == pytest.approx(double["jacobian_norm_p10"], rel=1e-3)
    assert single["jacobian_norm_median"] == pytest.approx(double["jacobian_norm_median"], rel=1e-3)


@pytest.mark.parametrize("scale", SCALE_RULES)
def test_tables_show_the_chosen_rule_beside_the_usual_ones(scale):
    result = run(get(NAME), seed=1, scale=scale, d_k=16)
    for table in result.tables.values():
        assert set(table["scale"]) == {"none", "inv_sqrt_d_k", "inv_d_k", scale}
    ranks, norms = result.tables["weight_by_rank"], result.tables["jacobian"]
    mine = ranks["scale"] == scale
    assert ranks["weight_mean"][mine][0] == pytest.approx(result.metrics["weight_max_mean"], rel=1e-6)
    assert np.all(np.diff(ranks["weight_mean"][mine]) <= 0)
    assert ranks["rank"][mine][-1] == 64
    mine = norms["scale"] == scale
    below, above = norms["jacobian_norm"][mine][24:26]  # at shares 0.49 and 0.51
    assert below <= result.metrics["jacobian_norm_median"] <= above * (1 + 1e-6)


def test_refuses_what_would_not_answer_a_stop_in_time():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="too_many_key_numbers") as caught:
        params(kv_len=16384, d_k=4096)
    assert caught.value.problems[0].values == {"product": 2**26, "limit": 2**21, "width": "d_k"}
    with pytest.raises(ParamsError, match="too_many_logits"):
        params(kv_len=4096, q_len=512)
    params(kv_len=2048, q_len=512, d_k=1024)  # the largest that is allowed
    with pytest.raises(ParamsError):
        params(kv_len=1)
