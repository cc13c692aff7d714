"""qk_norm_training against models trained one at a time by PyTorch's own Adam, in float64."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from engine.base import ParamsError, make_run
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, assert_stops_at_once, run

NAME = "qk_norm_training"
D = 32
FORMS = ("inv_sqrt_d_k", "qk_norm", "qk_norm_fixed", "cosine_learned", "softcap", "qk_clip")
SETTINGS = [
    {"d_k": 4, "kv_len": 4, "steps": 16, "n_seeds": 2, "n_rates": 2, "learning_rate": 0.02, "logit_threshold": 1.5},
    {"d_k": 8, "kv_len": 3, "steps": 16, "n_seeds": 1, "n_rates": 1, "learning_rate": 0.02, "logit_threshold": 3.0},
]
# float64 on both sides, summed in another order, and 16 steps of Adam, which divides by gradients that may be small:
# measured below 1e-6; rates above 0.05 are no test, since there rounding grows from step to step
ROUNDING = 1e-5


def generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))


def sequences(g: torch.Generator, n: int, *shape: int):
    cues = torch.rand(*shape, 2 * n, generator=g).argsort(dim=-1)[..., :n]
    answers = torch.randint(8, (*shape, n), generator=g)
    slot = torch.randint(n, (*shape, 1), generator=g)
    return cues, answers, slot[..., 0]


class Model:
    def __init__(self, seed: int, form: str, p: dict) -> None:
        g = generator(seed, 0)
        n, d_k = p["kv_len"], p["d_k"]
        self.form, self.d_k, self.limit = form, d_k, p["logit_threshold"]

        def drawn(*shape: int, over: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=g) / over).double().requires_grad_()

        root = math.sqrt(D)
        self.cue, self.answer, self.asking = drawn(2 * n, D), drawn(8, D), drawn(D)
        self.W_v, self.W_o, self.W_u = drawn(D, D, over=root), drawn(D, D, over=root), drawn(8, D, over=root)
        self.W_q, self.W_k = drawn(d_k, D, over=root), drawn(d_k, D, over=root)
        self.gain_q, self.gain_k = (torch.ones(d_k, dtype=torch.float64).requires_grad_() for _ in range(2))
        self.a = torch.tensor(math.log(math.sqrt(d_k)), dtype=torch.float64).requires_grad_()

    def parameters(self):
        return [x for x in vars(self).values() if isinstance(x, torch.Tensor)]

    def __call__(self, cues, answers, slot):
        """Loss, signed logits, raw product, weights. Shapes: logits, weights (batch, kv_len)."""
        batch = torch.arange(len(cues))
        x = layer_norm(self.cue[cues] + self.answer[answers], (D,))
        r = self.cue[cues[batch, slot]] + self.asking
        q, k, v = layer_norm(r, (D,)) @ self.W_q.T, x @ self.W_k.T, x @ self.W_v.T
        if self.form in ("qk_norm", "qk_norm_fixed"):
            q, k = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() for y in (q, k))
        if self.form == "qk_norm":
            q, k = self.gain_q * q, self.gain_k * k
        logits = torch.einsum("bd,bnd->bn", q, k) / math.sqrt(self.d_k)
        if self.form == "cosine_learned":
            logits = torch.cosine_similarity(q[:, None], k, dim=-1) * self.a.exp()
        if self.form == "softcap":
            logits = self.limit * torch.tanh(logits / self.limit)
        weights = logits.softmax(-1)
        out = layer_norm(r + torch.einsum("bn,bnd->bd", weights, v) @ self.W_o.T, (D,))
        return cross_entropy(out @ self.W_u.T, answers[batch, slot]), logits, weights

    def largest_product(self, n: int) -> float:
        pairs = layer_norm(self.cue[:, None] + self.answer, (D,)).flatten(0, 1)
        q = layer_norm(self.cue + self.asking, (D,)) @ self.W_q.T
        return float((q @ (pairs @ self.W_k.T).T).abs().max()) / math.sqrt(self.d_k)


@functools.cache
def reference(seed: int, form: str, rate: float, items: tuple) -> np.ndarray:
    """Loss, largest |logit|, entropy share, weight on the match, largest product. Shapes: (steps + 1, 5)."""
    p = dict(items)
    n = p["kv_len"]
    model = Model(seed, form, p)
    adam = torch.optim.AdamW(model.parameters(), rate, weight_decay=0)
    evaluation = sequences(generator(seed, 2), n, 128)
    g, curve = generator(seed, 1), []
    for step in range(p["steps"] + 1):
        with torch.no_grad():
            loss, logits, weights = model(*evaluation)
            entropy = -(weights * weights.log()).sum(-1).mean() / math.log(n)
            match = weights[torch.arange(128), evaluation[2]].mean()
            curve.append([float(x) for x in (loss, logits.abs().max(), entropy, match)] + [model.largest_product(n)])
        if step % 10 == 0:
            block = sequences(g, n, 10, 32)
        adam.zero_grad()
        loss, logits, _ = model(*(part[step % 10] for part in block))
        loss.backward()
        adam.step()
        if form == "qk_clip" and logits.max() > p["logit_threshold"]:
            with torch.no_grad():
                for W in (model.W_q, model.W_k):
                    W *= math.sqrt(p["logit_threshold"] / float(logits.detach().max()))
    return np.array(curve)


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = run(experiment, seed=3, dtype="float64", **p)
        curves, by_rate = result.tables["curves"], result.tables["by_rate"]
        due = sorted({round(i * p["steps"] / 16) for i in range(17)})
        for form in FORMS:
            close = {"rtol": ROUNDING, "atol": ROUNDING, "err_msg": f"{p} {form}"}
            for level in range(p["n_rates"]):
                rate = p["learning_rate"] / 4**level
                runs = [reference(3 + i, form, rate, tuple(p.items())) for i in range(p["n_seeds"])]
                at = np.stack(runs)[:, due]  # (seed, record, 5)
                end = at[:, -4:, 0].mean(axis=1)
                row = (by_rate["form"] == form) & np.isclose(by_rate["learning_rate"], rate)
                assert row.sum() == 1
                for column, wanted in (
                    ("loss_nats", end.mean()),
                    ("loss_low", end.min()),
                    ("loss_high", end.max()),
                    ("logits_abs_max", at[:, :, 1].max()),
                ):
                    np.testing.assert_allclose(by_rate[column][row][0], wanted, **close)
                if level:
                    continue
                rows = curves["form"] == form
                np.testing.assert_array_equal(curves["step"][rows], due)
                for column, wanted in (
                    ("loss_nats", at[:, :, 0].mean(axis=0)),
                    ("loss_low", at[:, :, 0].min(axis=0)),
                    ("loss_high", at[:, :, 0].max(axis=0)),
                    ("logits_abs_max", at[:, :, 1].max(axis=0)),
                    ("entropy_share", at[:, :, 2].mean(axis=0)),
                ):
                    np.testing.assert_allclose(curves[column][rows], wanted, **close)
                metrics = {
                    "loss_nats": end.mean(),
                    "loss_worst_nats": end.max(),
                    "loss_best_nats": end.min(),
                    "logits_peak": at[:, :, 1].max(),
                    "logits_peak_lowest": at[:, :, 1].max(axis=1).min(),
                    "entropy_share": at[:, -1, 2].mean(),
                    "match_weight": at[:, -1, 3].mean(),
                    "product_abs_max": at[:, -1, 4].max(),
                }
                for name, wanted in metrics.items():
                    np.testing.assert_allclose(result.metrics[f"{name}_{form}"], wanted, **close)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('if form in ("qk_norm", "qk_norm_fixed"):', 'if form in ("qk_norm",):'),  # the fixed one is not normalized
        (
            'q_form * weights["gain_q"][of_form], k_form *',
            'q_form * weights["gain_q"][of_form] ** 0, k_form *',
        ),  # one gain only
        ("q_form, k_form = unit_norm(q_form), unit_norm(k_form)", "k_form = unit_norm(k_form)"),  # q keeps its length
        ("params.logit_threshold * (of_models / params.logit_threshold).tanh()", "of_models.tanh()"),
        ("(params.logit_threshold / largest).clamp(max=1).sqrt()", "(params.logit_threshold / largest).clamp(max=1)"),
        ("_clip(params, weights, passed.logits)", "pass"),
        ("rates, device=like.device", "rates[::-1], device=like.device"),  # rates in the other order
        ("sequences.cues == sequences.query[..., None]", "sequences.cues != sequences.query[..., None]"),
        ("for record in all_records[-LAST_RECORDS:]]", "for record in all_records[-1:]]"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_forms_that_begin_alike_begin_alike():
    """Gains of 1 and a scale of √d_k are the same function; the others agree as far as no cap is in reach."""
    curves = run(get(NAME), seed=1, dtype="float64", steps=20, n_rates=1, logit_threshold=100.0).tables["curves"]
    first = {form: curves["loss_nats"][(curves["form"] == form) & (curves["step"] == 0)][0] for form in FORMS}
    assert first["qk_norm"] == first["qk_norm_fixed"]
    # the norm has an epsilon of 1e-5 beside a mean square of about 1, the cosine has none
    assert first["qk_norm"] == pytest.approx(first["cosine_learned"], rel=1e-4)
    assert first["inv_sqrt_d_k"] == first["qk_clip"]
    assert first["softcap"] == pytest.approx(first["inv_sqrt_d_k"], rel=1e-2)  # tanh(x) = x - x³/3, x below 0.05


def test_a_fixed_gain_never_exceeds_the_root_and_a_cap_never_the_cap():
    m = run(get(NAME), seed=1, steps=40, n_rates=1, d_k=4, learning_rate=0.1, logit_threshold=3.0).metrics
    assert m["logits_peak_qk_norm_fixed"] <= 2 * (1 + 1e-6)  # √4; rounding of float32
    assert m["logits_peak_softcap"] <= 3
    assert m["logits_peak_qk_norm"] > 2  # the gains have moved the bound


def test_sizes_that_nobody_waits_for_are_refused():
    with pytest.raises(ParamsError, match="too_many_slots_trained"):
        get(NAME).Params(kv_len=32, n_seeds=8, n_rates=4)


def test_a_stop_takes_effect_at_once_and_partial_results_are_drawn():
    seen, experiment = [], get(NAME)
    params = experiment.Params(steps=40, kv_len=4, n_rates=1, n_seeds=1)
    experiment.run(params, make_run(0, on_progress=lambda fraction, partial: seen.append(partial)))
    assert {p.done for p in seen if p is not None} >= {0.0, 0.5}
    assert_stops_at_once(experiment, params)
