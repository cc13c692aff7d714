"""scheduled_sampling against one model at a time, trained by torch.optim, each prefix written token by token."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "scheduled_sampling"
D, V, BATCH, N_EVALUATION, N_WRITTEN = 32, 8, 32, 128, 128
SHARES = {"own_0": 0.0, "own_25": 0.25, "own_50": 0.5, "own_100": 1.0}
SETTINGS = [
    {"steps": 10, "seq_len": 5, "own_tokens_come": way, "rule_share": 0.8, "learning_rate": 0.01}
    for way in ("one_after_another", "from_one_pass")
]


def sequences(g: torch.Generator, p: dict, batch: int) -> torch.Tensor:
    shape = (batch, p["seq_len"] + 1)
    drawn, coins = torch.randint(V, shape, generator=g), torch.rand(shape, generator=g)
    tokens = drawn.clone()
    for row in range(batch):
        for t in range(2, shape[1]):
            if coins[row, t] < p["rule_share"]:
                tokens[row, t] = (tokens[row, t - 2] + 3) % V
    return tokens


def predict(w: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    E, P, (W_q, W_k, W_v, W_o), U = w
    x = E[tokens] + P[: tokens.shape[1]]
    h = layer_norm(x, (D,))
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    logits = (h @ W_q @ (h @ W_k).mT / math.sqrt(D)).masked_fill(mask, -torch.inf)
    return layer_norm(x + torch.softmax(logits, -1) @ (h @ W_v) @ W_o, (D,)) @ U.T


def pick(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The tokens at which the cumulative probability passes u. Shapes: (batch, V) and (batch,)."""
    cumulative = logits.softmax(-1).cumsum(-1)
    rows = [[float(c) for c in row] for row in cumulative]
    return torch.tensor(
        [next(i for i, c in enumerate(row) if c > x or i == V - 1) for row, x in zip(rows, u, strict=True)]
    )


@functools.cache
def reference(number: int, seed: int) -> dict[str, tuple[float, float]]:
    """Loss behind the data, and share of own tokens that keep the rule, for each share of own tokens."""
    p, found = SETTINGS[number], {}
    n = p["seq_len"]
    for name, share in SHARES.items():
        g = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(*shape, generator=g).double() for shape in ((V, D), (n, D), (4, D, D), (V, D))]
        w = [drawn[0], drawn[1], drawn[2] / math.sqrt(D), drawn[3] / math.sqrt(D)]
        w = [x.requires_grad_() for x in w]
        evaluation = sequences(g, p, N_EVALUATION)
        optimizer = torch.optim.Adam(w, lr=p["learning_rate"])
        for _ in range(p["steps"]):
            tokens = sequences(g, p, BATCH)
            coins, u = torch.rand(BATCH, n, generator=g), torch.rand(BATCH, n, generator=g).double()
            read = tokens[:, :-1].clone()
            with torch.no_grad():
                for t in range(1, n):
                    seen = read if p["own_tokens_come"] == "one_after_another" else tokens
                    own = pick(predict(w, seen[:, :t])[:, -1], u[:, t - 1])
                    read[:, t] = torch.where(coins[:, t] < share, own, tokens[:, t])
            optimizer.zero_grad()
            cross_entropy(predict(w, read).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        with torch.no_grad():
            loss = cross_entropy(predict(w, evaluation[:, :-1]).flatten(0, 1), evaluation[:, 1:].flatten())
            text = sequences(g, p, N_WRITTEN)[:, :2]
            while text.shape[1] <= n:
                u = torch.rand(N_WRITTEN, generator=g).double()
                text = torch.cat((text, pick(predict(w, text)[:, -1], u)[:, None]), dim=1)
        kept = [text[row, t] == (text[row, t - 2] + 3) % V for row in range(N_WRITTEN) for t in range(2, n + 1)]
        found[name] = loss.item(), float(np.mean(kept))
    return found


def law(experiment: Experiment) -> None:
    for number, p in enumerate(SETTINGS):
        metrics = run(experiment, seed=3, dtype="float64", **p).metrics
        for name, (loss, kept) in reference(number, 3).items():
            # float64; ten steps of Adam divide by gradients, which loses some digits
            assert metrics[f"data_prefix_loss_nats_{name}"] == pytest.approx(loss, rel=1e-7), (p, name)
            assert metrics[f"rule_kept_{name}"] == pytest.approx(kept), (p, name)
        sequential = p["own_tokens_come"] == "one_after_another"
        assert metrics["dependent_passes_per_step"] == (p["seq_len"] if sequential else 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.where(own_here[..., t], own, read[..., t])", "torch.where(own_here[..., t], read[..., t], own)"),
        ("own_here[..., 0] = False", "own_here[..., 1] = False"),
        ("drawn[..., :-1]), dim=-1)", "drawn[..., 1:]), dim=-1)"),
        (
            "p = self.forward(read[..., :t])[..., -1, :]",
            "p = self.forward(tokens[None, :, :t].expand(4, -1, -1))[..., -1, :]",
        ),
        ("follows(tokens)", "follows(tokens[..., 1:])"),
        ("u[:, t - 1].expand", "u[:, t].expand"),
        ("self.n_passes += 1", "self.n_passes = 1"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_shares_share_their_start():
    curves = run(get(NAME), steps=10).tables["curves"]
    assert len(set(curves["data_prefix_loss_nats"][curves["step"] == 0].tolist())) == 1


def test_the_floor_is_the_entropy_of_the_next_token():
    # nothing to know: ln 8 for every token; all to know: ln 8 for the first target alone
    assert run(get(NAME), steps=10, rule_share=0.0).metrics["floor_nats"] == pytest.approx(math.log(8))
    assert run(get(NAME), steps=10, rule_share=1.0, seq_len=4).metrics["floor_nats"] == pytest.approx(math.log(8) / 4)


def test_tables_end_with_the_metrics():
    result = run(get(NAME), steps=20)
    curves, written = result.tables["curves"], result.tables["written"]
    for place, name in enumerate(SHARES):
        last = curves["data_prefix_loss_nats"][curves["own_tokens"] == name][-1]
        assert last == pytest.approx(result.metrics[f"data_prefix_loss_nats_{name}"], rel=1e-6)
        assert written["rule_kept"][place] == result.metrics[f"rule_kept_{name}"]
