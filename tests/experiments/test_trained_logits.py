"""trained_logits against the model worked out in numpy, and its synthetic rows against what independence says."""

import math

import numpy as np
import pytest
import torch

from engine import inputs, language_model
from engine.base import ParamsError, make_run
from engine.registry import Experiment, get
from tests import language_model_reference as reference
from tests.harness import assert_law_catches, recorded, run

NAME = "trained_logits"
SEED = 5
ROOT = math.sqrt(32)
GRID = [2 ** (half / 2) for half in range(-5, 6)]
SETTINGS = [
    {"source": "stories", "scale": "none", "n_texts": 1, "seq_len": 64},
    {"source": "repeats", "scale": "factor", "factor": 3.0, "n_texts": 8, "seq_len": 128},  # two chunks
    {"source": "text", "text": "Ben has a map. 钥匙", "scale": "as_trained"},
]


def tokens_and_periods(p: dict) -> list[tuple[tuple[int, ...], int]]:
    texts = inputs.read_texts(
        make_run(SEED), p["source"], p.get("text", ""), p.get("n_texts", 1), p.get("seq_len", 128)
    )
    return list(zip(map(tuple, texts.tokens.tolist()), texts.period.tolist(), strict=True))


def described(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Of one head on one text: squared deviations in the rows, degrees of freedom, entropy shares, maxima, rows."""
    seen = np.tril(np.ones((len(q), len(q)), bool))[1:]
    n_keys = seen.sum(axis=1)
    z = np.where(seen, (q @ k.T * scale)[1:], -np.inf)
    mean = np.where(seen, z, 0).sum(axis=1) / n_keys
    squares = np.where(seen, z - mean[:, None], 0) ** 2
    w = np.exp(z - z.max(axis=1, keepdims=True))
    w /= w.sum(axis=1, keepdims=True)
    entropy = -(w * np.log(np.where(w > 0, w, 1))).sum(axis=1)
    return np.array([squares.sum(), (n_keys - 1).sum(), (entropy / np.log(n_keys)).sum(), w.max(axis=1).sum(), len(w)])


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=SEED, **p)
        texts = tokens_and_periods(p)
        chosen = {"as_trained": 1.0, "none": ROOT, "factor": p.get("factor")}[p["scale"]]
        factors = sorted({*GRID, chosen}, key=float) if p["scale"] == "factor" else GRID

        by_factor = result.tables["by_factor"]
        assert by_factor["factor"] == pytest.approx(factors, rel=1e-12)
        few = factors if len(texts) == 1 else [min(factors), 1.0, chosen]  # the others are only slower
        losses = {}
        for factor in few:
            known = [reference.read(t, factor).losses[period:] for t, period in texts]
            losses[factor] = np.concatenate(known).mean()
            at = int(np.argmin(abs(by_factor["factor"] - factor)))
            # float64 on both sides; the engine's angles are float32, whose products differ in the last digit
            assert by_factor["loss_nats"][at] == pytest.approx(losses[factor], rel=1e-6), (p, factor)
        nearest_to_chosen = min(few, key=lambda factor: abs(factor - chosen))
        assert result.metrics["loss_nats"] == pytest.approx(losses[nearest_to_chosen], rel=1e-6)
        assert result.metrics["loss_as_trained_nats"] == pytest.approx(losses[1.0], rel=1e-6)
        lowest = by_factor["factor"][by_factor["loss_nats"].argmin()]
        assert result.metrics["best_factor"] == lowest

        trained, synthetic = np.zeros((2, 12, 5))
        start = 0
        while start < len(texts):
            drawn = [draws.pop(0) for _ in range(6)]  # q and k of each layer, for a chunk of texts
            assert {x.shape[1:] for x in drawn} == {(4, len(texts[0][0]), 32)}
            for n, (tokens, _) in enumerate(texts[start : start + len(drawn[0])]):
                passed = reference.read(tokens, nearest_to_chosen)
                for head in range(12):
                    q, k = passed.q[head], passed.k[head]
                    trained[head] += described(q, k, chosen / ROOT)
                    like = [
                        x / np.sqrt((x**2).sum(1, keepdims=True)) * np.sqrt((y**2).sum(1, keepdims=True))
                        for x, y in (
                            (drawn[2 * (head // 4)][n, head % 4], q),
                            (drawn[2 * (head // 4) + 1][n, head % 4], k),
                        )
                    ]
                    synthetic[head] += described(*like, chosen / ROOT)
            start += len(drawn[0])
        assert not draws
        want = {}
        for name, sums in (("trained", trained), ("synthetic", synthetic)):
            squares, freedom, shares, maxima, rows = sums.T
            columns = {
                "logits_std": np.sqrt(squares / freedom),
                "entropy_share": shares / rows,
                "weight_max": maxima / rows,
            }
            mine = result.tables["by_head"]["vectors"] == name
            assert list(result.tables["by_head"]["head"][mine]) == [f"L{i}H{j}" for i in range(3) for j in range(4)]
            for column, values in columns.items():
                np.testing.assert_allclose(result.tables["by_head"][column][mine], values, rtol=1e-5, err_msg=column)
            prefix = "synthetic_" if name == "synthetic" else ""
            for metric, column in (("logits_std_mean", "logits_std"), ("entropy_share_mean", "entropy_share")):
                want[prefix + metric] = columns[column].mean()
            want[prefix + "weight_max_mean"] = columns["weight_max"].mean()
        want["qk_std_mean"] = want["logits_std_mean"] * ROOT / chosen
        want["n_unknown"] = 2.0 if p["source"] == "text" else 0.0
        assert {name: result.metrics[name] for name in want} == pytest.approx(want, rel=1e-5), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("some.tokens, factor=factor, trace=trace", "some.tokens, trace=trace"),  # the chosen factor dropped
        ("forward_fast(weights, some.tokens, factor=factor)", "forward_fast(weights, some.tokens)"),
        ("[some.known()].sum()", ".sum()"),  # the first time of a string counted
        ("unit_norm(run.randn(*x.shape))", "run.randn(*x.shape)"),  # norms of their own
        ("x.norm(dim=-1, keepdim=True)", "x.norm(dim=-1, keepdim=True).mean()"),
        ("(logits - centre)", "logits"),  # spread around 0
        ("several.to(logits.dtype).log()", "np.log(len(keep))"),  # as if every row had all keys
        ("* ROOT / chosen", "* ROOT"),
        ("_describe(qk * scale, keep)", "_describe(qk, keep)"),
        ("texts.tokens[start : start + n]", "texts.tokens[:n]"),  # the first chunk again and again
        ("softmax(mask_logits(logits, keep))", "softmax(logits)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_spread_of_independent_vectors_follows_from_their_norms():
    """Given the norms, E (q·k)² is |q|²|k|²/d_k, and the spread within a row leaves its mean out."""
    ratios = []
    for seed in range(8):
        p = {"source": "stories", "n_texts": 4, "seq_len": 128}
        result = run(get(NAME), seed=seed, **p)
        trace = language_model.Trace()
        texts = inputs.read_texts(make_run(seed), "stories", "", 4, 128)
        language_model.forward(language_model.load_weights(), texts.tokens, trace=trace)
        for layer in range(3):
            q2, k2 = (x[layer].square().sum(-1).numpy() for x in (trace.q, trace.k))  # (text, head, place)
            n_keys = np.arange(1, 129)
            squares = (q2 / 32 * k2.cumsum(-1) * (1 - 1 / n_keys)).sum(axis=(0, 2)) / (4 * (n_keys - 1).sum())
            measured = result.tables["by_head"]["logits_std"][12 + 4 * layer : 16 + 4 * layer]
            ratios += [measured**2 / (squares / 32)]
    ratios = np.array(ratios)  # 24 times four heads, all around 1
    error = ratios.std(ddof=1) / math.sqrt(ratios.size)
    assert abs(ratios.mean() - 1) < 5 * error
    assert error < 0.02


def test_names_of_one_scale_give_one_result():
    assert run(get(NAME), scale="factor", factor=1.0).metrics == run(get(NAME)).metrics
    none, root = run(get(NAME), scale="none").metrics, run(get(NAME), scale="factor", factor=ROOT).metrics
    assert none == root


def test_a_small_factor_leaves_rows_nearly_uniform():
    flat = run(get(NAME), scale="factor", factor=0.0625).metrics
    sharp = run(get(NAME), scale="factor", factor=8).metrics
    assert flat["entropy_share_mean"] > 0.9
    assert sharp["entropy_share_mean"] < 0.5
    assert flat["weight_max_mean"] < sharp["weight_max_mean"]


def test_the_fused_pass_reads_the_factor():
    weights = language_model.load_weights(dtype=torch.float64)
    tokens = inputs.draw_texts(make_run(0), "stories", 2, 64).tokens
    for factor in (0.25, 1.0, 4.0):
        eager = language_model.forward(weights, tokens, factor=factor)
        # float64, sums of a few hundred terms in another order
        torch.testing.assert_close(
            language_model.forward_fast(weights, tokens, factor=factor), eager, rtol=1e-9, atol=1e-9
        )
        assert (language_model.forward_fast(weights, tokens, factor=2 * factor) - eager).abs().max() > 1e-3


def test_one_character_is_no_text_to_predict():
    with pytest.raises(ParamsError, match="text_needs_two"):
        get(NAME).Params(source="text", text="A")
    get(NAME).Params(text="A")  # not read
