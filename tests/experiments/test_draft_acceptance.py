"""draft_acceptance against plain passes of the model over every text, and its draft and its cache by themselves."""

import numpy as np
import pytest
import torch

from engine import corpus, inputs, language_model, speculative
from engine.base import make_run
from engine.experiments import draft_acceptance
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "draft_acceptance"
SETTINGS = [
    {},
    {"draft": "lookup", "ngram_order": 2, "source": "repeats"},
    {"ngram_order": 1, "gamma": 2, "temperature": 0.5, "source": "mixed"},
    {"ngram_order": 0, "gamma": 3},
    {"draft": "lookup", "ngram_order": 1},
    {"temperature": 0.0, "ngram_order": 3},
]


def counts(text: list[int], order: int) -> dict[tuple[int, ...], dict[int, int]]:
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for n in range(order + 1):
        for end in range(n, len(text)):
            row = found.setdefault(tuple(text[end - n : end]), {})
            row[text[end]] = row.get(text[end], 0) + 1
    return found


def draft_law(p: dict, known: dict, text: list[int]) -> torch.Tensor:
    """What the draft believes to come after a text."""
    n = p["ngram_order"]
    if p["draft"] == "lookup":
        ending = text[len(text) - n :]
        at = [end for end in range(n, len(text)) if text[end - n : end] == ending]
        return torch.eye(corpus.N_TOKENS, dtype=torch.float64)[text[at[-1]] if at else corpus.encode(" ")[0]]
    row = np.full(corpus.N_TOKENS, 1 / corpus.N_TOKENS)
    for m in range(n + 1):
        seen = np.zeros(corpus.N_TOKENS)
        for token, count in known.get(tuple(text[len(text) - m :]), {}).items():
            seen[token] = count
        row = (seen + row) / (seen.sum() + 1)
    return speculative.with_temperature(torch.tensor(row).log(), p["temperature"])


