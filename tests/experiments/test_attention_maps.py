"""attention_maps against the model worked out in numpy, and the identities that its scores obey."""

import numpy as np
import pytest

from engine import inputs
from engine.base import ParamsError, make_run
from engine.registry import Experiment, get
from tests import language_model_reference as reference
from tests.harness import assert_law_catches, recorded, run

NAME = "attention_maps"
SEED = 5
TYPED = "Ben has a map.\nWhere is Ben? 钥匙 In the attic, in the boat, in the tower."
SETTINGS = [
    {"source": "stories", "layer": 1, "head": 2, "n_texts": 2},
    {"source": "repeats", "layer": 2, "head": 3, "n_texts": 3},
    {"source": "text", "text": TYPED, "layer": 0, "head": 1, "ablation": "zero", "n_texts": 1},
]
HEADS = [f"L{layer}H{head}" for layer in range(3) for head in range(4)]


def drawn(p: dict) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """The texts of both kinds, drawn as the experiment does: stories first."""
    own = make_run(SEED)
    found = {}
    for kind in ("stories", "repeats"):
        texts = inputs.draw_texts(own, kind, p["n_texts"], 128)
        found[kind] = list(zip(map(tuple, texts.tokens.tolist()), texts.period.tolist(), strict=True))
    return found


def put_of(texts, head: int, p: dict) -> tuple[float, ...]:
    """What stands in for a head's context: its mean over places and texts, or zero."""
    mean = np.mean([reference.read(tokens).context[head] for tokens, _ in texts], axis=(0, 1))
    return tuple((mean * (p.get("ablation") != "zero")).tolist())


