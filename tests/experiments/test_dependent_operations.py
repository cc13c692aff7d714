"""dependent_operations against chains that are counted on paper, and layers that agree with themselves step by step."""

import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "dependent_operations"
KINDS = ("attention_layer", "nonlinear_recurrence", "scan_layer")


def chain(experiment: Experiment, kind: str, origin: str, seq_len: int, n_layers: int = 1) -> float:
    params = {"sequence_layer": kind, "tokens_are": origin, "seq_len": seq_len, "n_layers": n_layers}
    return run(experiment, seed=1, dtype="float64", **params).metrics["chain_of_operations"]


def law(experiment: Experiment) -> None:
    # norm, product with W_x, sum with the state's product, tanh, residual, norm, unembedding; three more a token
    assert chain(experiment, "nonlinear_recurrence", "tokens_known", 2) == 7 + 3
    assert chain(experiment, "nonlinear_recurrence", "tokens_known", 9) == 7 + 3 * 8
    # a second layer begins as soon as the first has its first row
    assert chain(experiment, "nonlinear_recurrence", "tokens_known", 9, 2) == 7 + 3 * 8 + 5
    # norm, product, sigmoid, a product and a sum with the state, residual, norm, unembedding; two for a doubling
    for seq_len, doublings in ((2, 1), (4, 2), (5, 3), (8, 3), (32, 5)):
        rounds = 2 * doublings
        assert chain(experiment, "scan_layer", "tokens_known", seq_len) == 7 + rounds, seq_len
    for kind in KINDS:
        for n_layers in (1, 2):
            # what a single step takes, and the choice of the token between two steps
            first = chain(experiment, kind, "tokens_generated", 2, n_layers)
            one = (first - 1) / 2
            assert chain(experiment, kind, "tokens_generated", 6, n_layers) == 6 * one + 5, (kind, n_layers)
    for seq_len in (2, 6, 16):  # the same for any number of known tokens, and that of one step
        known = chain(experiment, "attention_layer", "tokens_known", seq_len)
        assert known == (chain(experiment, "attention_layer", "tokens_generated", 2) - 1) / 2
    for kind in KINDS:
        for seq_len in (5, 8):
            metrics = run(experiment, seed=1, dtype="float64", sequence_layer=kind, seq_len=seq_len, n_layers=2).metrics
            assert metrics["stepwise_difference"] < 1e-12  # float64, two layers


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('(self._norm(x) @ W["W_x"] + self.state[layer]', '(self._norm(x) @ W["W_x"] + self.state[0]'),
        ("a * earlier_a, a * earlier_b + b, 2 * reach", "a * earlier_a, earlier_b + b, 2 * reach"),
        ("a * earlier_a, a * earlier_b + b, 2 * reach", "a * earlier_a, a * earlier_b + b, 1 + reach"),
        ("torch.zeros_like(b[:reach]), b[:-reach]", "b[:reach], b[:-reach]"),
        ("states = a * self.state[layer] + b", "states = b"),
        ("keep = self.keep[kv_len - len(x) : kv_len, :kv_len]", "keep = self.keep[: len(x), :kv_len]"),
        ("default=0) + computes", "default=0) + 1"),
        ("token = logits.argmax(dim=-1)", "token = tokens[:1]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_growth_is_that_of_the_curve():
    result = run(get(NAME), seq_len=8, sequence_layer="nonlinear_recurrence")
    assert result.metrics["chain_per_further_token"] == 3
    curve = result.tables["chains"]
    rows = curve["chain_of"] == "nonlinear_recurrence_tokens_known"
    assert curve["chain_length"][rows].tolist() == [7 + 3 * t for t in range(8)]
    known = curve["chain_length"][curve["chain_of"] == "attention_layer_tokens_known"]
    assert len(set(known.tolist())) == 1


def test_growth_is_against_a_single_token():
    """All positions of a pass may share one tensor, and so one place in the chain: it says nothing about length."""
    growth = {layer: growths(layer) for layer in ("attention_layer", "nonlinear_recurrence", "scan_layer")}
    assert growth == {"attention_layer": [0, 0], "nonlinear_recurrence": [3, 3], "scan_layer": [5 / 7, 9 / 31]}


def growths(layer: str) -> list[float]:
    return [run(get(NAME), seq_len=n, sequence_layer=layer).metrics["chain_per_further_token"] for n in (8, 32)]


def test_refuses_what_nobody_waits_for():
    with pytest.raises(ParamsError, match="tokens_times_layers"):
        get(NAME).Params(seq_len=64, n_layers=4)
