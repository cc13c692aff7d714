"""text_resemblance: the stream against the model's own output, the split of variances against numbers made to order."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm

from engine.base import make_run
from engine.experiments.text_resemblance import _norm_inputs, _split, _stream
from engine.inputs import draw_texts
from engine.language_model import D_MODEL, forward, load_weights
from engine.registry import Experiment
from tests.harness import assert_law_catches, run

NAME = "text_resemblance"


def by_hand(x: np.ndarray) -> tuple[float, float]:
    """Feature by feature, with sums written out."""
    n_texts, seq_len, width = x.shape
    shares, factors = [], []
    for j in range(width):
        numbers = x[:, :, j]
        of_texts = [text.mean() for text in numbers]
        grand = numbers.mean()
        between = seq_len * sum((m - grand) ** 2 for m in of_texts) / (n_texts - 1)
        within = sum(((text - text.mean()) ** 2).sum() for text in numbers) / (n_texts * (seq_len - 1))
        shares.append((between - within) / (between + (seq_len - 1) * within))
        factors.append(between / (((numbers - grand) ** 2).sum() / (numbers.size - 1)))
    return np.mean(shares), np.mean(factors)


def law(experiment: Experiment) -> None:
    weights = load_weights(dtype=torch.float64)
    for source in ("repeats", "stories"):
        drawn = draw_texts(make_run(3), source, 4, 16).tokens
        split = np.array([by_hand(x.numpy()) for x in _stream(weights, drawn)])
        metrics = run(experiment, seed=3, dtype="float64", source=source, n_texts=4, seq_len=16).metrics
        near = {"rel": 1e-9}  # float64
        assert metrics["text_share_found"] == pytest.approx(split[:, 0].mean(), **near)
        assert metrics["text_share_found_max"] == pytest.approx(split[:, 0].max(), **near)
        assert metrics["independent_tokens"] == pytest.approx(64 / split[:, 1].mean(), **near)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("between = seq_len * (means", "between = (means"),
        ("/ (n_texts - 1)", "/ n_texts"),
        ("(n_texts * (seq_len - 1))", "(n_texts * seq_len)"),
        ("tokens.numel() / factors.mean()", "tokens.numel() / factors.max()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_last_stream_is_what_the_model_makes_its_logits_of():
    weights = load_weights()
    tokens = draw_texts(make_run(1), "stories", 3, 32).tokens
    last = _norm_inputs(weights, tokens, make_run(1))[-1].float()
    logits = layer_norm(last, (D_MODEL,), weights["norm"]) @ weights["embedding"].mT / math.sqrt(D_MODEL)
    assert torch.allclose(logits, forward(weights, tokens), rtol=0, atol=1e-4)  # float32, logits of some ten


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_split_finds_the_share_that_was_put_in(share):
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(64, 1, 256, generator=generator, dtype=torch.float64)
    own = torch.randn(64, 32, 256, generator=generator, dtype=torch.float64)
    found, factor = _split(share**0.5 * common + (1 - share) ** 0.5 * own)
    # a share spreads by about its own size over the root of half the texts, over 256 features
    assert found == pytest.approx(share, abs=5 * (share + 1 / 32) * math.sqrt(2 / 64 / 256))
    assert factor == pytest.approx(1 + 31 * share, rel=5 * math.sqrt(2 / 64 / 256) + 0.02)  # a ratio's own bias