def mean_loss(texts, put: dict[int, tuple[float, ...]] | None = None) -> float:
    """Over every token behind one that was there before, or in stories over all but the first."""
    losses = [reference.read(tokens, 1.0, tuple((put or {}).items())).losses[period:] for tokens, period in texts]
    return float(np.concatenate(losses).mean())


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = recorded(experiment, seed=SEED, **p)[0]
        texts = drawn(p)
        own = texts.get(p["source"]) or [(tuple(inputs.typed_text(make_run(0), TYPED).tokens[0].tolist()), 0)]

        scores = {}
        on_repeats = np.zeros(12)
        for head in range(12):
            rows = [reference.read(tokens).weights[head] for tokens, _ in own]
            scores["previous", head] = np.mean([w[i, i - 1] for w in rows for i in range(1, len(w))])
            scores["self", head] = np.mean([w[i, i] for w in rows for i in range(1, len(w))])
            scores["first", head] = np.mean([w[i, 0] for w in rows for i in range(1, len(w))])
            again = [(reference.read(tokens).weights[head], period) for tokens, period in texts["repeats"]]
            scores["induction", head] = np.mean(
                [sum(w[i, j] for j in range(i - n + 1, 0, -n)) for w, n in again for i in range(n, 128)]
            )
            scores["sink", head] = np.mean([w[i, 0] for w, n in again for i in range(1, n)])
            on_repeats[head] = np.mean([w[i, i - 1] for w, _ in again for i in range(1, 128)])
        table = result.tables["scores"]
        got = {
            (pattern, HEADS.index(head)): weight
            for head, pattern, weight in zip(
                *(table[c].tolist() for c in ("head", "pattern", "attention_weight")), strict=True
            )
        }
        # float64 on both sides; the engine's angles are float32, whose products differ in the last digit
        assert got == pytest.approx(scores, rel=1e-5, abs=1e-9), p

        losses, added = {}, {}
        for kind, some in texts.items():
            whole = mean_loss(some)
            losses[kind] = np.zeros(12)
            for head in range(12):
                losses[kind][head] = mean_loss(some, {head: put_of(some, head, p)})
                added[kind, HEADS[head]] = losses[kind][head] - whole
            assert result.metrics[f"loss_{'repeated' if kind == 'repeats' else kind}_nats"] == pytest.approx(
                whole, rel=1e-6
            )
        table = result.tables["ablation"]
        got = dict(
            zip(
                zip(table["source"].tolist(), table["head"].tolist(), strict=True),
                table["loss_added_nats"].tolist(),
                strict=True,
            )
        )
        assert got == pytest.approx(added, rel=1e-4, abs=1e-6), p

        previous = int(on_repeats.argmax())
        induction = max(range(12), key=lambda head: scores["induction", head])
        inducing = [head for head in range(12) if scores["induction", head] > 0.5]
        want = {"n_induction_heads": len(inducing)} | {
            f"{pattern}_{name}": value
            for pattern, name, value in [
                ("previous_token", "score_max", max(scores["previous", head] for head in range(12))),
                ("induction", "score_max", scores["induction", induction]),
                ("previous_token", "layer", previous // 4),
                ("induction", "layer", induction // 4),
                ("self", "share_max", max(scores["self", head] for head in range(12))),
                ("first_token", "share_max", max(scores["first", head] for head in range(12))),
                ("first_token", "share_mean", np.mean([scores["first", head] for head in range(12)])),
                ("first_token", "share_uniform", np.mean([1 / (i + 1) for i in range(1, len(own[0][0]))])),
            ]
        }
        want["sink_share_max"] = max(scores["sink", head] for head in range(12))
        want["sink_share_uniform"] = np.mean([1 / (i + 1) for _, n in texts["repeats"] for i in range(1, n)])
        for kind, name in (("repeats", "repeated"), ("stories", "stories")):
            want[f"loss_{name}_without_previous_nats"] = losses[kind][previous]
            want[f"loss_{name}_without_induction_nats"] = losses[kind][induction]
            others = [losses[kind][head] for head in range(12) if head not in (previous, induction, *inducing)]
            some = texts[kind]
            together = {head: put_of(some, head, p) for head in inducing}
            want[f"loss_{name}_without_all_induction_nats"] = mean_loss(some, together)
            want[f"loss_{name}_without_other_nats"] = np.mean(others)
        want["n_unknown"] = 2.0 if p["source"] == "text" else 0.0
        assert {name: result.metrics[name] for name in want} == pytest.approx(want, rel=1e-5), p

        cells = result.tables["map"]
        n = min(63, len(own[0][0]))
        weights = reference.read(own[0][0]).weights[4 * p["layer"] + p["head"]]
        places = [
            (int(q.split(" ")[0]), int(k.split(" ")[0]))
            for q, k in zip(cells["query_token"], cells["key_token"], strict=True)
        ]
        assert places == [(i, j) for i in range(n) for j in range(i + 1)]
        np.testing.assert_allclose(cells["attention_weight"], [weights[i, j] for i, j in places], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("diagonal(-1, dim1", "diagonal(-2, dim1"),  # the token before the one before
        ("weights[..., 1:, 0]", "weights[..., 1:, 1]"),
        ("weights.diagonal(dim1=-2, dim2=-1)[..., 1:]", "weights.diagonal(dim1=-2, dim2=-1)"),  # the row of one key too
        ("places[:, None] + 1 - places", "places[:, None] - places"),  # the same token, not what followed it
        ("sum(dim=-1)[:, period:]", "sum(dim=-1)[:, period - 1 :]"),  # a row of the first time
        ("context.mean(dim=(0, 2))", "context[:1].mean(dim=(0, 2))"),  # the mean of one text
        ("means[layer][head] if means", "means[layer][0] if means"),  # another head's mean
        ("cuts = [*([j] for j in range(N_ALL)), inducing]", "cuts = [*([j] for j in range(N_ALL)), inducing[:1]]"),
        ("language_model.N_HEADS == layer", "language_model.N_HEADS == 0"),
        ('means if params.ablation == "mean" else None', "means"),
        ("[texts.known()].mean()", ".mean()"),  # the first time of a string counted
        ("not in (*best.values(), *inducing)", "not in best.values()"),
        ('float(scores["sink"].max())', 'float(scores["first"].max())'),  # rows in which something can be found
        ("w[:, 1:period, 0]", "w[:, 1:, 0]"),  # later times too
        ("first_text[params.layer][params.head]", "first_text[params.head % 3][params.head]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_in_a_text_of_two_tokens_the_first_is_the_one_before():
    scores = run(get(NAME), source="text", text="Ad").tables["scores"]
    by = {
        pattern: scores["attention_weight"][scores["pattern"] == pattern] for pattern in ("previous", "first", "self")
    }
    assert by["previous"] == pytest.approx(by["first"])
    assert by["previous"] + by["self"] == pytest.approx(np.ones(12))


def test_every_query_of_the_map_gives_away_all_of_its_weight():
    for source in ("stories", "repeats", "text"):
        cells = run(get(NAME), source=source, layer=2).tables["map"]
        queries = dict.fromkeys(cells["query_token"].tolist())
        assert len(queries) == 63
        assert len(cells["query_token"]) == 63 * 64 // 2 <= 4000  # what a chart draws
        for query in queries:
            # a sum of up to 63 float32
            assert cells["attention_weight"][cells["query_token"] == query].sum() == pytest.approx(1, abs=1e-5)


def test_signs_of_the_map_can_be_read():
    cells = run(get(NAME), source="text", text="a b\nc").tables["map"]
    assert list(dict.fromkeys(cells["key_token"].tolist())) == ["0 a", "1 ␣", "2 b", "3 ↵", "4 c"]


def test_one_character_is_no_text_to_predict():
    with pytest.raises(ParamsError, match="text_needs_two"):
        get(NAME).Params(source="text", text="A")
