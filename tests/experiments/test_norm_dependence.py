"""norm_dependence against norms written with loops over sets of numbers, in numpy, float64."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "norm_dependence"
BATCH, SEQ_LEN, D = 2, 3, 4
# The numbers that share one mean and variance with x[b, t, j].
SHARED = {
    "layer_norm": lambda b, t, j: np.s_[b, t, :],
    "rms_norm": lambda b, t, j: np.s_[b, t, :],
    "whole_text_norm": lambda b, t, j: np.s_[b, :, :],
    "instance_norm": lambda b, t, j: np.s_[b, :, j],
    "batch_norm": lambda b, t, j: np.s_[:, :, j],
    "position_batch_norm": lambda b, t, j: np.s_[:, t, j],
}
SETTINGS = [
    *({"normalization": name} for name in SHARED),
    *({"normalization": name, "padding_added": 2} for name in SHARED),
    {"padding_added": 2, "mask_padding": True},
    {"normalization": "instance_norm", "padding_added": 2, "mask_padding": True},
    {"mates_scale": 4.0},
    {"norm_mode": "evaluation_mode"},
    {"norm_mode": "evaluation_mode", "padding_added": 2},
    {"norm_mode": "evaluation_mode", "padding_added": 2, "mask_padding": True},
    {"norm_mode": "evaluation_mode", "normalization": "position_batch_norm"},
]


class Norm:
    """A norm from its set of numbers; padded tokens may be marked as nothing, and running statistics be given."""

    def __init__(self, p: dict, draws: list[np.ndarray]) -> None:
        self.p, self.kind = p, p.get("normalization", "batch_norm")
        self.n_padding = p.get("padding_added", 0)
        self.x, self.other, self.pad_vector, self.g = draws[:4]
        self.running = None
        if p.get("norm_mode") == "evaluation_mode":
            for number, earlier in enumerate(draws[4:54]):
                found = [self.moments(self.pad(earlier), 0, t, j, ddof=1) for t in self.places for j in range(D)]
                found = np.array(found).reshape(-1, D, 2)
                self.running = found if number == 0 else 0.9 * self.running + 0.1 * found

    @property
    def places(self):
        return range(SEQ_LEN + self.n_padding)

    def pad(self, x):
        return np.concatenate([x, np.tile(self.pad_vector, (len(x), self.n_padding, 1))], axis=1)

    def moments(self, x, b, t, j, ddof=0):
        x = x.copy()
        if self.p.get("mask_padding"):
            x[:, SEQ_LEN:] = np.nan
        numbers = x[SHARED[self.kind](b, t, j)]
        numbers = numbers[~np.isnan(numbers)]
        if self.kind == "rms_norm":
            return 0.0, np.mean(numbers**2)
        return numbers.mean(), numbers.var(ddof=ddof)

    def __call__(self, x):
        out = np.empty_like(x)
        for b, t, j in np.ndindex(*x.shape):
            mean, variance = self.moments(x, b, t, j) if self.running is None else self.running[t, j]
            out[b, t, j] = (x[b, t, j] - mean) / np.sqrt(variance + 1e-5)
        return out


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=3, batch=BATCH, seq_len=SEQ_LEN, d_model=D, **p)
        norm = Norm(p, draws)
        padded = norm.pad(norm.x)
        plain = norm(padded)
        new = np.concatenate([norm.other, np.tile(norm.pad_vector[::-1], (BATCH, norm.n_padding, 1))], axis=1)
        tokens = [(b, t) for b in range(BATCH) for t in norm.places]
        change = np.empty((BATCH * SEQ_LEN, len(tokens)))
        for column, (b, t) in enumerate(tokens):
            overwritten = padded.copy()
            overwritten[b, t] = new[b, t]
            change[:, column] = np.abs(norm(overwritten) - plain)[:, :SEQ_LEN].max(axis=-1).ravel()
        outputs = [(b, t) for b in range(BATCH) for t in range(SEQ_LEN)]
        other_text = [[t < SEQ_LEN and b != c for b, t in tokens] for c, _ in outputs]
        later = [[u < t < SEQ_LEN and b == c for b, t in tokens] for c, u in outputs]
        mates = np.concatenate([norm.x[:1], p.get("mates_scale", 1) * norm.other[1:]])
        moved = (norm(norm.pad(mates)) - plain)[0, :SEQ_LEN]
        by_padding = (norm(padded)[:, :SEQ_LEN] - norm(norm.x)) if norm.n_padding else np.zeros(1)

        measured = result.metrics
        near = {"rel": 1e-9, "abs": 1e-12}  # float64, some hundred operations on numbers near 1
        assert measured["other_text_change_max"] == pytest.approx((change * other_text).max(), **near), p
        assert measured["future_change_max"] == pytest.approx((change * later).max(), **near), p
        assert measured["mates_change_rms"] == pytest.approx(np.sqrt((moved**2).mean()), **near), p
        assert measured["padding_change_rms"] == pytest.approx(np.sqrt((by_padding**2).mean()), **near), p
        assert measured["norm_output_rms"] == pytest.approx(np.sqrt((plain[:, :SEQ_LEN] ** 2).mean()), **near), p
        assert measured["tokens_depended_on"] == (change > 1e-12).sum(axis=1).mean(), p
        drawn = 10.0 ** result.tables["tokens"]["change_log10"].reshape(change.shape)
        assert np.where(drawn > 1e-8, drawn, 0) == pytest.approx(change, rel=1e-5), p  # kept as float32

        slope = 0.0
        for i, k in np.argwhere(later):
            (c, u), (b, t) = outputs[i], tokens[k]
            slopes = []
            for j in range(D):
                up, down = padded.copy(), padded.copy()
                up[b, t, j] += 1e-5
                down[b, t, j] -= 1e-5
                slopes.append((norm(up)[c, u] - norm(down)[c, u]) @ norm.g / 2e-5)
            slope = max(slope, np.linalg.norm(slopes))
        # central differences: step squared times the third derivative, and rounding of 1e-16 over the step
        assert measured["future_gradient_max"] == pytest.approx(slope, rel=1e-6, abs=1e-8), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.keep(earlier), unbiased=True", "self.keep(earlier)"),  # the biased variance remembered
        ("if not self.params.mask_padding:", "if True:"),  # padding always counted
        ("later = same_text &", "later ="),  # later tokens of other texts, too
        ("params.mates_scale * other[1:]", "other[1:]"),
        ("found, MOMENTUM)", "found, 1 - MOMENTUM)"),  # the weight of the old value, as elsewhere
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_number_of_tokens_follows_from_the_axes():
    wanted = {
        "layer_norm": 1,
        "rms_norm": 1,
        "position_batch_norm": 4,
        "instance_norm": 6,
        "whole_text_norm": 6,
        "batch_norm": 24,
    }
    for name, tokens in wanted.items():
        metrics = run(get(NAME), normalization=name).metrics
        assert metrics["tokens_depended_on"] == tokens
        assert (metrics["other_text_change_max"] > 0) == name.endswith("batch_norm")
        assert (metrics["future_change_max"] > 0) == (metrics["future_gradient_max"] > 0)
        assert (metrics["future_change_max"] > 0) == (name in ("batch_norm", "instance_norm", "whole_text_norm"))
    statistics = [run(get(NAME), normalization=name).metrics["n_norm_statistics"] for name in wanted]
    assert statistics == [24, 24, 6 * 32, 4 * 32, 4, 32]


def test_too_many_tokens_are_refused_with_their_number():
    with pytest.raises(ParamsError) as refused:
        get(NAME).Params(batch=8, seq_len=8)
    assert refused.value.problems[0].values == {"tokens": 64, "limit": 60}


def test_curves_are_exactly_zero_for_norms_within_a_text():
    table = run(get(NAME)).tables["by_batch"]
    for name in ("layer_norm", "whole_text_norm"):
        assert not table["mates_change_rms"][table["normalization"] == name].any()
    falling = table["mates_change_rms"][table["normalization"] == "batch_norm"]
    assert np.all(np.diff(falling) < 0)
