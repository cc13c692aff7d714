"""stream_parts against the model's own pass: with matrices set to zero, it must tell the same losses."""

import pytest
import torch

from engine import inputs, language_model
from engine.base import make_run
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "stream_parts"
PARTS = [f"layer_{layer}_{kind}" for layer in range(3) for kind in ("attention", "ffn")]
SIZES = {"n_texts": 2, "seq_len": 64}
# float64 on both sides, a loss of some nats from sums in another order: measured below 1e-12
ROUNDING = 1e-9


def silenced(branches) -> dict:
    """The trained weights in float64; these branches write zeros."""
    weights = dict(language_model.load_weights(dtype=torch.float64))
    for branch in branches:
        name = f"{branch // 2}.{'W_down' if branch % 2 else 'W_o'}"
        weights[name] = torch.zeros_like(weights[name])
    return weights


def law(experiment: Experiment) -> None:
    texts = inputs.draw_texts(make_run(1), "stories", **SIZES)

    def loss(branches) -> float:
        token_logits = language_model.forward(silenced(branches), texts.tokens)
        return float(language_model.token_losses(token_logits, texts.tokens).mean())

    whole = loss(())
    for number, part in enumerate(PARTS):
        result = run(experiment, seed=1, dtype="float64", stream_part=part, **SIZES)
        m = result.metrics
        assert m["loss_nats"] == pytest.approx(whole, abs=ROUNDING)
        assert m["taken_out_loss_added_nats"] == pytest.approx(loss((number,)) - whole, abs=ROUNDING), part
    lens = result.tables["by_part"]["lens_loss_nats"]
    for passed in range(7):
        assert lens[passed] == pytest.approx(loss(range(passed, 6)), abs=ROUNDING)
    assert m["embedding_lens_loss_nats"] == lens[0]
    assert m["last_layer_lens_loss_nats"] == lens[4]
    # nobody reads the last branch: to take it out is to subtract it
    assert m["direct_loss_added_nats"] == pytest.approx(m["taken_out_loss_added_nats"], abs=ROUNDING)
    shares = [run(experiment, seed=1, stream_part=part, **SIZES).metrics["part_to_stream_square"] for part in PARTS]
    assert 0.5 < sum(shares) < 1  # the embedding has the rest, and parts are not orthogonal
    assert 1 < m["square_to_sum_trained"] < 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direct[i] += loss(stream - part)", "direct[i] += loss(stream)"),
        ("_parts(weights, some.tokens, taken_out=i)", "_parts(weights, some.tokens)"),
        ("lens[-3]", "lens[-2]"),
        ("len(parts) - 1 == taken_out", "len(parts) == taken_out"),
        ("stream_square / part_squares.sum()", "part_squares.sum() / stream_square"),
        ("return parts[-1]", "return part"),
        ("taken_out[chosen] - whole,", "taken_out[0] - whole,"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_first_branches_count_by_what_others_read():
    m = run(get(NAME), stream_part="layer_0_attention").metrics
    assert m["taken_out_loss_added_nats"] > 1 > 0.1 > abs(m["direct_loss_added_nats"])
