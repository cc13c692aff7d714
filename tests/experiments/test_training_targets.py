"""training_targets against examples written out token by token, and T5's own lengths."""

import itertools

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "training_targets"
OBJECTIVES = get(NAME).Params.specs()["objective"].values
SETTINGS = [
    {"objective": objective, "raw_tokens": 24, "corrupted_share": share, "prefix_share": 0.25, "mean_span": 2}
    for objective in OBJECTIVES
    for share in (0.25, 0.5)
]


def order_of(draw: np.ndarray) -> list[int]:
    return sorted(range(len(draw)), key=lambda i: draw[i])


def lengths(total: int, parts: int, draw: np.ndarray) -> list[int]:
    cuts = sorted([i for i in order_of(draw) if i < total - 1][: parts - 1])
    edges = [0, *(cut + 1 for cut in cuts), total]
    return [b - a for a, b in itertools.pairwise(edges)]


def example(p: dict, draws: list[np.ndarray]) -> list[tuple[object, object, set[int]]]:
    """For each computed position what stands there, what is to be predicted, and which tokens of the text it sees."""
    n, objective = p["raw_tokens"], p["objective"]
    prefix = round(n * p["prefix_share"])
    n_noise = round(n * p["corrupted_share"])
    if objective == "next_token_lm":
        return [(t - 1 if t else "start", t, set(range(t))) for t in range(n)]
    if objective == "prefix_lm":
        return [(t - 1 if t else "start", t if t >= prefix else None, set(range(max(t, prefix)))) for t in range(n)]
    if objective == "masked_lm":
        hidden = set(order_of(draws[0])[:n_noise])
        shown = set(range(n)) - hidden
        return [("mask" if t in hidden else t, t if t in hidden else None, shown) for t in range(n)]
    n_spans = round(n_noise / p["mean_span"])
    text, inputs, targets = iter(range(n)), [], []
    for kept, noise in zip(lengths(n - n_noise, n_spans, draws[1]), lengths(n_noise, n_spans, draws[2]), strict=True):
        inputs += [next(text) for _ in range(kept)] + ["sentinel"]
        targets += ["sentinel"] + [next(text) for _ in range(noise)]
    inputs.append("end")
    targets.append("end")
    shown = {x for x in inputs if isinstance(x, int)}
    rows: list[tuple[object, object, set[int]]] = [(x, None, shown) for x in inputs]
    for i, target in enumerate(targets):
        before = {x for x in targets[:i] if isinstance(x, int)}
        rows.append((targets[i - 1] if i else "start", target, shown | before))
    return rows


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=2, **p)
        rows, n = example(p, draws), p["raw_tokens"]
        wanted = [(target, seen) for _, target, seen in rows if target is not None]
        text = [(target, len(seen) / n) for target, seen in wanted if isinstance(target, int)]
        metrics = result.metrics
        assert metrics["computed_positions"] == len(rows), p
        assert metrics["predicted_positions"] == len(wanted), p
        assert metrics["target_share"] == pytest.approx(len(wanted) / len(rows)), p
        assert metrics["text_targets"] == len(text), p
        assert metrics["seen_share"] == pytest.approx(np.mean([share for _, share in text])), p
        assert metrics["loss_reached_share"] == 1, p
        table = result.tables["seen"]
        drawn = table["objective"] == p["objective"]
        assert table["text_place"][drawn].tolist() == [place for place, _ in text], p
        assert table["text_seen_share"][drawn] == pytest.approx([share for _, share in text]), p
        bare = recorded(experiment, seed=2, **p, n_layers=0)[0].metrics  # then nothing is read by others
        assert bare["loss_reached_share"] == pytest.approx(metrics["target_share"]), p
        assert bare["untargeted_gradient_share"] == 0, p
        assert (metrics["untargeted_gradient_share"] > 0) == (p["objective"] != "next_token_lm"), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("wanted[:prefix] = NONE", "wanted[: prefix // 2] = NONE"),
        (
            "return _Example(np.array([START, *range(n - 1)]), wanted, prefix + 1)",
            "return _Example(np.arange(n), wanted, 1)",
        ),
        ("held[hidden], wanted[hidden] = MASK, hidden", "wanted[hidden] = hidden"),
        ("held = np.array([*inputs, START, *targets[:-1]])", "held = np.array([*inputs, *targets])"),
        ("    targets.append(END)\n", ""),
        (
            "targets += [SENTINEL, *range(at + kept, at + kept + noise)]",
            "targets += range(at + kept, at + kept + noise)",
        ),
        ("places = np.sort(cut[cut < total - 1][: parts - 1]) + 1", "places = np.arange(1, parts)"),
        ("prefix_len=example.both_ways", "prefix_len=1"),
        ("squares[~targets]", "squares[targets]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("seed", range(5))
def test_the_lengths_are_those_of_t5(seed):
    # random_spans_helper(inputs_length=512, noise_density=0.15, mean_noise_span_length=3) gives 568 and 114
    metrics = run(get(NAME), seed=seed, objective="span_corruption", raw_tokens=568).metrics
    assert metrics["both_ways_positions"] == 512
    assert metrics["predicted_positions"] == 114
    assert metrics["text_targets"] == 85


def test_every_token_is_a_target_once():
    result = run(get(NAME), raw_tokens=64)
    table = result.tables["seen"]
    assert table["text_place"][table["objective"] == "next_token_lm"].tolist() == list(range(64))
    assert result.metrics["seen_share"] == pytest.approx(63 / 128)


def test_refuses_what_takes_too_long():
    with pytest.raises(ParamsError, match="too_many_layer_pairs"):
        get(NAME).Params(raw_tokens=1024, n_layers=4)
