"""What the little language model loses when attention layers or feed-forward networks are taken out, one or all.

A sublayer's output, which it would add to the residual stream, is replaced: by 0, or by its own mean over places and
texts of the same kind, drawn anew, which keeps what it always adds. All behind it runs as trained, on inputs that it
never saw in training. So an ablation says how much the rest, as it is, leans on the sublayer; not what the model would
have learned without it. The added losses of single sublayers need not add up: behind a hole another sublayer may do
without, or fail as well.

Source of the model: engine/trained/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number, text
from engine.inputs import EXAMPLE, LONGEST, SOURCES, draw_texts, n_unknown, read_texts, too_short, unread
from engine.language_model import D_FF, D_MODEL, N_HEADS, SUBLAYERS, forward, load_weights, shapes, token_losses

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    source: str = choice(*SOURCES)
    text: str = text(EXAMPLE, most=LONGEST)
    replacement: str = choice("its_mean", "zeros")
    n_texts: int = number(2, low=1, high=64, log2=True)
    seq_len: int = number(64, low=16, high=128, step=16)

    def rules(self) -> Iterator[Problem]:
        return too_short(self.source, self.text)

    def unread(self) -> frozenset[str]:
        return unread(self.source)


REMOVED = {
    **{name: (name,) for name in SUBLAYERS},
    "all_attention": tuple(name for name in SUBLAYERS if name.endswith("attention")),
    "all_ffn": tuple(name for name in SUBLAYERS if name.endswith("FFN")),
}


def _metric(removed: str) -> str:
    return f"loss_added_{removed.replace(' ', '_').lower()}_nats"


METRICS = (Metric("loss_nats", "nats"), *(Metric(_metric(removed), "nats") for removed in REMOVED), Metric("n_unknown"))
PLOTS = (Plot("added", table="added", x="removed", y="loss_added_nats", by="sublayer", mark="bar", y_unit="nats"),)
BUDGET_S = 0.3

N_FOR_MEANS = 8  # texts, drawn apart from those that are read
CHUNK = 2048  # tokens of one pass: some 0.1 s


def memory_bytes(params: Params) -> int:
    """A pass over one chunk of texts, or of those for the means, and the model twice."""
    read = LONGEST if params.source == "text" else params.n_texts * params.seq_len
    places = min(CHUNK, max(read, N_FOR_MEANS * _mean_len(params)))
    rows = 4 * N_HEADS * max(_mean_len(params), LONGEST if params.source == "text" else params.seq_len)
    model = sum(math.prod(shape) for shape in shapes().values())
    return 8 * (places * (24 * D_MODEL + 4 * D_FF + rows) + 2 * model) + 2**22


def _mean_len(params: Params) -> int:
    """Length of the texts for the means; that of drawn ones says nothing where a text is typed."""
    return 64 if params.source == "text" else params.seq_len


def run(params: Params, run: Run) -> Result:
    """Loss at the places whose next character can be known, as trained and with sublayers replaced."""
    import torch

    weights = load_weights(run.device, run.dtype)
    kind = "stories" if params.source == "text" else params.source
    means = dict.fromkeys(SUBLAYERS, torch.zeros(D_MODEL, device=run.device, dtype=run.dtype))
    passes = len(REMOVED) + 1
    if params.replacement == "its_mean":
        means = _means(weights, draw_texts(run, kind, N_FOR_MEANS, _mean_len(params)).tokens, run)
    texts = read_texts(run, params.source, params.text, params.n_texts, params.seq_len)
    known = texts.known()
    if not known.any():  # of a repeated string longer than the text nothing can be known
        known = torch.ones_like(known)
    at_once = max(1, CHUNK // texts.tokens.shape[1])

    def loss(removed: tuple[str, ...], done: int) -> float:
        def edit(name: str, out: torch.Tensor) -> torch.Tensor:
            return means[name].expand_as(out) if name in removed else out

        parts = []
        for number_of, tokens in enumerate(texts.tokens.split(at_once)):
            run.progress((done + number_of * at_once / len(texts.tokens)) / passes)
            parts.append(token_losses(forward(weights, tokens, edit_out=edit), tokens))
        return float(torch.cat(parts)[known].mean())

    intact = loss((), 0)
    added = {name: loss(removed, 1 + done) - intact for done, (name, removed) in enumerate(REMOVED.items())}
    metrics = {"loss_nats": intact, **{_metric(name): value for name, value in added.items()}}
    metrics["n_unknown"] = float(n_unknown(params.source, params.text))
    table = {
        "removed": np.array(list(added)),
        "sublayer": np.array([f"{name.lower().replace('_', ' ').split()[-1]}_sublayer" for name in added]),
        "loss_added_nats": np.array(list(added.values())),
    }
    return Result(metrics, {"added": table})


def _means(weights: dict[str, torch.Tensor], tokens: torch.Tensor, run: Run) -> dict[str, torch.Tensor]:
    """Each sublayer's mean output over places and texts. Shapes: returns (d_model,) each."""
    sums: dict[str, list[torch.Tensor]] = {name: [] for name in SUBLAYERS}

    def keep(name: str, out: torch.Tensor) -> torch.Tensor:
        sums[name].append(out.sum(dim=(0, 1)))
        return out

    for some in tokens.split(max(1, CHUNK // tokens.shape[1])):
        run.progress(0.0)
        forward(weights, some, edit_out=keep)
    return {name: sum(parts[1:], parts[0]) / tokens.numel() for name, parts in sums.items()}
