"""causal_leak against a stack written with loops over rows and keys, differentiated by finite differences."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.engine.test_masks import by_position
from tests.harness import assert_law_catches, recorded, run

NAME = "causal_leak"
N, D = 5, 4
SIZES = {"prefix": "prefix_tokens", "window": "window", "documents": "document_len"}
SETTINGS = [
    {},
    {"mask": "no_mask"},
    {"mask": "strict", "n_layers": 2},
    {"mask": "one_ahead", "n_layers": 2},
    {"mask": "one_ahead", "n_layers": 2, "in_layers": "first_layer"},
    {"mask": "one_ahead", "n_layers": 2, "in_layers": "last_layer"},
    {"mask": "prefix", "prefix_tokens": 3},
    {"mask": "window", "window": 2, "n_layers": 2},
    {"mask": "documents", "document_len": 2},
    {"applied": "times_zero"},
    {"applied": "after_softmax"},
    {"applied": "after_softmax", "mask": "strict"},
    {"applied": "after_renormalized", "mask": "strict"},
    {"expert_choice": True},
]


class Stack:
    """The layers of a run, from its draws; one row and one key at a time."""

    def __init__(self, p: dict, draws: list[np.ndarray]) -> None:
        self.p, self.n_layers = p, p.get("n_layers", 1)
        self.matrices = [m / np.sqrt(D) for m in draws[: self.n_layers]]
        self.scores = draws[self.n_layers : 2 * self.n_layers]
        self.x, self.other, self.g = draws[2 * self.n_layers :]
        where = {"first_layer": [0], "last_layer": [self.n_layers - 1]}
        self.chosen = where.get(p.get("in_layers"), range(self.n_layers))
        self.sums: list[float] = []
        self.future: list[float] = []

    def sees(self, t: int, s: int) -> bool:
        mask = self.p.get("mask", "causal")
        return by_position(mask, t, s, self.p.get(SIZES.get(mask, ""), 1))

    def weights(self, layer: int, t: int, logits: np.ndarray) -> np.ndarray:
        n = len(logits)
        if layer not in self.chosen:
            row = np.array([np.exp(logits[s]) if s <= t else 0.0 for s in range(n)])
            return row / row.sum()
        sees = np.array([self.sees(t, s) for s in range(n)])
        applied = self.p.get("applied", "minus_inf")
        if applied == "times_zero":
            row = np.exp(np.where(sees, logits, 0.0))
        else:
            row = np.exp(logits) * (sees if applied == "minus_inf" else 1)
        row = row / row.sum() if row.sum() else row
        if applied.startswith("after"):
            row = row * sees
        if applied == "after_renormalized" and row.sum():
            row = row / row.sum()
        if layer == self.chosen[0] and sees.any():
            self.sums.append(row.sum())
            self.future.append(row[t + 1 :].sum())
        return row

    def __call__(self, x: np.ndarray) -> np.ndarray:
        for layer, (W_q, W_k, W_v, W_o, W_e) in enumerate(self.matrices):
            h = np.array([normalized(row) for row in x])
            added = []
            for t in range(len(x)):
                logits = np.array([(h[t] @ W_q) @ (h[s] @ W_k) / np.sqrt(D) for s in range(len(x))])
                row = self.weights(layer, t, logits)
                added.append(sum(row[s] * (h[s] @ W_v) for s in range(len(x))) @ W_o)
            x = x + np.array(added)
            if self.p.get("expert_choice"):
                order = sorted(range(len(x)), key=lambda t: -x[t] @ self.scores[layer])
                taken = order[: max(1, len(x) // 2)]
                x = np.array([row + np.tanh(normalized(row) @ W_e) * (t in taken) for t, row in enumerate(x)])
        return x


def normalized(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def with_row(x: np.ndarray, s: int, row: np.ndarray) -> np.ndarray:
    changed = x.copy()
    changed[s] = row
    return changed


def slopes(stack: Stack) -> np.ndarray:
    """Norm of the gradient of g·out_t with respect to x_s, by central differences. Shapes: (t, s)."""
    found = np.zeros((N, N, D))
    for s in range(N):
        for i in range(D):
            step = np.zeros(D)
            step[i] = 1e-5
            ahead, behind = (stack(with_row(stack.x, s, stack.x[s] + sign * step)) for sign in (1, -1))
            found[:, s, i] = (ahead - behind) @ stack.g / 2e-5
    return np.sqrt((found**2).sum(-1))


def shown(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.where(values == 0, -9, np.maximum(np.log10(values), -8)).ravel()


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=5, seq_len=N, d_model=D, **p)
        stack = Stack(p, draws)
        out, metrics, table = stack(stack.x), result.metrics, result.tables["pairs"]
        sums, future_weights = stack.sums, stack.future
        stack.sums, stack.future = [], []
        change = np.array([np.abs(stack(with_row(stack.x, s, stack.other[s])) - out).max(-1) for s in range(N)]).T
        gradient = slopes(stack)
        # central differences of float64 at 1e-5: 1e-10 by the third derivative, 1e-11 by rounding
        noise = 1e-8
        np.testing.assert_allclose(
            np.maximum(table["gradient_log10"], -7), np.maximum(shown(gradient), -7), atol=2e-2, err_msg=str(p)
        )
        strong = gradient > 1e-3
        np.testing.assert_allclose(
            10 ** table["gradient_log10"].reshape(N, N)[strong], gradient[strong], rtol=1e-4, err_msg=str(p)
        )
        changed = change > 1e-12  # less is the rounding of one of the two
        np.testing.assert_allclose(
            10 ** table["change_log10"].reshape(N, N)[changed], change[changed], rtol=1e-9, err_msg=str(p)
        )
        later = np.triu(np.ones((N, N), dtype=bool), 1)
        assert metrics["future_gradient_max"] == pytest.approx(gradient[later].max(), rel=1e-4, abs=noise), p
        assert metrics["future_change_max"] == pytest.approx(change[later].max(), rel=1e-9, abs=1e-12), p
        assert metrics["seen_gradient_min"] == pytest.approx(gradient[~later].min(), rel=1e-4, abs=noise), p
        assert metrics["row_sum_min"] == pytest.approx(min(sums), rel=1e-12), p
        assert metrics["future_weight_max"] == pytest.approx(max(future_weights), rel=1e-12, abs=1e-12), p
        assert metrics["kept_share"] == np.mean([stack.sees(t, s) for t in range(N) for s in range(N)]), p
        assert metrics["empty_rows"] == sum(not any(stack.sees(t, s) for s in range(N)) for t in range(N)), p
        passes = np.array([stack(stack.x[: t + 1])[-1] for t in range(N)])
        assert metrics["passes_difference"] == pytest.approx(np.abs(passes - out).max(), rel=1e-9, abs=1e-12), p
        if p.get("applied") != "after_renormalized":  # there what cancels leaves rounding, here and there another
            reached = gradient > noise
            ahead = [s - t for t in range(N) for s in range(N) if reached[t, s]]
            assert metrics["reach_ahead"] == max(0, *ahead), p
            assert metrics["reach_back"] == -min(ahead), p
            assert metrics["n_future_pairs"] == (reached & later).sum(), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("softmax(logits * keep)", "softmax(logits) * keep"),  # times 0 on the other side of the softmax
        (
            "change = (stack(overwritten) - out).abs().amax(dim=-1).T",
            "change = (stack(overwritten) - out).abs().amax(-1)",
        ),
        ("x = x + context(weights, h @ W_v) @ W_o", "x = context(weights, h @ W_v) @ W_o"),  # no residual
        ('"last_layer": (params.n_layers - 1,)', '"last_layer": (0,)'),
        ("max(1, scores.shape[-1] // 2)", "scores.shape[-1]"),  # everybody is chosen
        ("(out[each, each] @ g)", "(out[each, each].abs() @ g)"),
        ("overwritten[each, each] = other", "overwritten[each, each] = 2 * x"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("seed", range(5))
def test_a_causal_stack_has_exact_zeros_above_the_diagonal(seed):
    metrics = run(get(NAME), seed=seed, n_layers=3).metrics  # float32: nothing is tolerated
    assert metrics["future_gradient_max"] == metrics["future_change_max"] == metrics["n_future_pairs"] == 0
    assert metrics["seen_gradient_min"] > 0
    assert (metrics["reach_ahead"], metrics["reach_back"]) == (0, 11)


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_depth_multiplies_what_one_layer_reaches(n_layers):
    for mask, window, ahead, back in (("one_ahead", 4, n_layers, 11), ("window", 3, 0, 2 * n_layers)):
        metrics = run(get(NAME), n_layers=n_layers, mask=mask, window=window).metrics
        assert (metrics["reach_ahead"], metrics["reach_back"]) == (ahead, back)


def test_one_leaking_layer_is_enough():
    for where in ("first_layer", "last_layer"):
        metrics = run(get(NAME), n_layers=4, mask="no_mask", in_layers=where).metrics
        assert metrics["n_future_pairs"] == 12 * 11 / 2, where
        metrics = run(get(NAME), n_layers=4, mask="one_ahead", in_layers=where).metrics
        assert metrics["reach_ahead"] == 1, where


def test_renormalized_rows_are_those_of_minus_inf_up_to_rounding():
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-14)):
        metrics = run(get(NAME), applied="after_renormalized", dtype=dtype).metrics
        assert 0 < metrics["future_gradient_max"] < tolerance
        assert metrics["row_sum_min"] == pytest.approx(1, abs=tolerance)


def test_a_nan_gets_through_a_weight_of_zero():
    assert run(get(NAME)).metrics["nan_rows"] == 11


def test_refuses_maps_that_nobody_waits_for():
    with pytest.raises(ParamsError, match="too_large_a_leak_map"):
        get(NAME).Params(seq_len=48, n_layers=6, d_model=64)
