"""The language model: its eager pass against PyTorch's fused attention, and the weights that are in the repository."""

from __future__ import annotations

import json
import math

import pytest
import torch

from engine import corpus
from engine import language_model as lm
from engine.base import data_file
from tools import train_language_model as training


def weights(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    drawn = lm.draw_weights(torch.Generator().manual_seed(seed))
    return {name: w.to(dtype) for name, w in drawn.items()}


def tokens(batch: int = 2, seq_len: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(corpus.N_TOKENS, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def test_the_eager_pass_is_the_fused_one():
    w, x = weights(), tokens()
    # float64, sums of a few hundred terms of size 1
    assert torch.allclose(lm.forward(w, x), lm.forward_fast(w, x), rtol=1e-10, atol=1e-10)


def test_no_token_sees_a_later_one():
    w, x = weights(), tokens()
    changed = x.clone()
    changed[:, 10] = (changed[:, 10] + 1) % corpus.N_TOKENS
    one, other = lm.forward(w, x), lm.forward(w, changed)
    assert torch.equal(one[:, :10], other[:, :10])
    assert not torch.equal(one[:, 10:], other[:, 10:])


def test_a_factor_is_a_longer_q():
    w, x = weights(), tokens()
    longer = {name: w_ * 3 if name.endswith((".W_q", ".b_q")) else w_ for name, w_ in w.items()}
    assert torch.allclose(lm.forward(w, x, factor=3.0), lm.forward(longer, x), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(lm.forward(w, x, factor=3.0), lm.forward(w, x), rtol=1e-3)


def test_a_trace_keeps_every_step_of_every_layer():
    w, x, trace = weights(), tokens(), lm.Trace()
    out = lm.forward(w, x, factor=2.0, trace=trace)
    assert torch.equal(out, lm.forward(w, x, factor=2.0))
    keep = torch.ones(24, 24, dtype=torch.bool).tril()
    for layer in range(lm.N_LAYERS):
        assert trace.q[layer].shape == (2, lm.N_HEADS, 24, lm.D_K)
        assert torch.equal(trace.logits[layer], trace.q[layer] @ trace.k[layer].mT * (2 / math.sqrt(lm.D_K)))
        expected = trace.logits[layer].masked_fill(~keep, -math.inf).softmax(-1)
        assert torch.allclose(trace.weights[layer], expected, atol=1e-12)
        assert torch.equal(trace.context[layer], trace.weights[layer] @ trace.v[layer])


def test_edits_take_the_place_of_what_they_are_given():
    w, x, trace = weights(), tokens(), lm.Trace()
    seen = []

    def uniform(layer: int, row: torch.Tensor) -> torch.Tensor:
        seen.append(layer)
        return torch.ones_like(row).tril() / torch.arange(1, row.shape[-1] + 1)[:, None]

    lm.forward(w, x, trace=trace, edit_weights=uniform)
    assert seen == [0, 1, 2]
    means = trace.v[0].cumsum(-2) / torch.arange(1, 25)[:, None]
    assert torch.allclose(trace.context[0], means, atol=1e-12)
    nothing = lm.forward(w, x, edit_context=lambda _, mixed: torch.zeros_like(mixed))
    silent = {name: torch.zeros_like(w_) if name.endswith("W_o") else w_ for name, w_ in w.items()}
    assert torch.allclose(nothing, lm.forward(silent, x), atol=1e-12)


def test_losses_are_those_of_the_next_token():
    x = tokens()
    even = torch.zeros(*x.shape, corpus.N_TOKENS)
    assert torch.allclose(lm.token_losses(even, x), torch.tensor(math.log(corpus.N_TOKENS)))
    sure = torch.nn.functional.one_hot(x.roll(-1, 1), corpus.N_TOKENS) * 50.0
    assert lm.token_losses(sure, x).max() < 1e-6  # 95 · exp(-50)


def test_training_learns_and_a_seed_decides_it():
    def losses(seed: int) -> list[float]:
        curve: list[dict[str, float]] = []
        training.train(training.Settings(seed=seed, steps=24, batch=2, warm_up=4, every=8), curve.append)
        return [point["training_loss"] for point in curve]

    first = losses(0)
    assert first == losses(0) != losses(1)
    assert first[-1] < first[0] - 0.5


# -- the weights of the repository ------------------------------------------------------------------------------------


def about() -> dict:
    return json.loads((data_file(lm.FILES[0]).parent / "training.json").read_text("utf-8"))


def test_the_weights_are_small_whole_and_the_ones_that_were_described():
    assert data_file(lm.FILES[0]).stat().st_size < 2 * 10**6
    stored = lm.load_weights()
    assert {name: tuple(w.shape) for name, w in stored.items()} == lm.shapes()
    measured = training.evaluate(stored)
    # rounded to four digits there; other machines sum float32 in another order
    assert measured == pytest.approx(about()["stored"], abs=2e-3)


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    broken = tmp_path / "model.npz"
    broken.write_bytes(data_file(lm.FILES[0]).read_bytes()[:-1])
    monkeypatch.setattr(lm, "data_file", lambda name: broken)
    lm._from_file.cache_clear()
    try:
        with pytest.raises(lm.DamagedWeights, match=r"model\.npz"):
            lm.load_weights()
    finally:
        lm._from_file.cache_clear()


def test_the_model_shows_what_it_was_trained_to():
    stored = about()["stored"]
    assert stored["repeated"] < 0.01 * math.log(corpus.N_TOKENS - 1)  # guessing among all characters costs ln 95
    assert stored["stories"] < 0.5
    assert [point["step"] for point in about()["curve"]][-1] == about()["settings"]["steps"]