def law(experiment: Experiment) -> None:
    weights = language_model.load_weights(dtype=torch.float64)
    stories = corpus.encode(next(corpus.stories(1, 20_000)))
    for given in SETTINGS:
        p = {"source": "stories", "draft": "ngram", "ngram_order": 4, "gamma": 4, "temperature": 1.0}
        p |= {"n_texts": 4, "n_rounds": 3} | given
        result, draws = recorded(experiment, seed=9, **p)
        plain = make_run(9, dtype="float64")
        kinds = [p["source"]] if p["source"] != "mixed" else ["stories", "repeats"]
        prompts = [inputs.draw_texts(plain, kind, p["n_texts"] // len(kinds), 32).tokens.tolist() for kind in kinds]
        texts = [text for some in prompts for text in some]
        known = counts(stories, p["ngram_order"])
        gamma, kept, overlaps = p["gamma"], [], []
        for u in draws:
            for text, numbers in zip(texts, torch.tensor(u), strict=True):
                begun = list(text)
                believed = []
                for i in range(gamma + 1):
                    believed.append(draft_law(p, known, begun))
                    if i < gamma:
                        begun.append(int(torch.searchsorted(believed[-1].cumsum(0), numbers[i], right=True)))
                logits = language_model.forward_fast(weights, torch.tensor([begun]))[0, len(text) - 1 :]
                wanted = speculative.with_temperature(logits, p["temperature"])
                n_kept = 0
                for i in range(gamma):
                    x = begun[len(text) + i]
                    if numbers[gamma + i] >= wanted[i, x] / believed[i][x]:
                        break
                    n_kept += 1
                rest = wanted[n_kept] if n_kept == gamma else (wanted[n_kept] - believed[n_kept]).clamp(min=0)
                following = int(torch.searchsorted(rest.cumsum(0), numbers[-1] * rest.sum(), right=True))
                overlaps += [float(torch.minimum(wanted[i], believed[i]).sum()) for i in range(n_kept + 1)]
                kept.append(n_kept)
                text[:] = [*begun[: len(text) + n_kept], following]
        kept_array, shared = np.array(kept), np.array(overlaps)
        mean = shared.mean()
        want = {
            "tokens_per_round": kept_array.mean() + 1,
            "mean_overlap": mean,
            "formula_tokens_per_round": sum(mean**i for i in range(gamma + 1)),
            "kept_of_drafted_share": kept_array.mean() / gamma,
            "kept_of_judged_share": kept_array.sum() / np.minimum(kept_array + 1, gamma).sum(),
            "first_kept_share": (kept_array > 0).mean(),
            "sure_places_share": (shared > 0.9).mean(),
            "hard_places_share": (shared < 0.1).mean(),
            "n_tokens_made": len(kept) + sum(kept),
        }
        # float64, a few layers; the draft's counts pass through float32
        assert {name: result.metrics[name] for name in want} == pytest.approx(want, rel=1e-5, abs=1e-6), p
        assert result.metrics["rollback_error"] < 1e-10, p  # sums in another order, in float64
        reached = [(kept_array >= i).mean() for i in range(1, gamma + 1)]
        np.testing.assert_allclose(result.tables["by_depth"]["reached_share"], reached, atol=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("target.length = length - 1", "target.length = length"),  # the newest token is never read
        ("places[:, None, :, None]", "places[:, None, :, None] + 1"),  # one key of the future
        ("unflatten(0, (n_texts, 1, n_new))", "unflatten(0, (n_texts, 1, n_new)) * 0"),
        ("u[:, gamma:-1], u[:, -1]", "u[:, :gamma], u[:, -1]"),
        ("made[every, judged.n_kept] = judged.next_token", "made[every, judged.n_kept] = 0"),
        ("target.read(prompts[:, :-1])", "target.read(prompts)"),
        ("overlap(p, q)[valid]", "overlap(p, q)"),  # places behind a rejection as well
        ("row[token] += count", "row[token] += 1"),
        ("range(len(text) - 1, order - 1, -1)", "range(order, len(text))"),  # the first time, not the last
        ("np.minimum(kept + 1, gamma)", "kept + 1"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_cache_read_in_pieces_and_set_back_gives_what_a_plain_pass_gives():
    weights = language_model.load_weights(dtype=torch.float64)
    tokens = inputs.draw_texts(make_run(0), "stories", 3, 40).tokens
    plain = language_model.forward(weights, tokens)
    cached = draft_acceptance._Cached(weights, 3, 64)
    cached.read(tokens[:, :20])
    cached.read(torch.full((3, 7), 5))  # drafts that are rejected, another number in every text
    cached.length = torch.tensor([20, 18, 12])
    for text, start in enumerate((20, 18, 12)):
        rest = tokens[:, start : start + 10]
        one = draft_acceptance._Cached(weights, 3, 64)
        one.k, one.v, one.length = cached.k.clone(), cached.v.clone(), cached.length.clone()
        read = one.read(rest)
        # float64, sums of a few hundred terms in another order
        torch.testing.assert_close(read[text], plain[text, start : start + 10], rtol=1e-9, atol=1e-9)


def test_what_stays_in_the_cache_spoils_what_follows():
    settings = {"ngram_order": 1, "n_rounds": 8}
    assert run(get(NAME), **settings).metrics["rollback_error"] < 1e-4
    assert run(get(NAME), rollback=False, **settings).metrics["rollback_error"] > 0.1


def test_the_draft_is_a_distribution_that_forgets_nothing():
    model = draft_acceptance._ngram(3)
    for before in (corpus.encode("Ada"), corpus.encode("~~~"), corpus.encode("is ")):
        law = model.law(tuple(before))
        assert law.sum() == pytest.approx(1)
        assert law.min() > 0
    assert model.law(tuple(corpus.encode("is "))).argmax() == corpus.encode("i")[0]  # is in the ...


def test_greedy_texts_are_those_of_plain_greedy_decoding():
    """At temperature 0 speculative decoding must give the very tokens that the target alone would."""
    run_ = make_run(1, dtype="float64")
    weights = language_model.load_weights(dtype=torch.float64)
    prompt = inputs.draw_texts(run_, "stories", 1, 32).tokens
    text = prompt.clone()
    for _ in range(20):
        following = language_model.forward_fast(weights, text)[:, -1].argmax(dim=-1, keepdim=True)
        text = torch.cat((text, following), dim=1)
    made = prompt.clone()
    cached = draft_acceptance._Cached(weights, 1, 128)
    cached.read(made[:, :-1])
    params = get(NAME).Params(temperature=0.0, ngram_order=2)
    while made.shape[1] < 52:
        length = torch.tensor([made.shape[1]])
        drafted, q = draft_acceptance._draft(params, run_, made, length, torch.zeros(1, 4, dtype=torch.float64))
        p = speculative.with_temperature(cached.read(torch.cat((made[:, -1:], drafted), dim=1)), 0.0)
        half = torch.full((1, 4), 0.5, dtype=torch.float64)
        judged = speculative.judge(p, q[:, :4], drafted, half, half[:, 0], "residual")
        made = torch.cat((made, drafted[:, : int(judged.n_kept)], judged.next_token[:, None]), dim=1)
        cached.length = torch.tensor([made.shape[1] - 1])
    assert made[0, :52].tolist() == text[0].tolist()
