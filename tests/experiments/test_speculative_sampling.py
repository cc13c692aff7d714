"""speculative_sampling against every path of two rounds written out one by one, and engine/speculative.py by itself."""

import itertools
import math

import numpy as np
import pytest
import torch

from engine import speculative
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "speculative_sampling"
EXACT = ("residual", "point_mass", "match_sample")
BIASED = ("resample_target", "argmax_agrees", "greedy_draft")
STD = 1.5


def laws(p: dict, draws: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Target and draft from the logits that were drawn."""
    target, other = (STD * x for x in draws[:2])
    rho = p["draft_agreement"]
    out = []
    for logits in (target, rho * target + math.sqrt(1 - rho**2) * other):
        weights = np.exp(logits / p["temperature"])
        out.append(weights / weights.sum(axis=-1, keepdims=True))
    return out[0], out[1]


def one_place(p: np.ndarray, q: np.ndarray, rule: str) -> list[tuple[float, int, bool]]:
    """All that can happen to one draft: probability, token that comes out, and whether the draft was kept."""
    n = len(p)
    greedy = rule in ("point_mass", "greedy_draft")
    drawn = np.eye(n)[q.argmax()] if greedy else q
    believed = drawn if rule == "point_mass" else q
    outcomes = []
    for x in range(n):
        keep = {
            "match_sample": p[x],
            "argmax_agrees": float(x == p.argmax()),
        }.get(rule, min(1.0, p[x] / believed[x]) if believed[x] else 1.0)
        outcomes.append((drawn[x] * keep, x, True))
        if rule in ("resample_target", "argmax_agrees"):
            after = p
        elif rule == "match_sample":
            after = np.where(np.arange(n) == x, 0, p) / (1 - p[x])
        else:
            rest = np.maximum(p - believed, 0)
            after = rest / rest.sum() if rest.sum() else p
        outcomes += [(drawn[x] * (1 - keep) * after[z], z, False) for z in range(n)]
    return outcomes


def stream(p: np.ndarray, q: np.ndarray, gamma: int, rule: str, length: int, last: int) -> dict[tuple[int, ...], float]:
    """The law of ``length`` tokens after ``last``, place by place; the state is how many drafts the round has left."""
    law: dict[tuple[int, ...], float] = {}

    def go(before: int, left: int, made: tuple[int, ...], chance: float) -> None:
        if not chance:
            return
        if len(made) == length:
            law[made] = law.get(made, 0.0) + chance
            return
        if left == 0:  # the bonus, and a new round
            for z, probability in enumerate(p[before]):
                go(z, gamma, (*made, z), chance * probability)
            return
        for probability, z, kept in one_place(p[before], q[before], rule):
            go(z, left - 1 if kept else gamma, (*made, z), chance * probability)

    go(last, gamma, (), 1.0)
    return law


def law(experiment: Experiment) -> None:
    for rule, gamma, n in [
        *((rule, 2, 3) for rule in speculative.RULES),
        ("residual", 1, 4),
        ("resample_target", 3, 2),
    ]:
        p = {"rule": rule, "gamma": gamma, "n_tokens": n, "n_streams": 2048}
        p |= {"draft_agreement": 0.6, "temperature": 0.8}
        result, draws = recorded(experiment, seed=2, **p)
        target, draft = laws(p, draws)
        out = stream(target, draft, gamma, rule, gamma + 1, 0)
        total = {}
        for made in itertools.product(range(n), repeat=gamma + 1):
            chance = 1.0
            for before, token in itertools.pairwise((0, *made)):
                chance *= target[before, token]
            total[made] = chance
        want = sum(abs(out.get(made, 0.0) - total[made]) for made in total) / 2
        kept = sum(probability for probability, _, kept in one_place(target[0], draft[0], rule) if kept)
        metrics = result.metrics
        # float64 on both sides, sums of some hundred products
        assert metrics["law_tv"] == pytest.approx(want, abs=1e-12), p
        assert metrics["kept_probability"] == pytest.approx(kept, abs=1e-12), p
        assert metrics["overlap_share"] == pytest.approx(np.minimum(target, draft)[0].sum(), abs=1e-12)
        # five standard errors of a share of 2048 draws
        assert abs(metrics["first_kept_share"] - kept) < 5 * math.sqrt(kept * (1 - kept) / 2048) + 1e-9, p
        first = {z: sum(chance for made, chance in out.items() if made[0] == z) for z in range(n)}
        table = result.tables["first_token"]
        mine = table["distribution"] == "speculative"
        np.testing.assert_allclose(table["probability"][mine], [first[z] for z in range(n)], rtol=1e-6)  # float32
        pairs = np.zeros((n, n))
        for made, chance in total.items():
            pairs[made[0], made[-1]] += chance
        fair = np.sqrt(2 / math.pi * pairs * (1 - pairs) / 2048).sum() / 2
        assert metrics["fair_tv"] == pytest.approx(fair, rel=1e-9)
        if rule in EXACT:
            assert want < 1e-12
            assert metrics["chi_square_z"] < 8  # of χ² with few degrees of freedom: once in 10^5 runs
        else:
            assert want > 0.01


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("drawn - keeps, corrected", "drawn, corrected"),  # corrections also where nothing was rejected
        ("else chains[gamma][..., None] * p", "else chains[gamma][..., None] * q"),  # the bonus from the draft
        ("for k in range(min(length, gamma))", "for k in range(min(length, gamma) - 1)"),
        ("rest = laws[length - k - 1]", "rest = laws[length - k - 1] * 0.999"),
        ("rho * target_logits + math.sqrt(1 - rho**2) * other", "rho * target_logits + (1 - rho) * other"),
        ("judge(p[before], q[before[:, :-1]]", "judge(p[before], p[before[:, :-1]]"),  # every draft kept
        ("u[:, gamma:-1], u[:, -1]", "u[:, :gamma], u[:, -1]"),  # judged by the numbers that drew it
        ("_chain(exact_p, params.gamma + 1)\n", "_chain(exact_q, params.gamma + 1)\n"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_exact_rules_keep_the_law_whatever_the_draft(rule, gamma):
    for agreement in (0.0, 0.5, 0.95):
        for seed in range(3):
            settings = {"rule": rule, "gamma": gamma, "draft_agreement": agreement, "n_streams": 256}
            assert run(get(NAME), seed=seed, **settings).metrics["law_tv"] < 1e-12


@pytest.mark.parametrize("rule", BIASED)
def test_biased_rules_do_not(rule):
    assert min(run(get(NAME), seed=seed, rule=rule, n_streams=256).metrics["law_tv"] for seed in range(5)) > 0.05


def test_a_draft_that_is_the_target_is_always_kept():
    metrics = run(get(NAME), draft_agreement=1.0, gamma=4).metrics
    assert metrics["first_kept_share"] == 1
    assert metrics["tokens_per_round"] == 5
    assert metrics["draft_tv"] == 0
    assert metrics["law_tv"] < 1e-12


def test_a_sampled_draft_is_kept_as_often_as_laws_overlap_and_by_matching_less():
    for seed in range(5):
        rules = ("residual", "match_sample")
        kept, matched = (run(get(NAME), seed=seed, rule=rule, n_streams=256).metrics for rule in rules)
        assert kept["kept_probability"] == pytest.approx(kept["overlap_share"], abs=1e-12)
        assert matched["kept_probability"] == pytest.approx(matched["agreement_probability"], abs=1e-12)
        assert matched["kept_probability"] < matched["overlap_share"]


@pytest.mark.parametrize("rule", speculative.RULES)
def test_probabilities_are_probabilities_where_target_and_draft_are_one_hot(rule):
    eye = torch.eye(3, dtype=torch.float64)
    for p, q in itertools.product(eye, eye):
        kept = speculative.kept_probability(p, q, rule)
        assert torch.isfinite(kept).all()
        assert ((kept >= 0) & (kept <= 1)).all()
        after = speculative.correction(p, q, q.argmax(), rule)
        assert torch.isfinite(after).all()
        assert after.sum().item() == pytest.approx(1)
        # at temperature 0 every rule accepts exactly what the target's argmax says
        assert kept[q.argmax()].item() == float(p.argmax() == q.argmax())
        if p.argmax() != q.argmax():
            assert after.argmax() == p.argmax()


def test_choose_is_the_inverse_of_the_cumulative_sum():
    law = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.9999999])
    assert speculative.choose(law.expand(4, 5), u).tolist() == [1, 1, 3, 3]
    one = torch.tensor([0.1] * 10)  # whose float32 sum is not 1
    assert speculative.choose(one, torch.tensor(1 - 2**-24)).item() == 9


def test_judge_takes_the_bonus_from_the_last_distribution():
    p = torch.eye(4)[[0, 1, 2]][None]  # the target wants 0, then 1, then 2
    q = torch.eye(4)[[0, 1]][None]
    u, u_next = torch.full((1, 2), 0.5), torch.tensor([0.5])
    all_kept = speculative.judge(p, q, torch.tensor([[0, 1]]), u, u_next, "residual")
    assert (all_kept.n_kept.item(), all_kept.next_token.item()) == (2, 2)
    q = torch.eye(4)[[0, 3]][None]
    second_rejected = speculative.judge(p, q, torch.tensor([[0, 3]]), u, u_next, "residual")
    assert (second_rejected.n_kept.item(), second_rejected.next_token.item()) == (1, 1)


def test_leading_stops_at_the_first_false():
    kept = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert speculative.leading(kept).tolist() == [2, 0, 4]


def test_expected_tokens_is_the_geometric_sum():
    for alpha in (0.0, 0.3, 0.8):
        assert speculative.expected_tokens(alpha, 4) == pytest.approx((1 - alpha**5) / (1 - alpha))
    assert speculative.expected_tokens(1.0, 4) == 5


def test_temperature_flattens_or_sharpens_both():
    assert run(get(NAME), temperature=4).metrics["mean_overlap"] > 0.8
    assert speculative.with_temperature(torch.tensor([1.0, 3.0, 2.0]), 0).tolist() == [0, 1, 0]
