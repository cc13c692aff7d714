"""Where a hidden unit of the little language model is most active, and how much of it the current character decides.

A unit of a feed-forward network is one key and one value: it is active where the vector of a place has a large product
with its row of W_up, and adds its column of W_down there. The texts before its largest activations say what it reacts
to, in these texts; they do not say what the model uses it for, nor that it reacts to nothing else.

``character_explained``: share of a unit's variance over all places that lies between the characters that stand there,
1 - (variance within places of the same character) / variance. It is 1 for a unit that sees nothing but the current
character. With some fifty characters over thousands of places chance gives below 0.02.

Source of the model: engine/trained/README.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import corpus
from engine.base import BaseParams, Metric, Plot, Result, Run, number
from engine.inputs import draw_texts
from engine.language_model import D_FF, D_MODEL, N_HEADS, N_LAYERS, forward, load_weights, shapes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    layer: int = number(2, low=0, high=N_LAYERS - 1)
    hidden_unit: int = number(3, low=0, high=D_FF - 1)
    n_texts: int = number(16, low=8, high=128, log2=True)


SEQ_LEN = 96  # characters of a text
N_TOP = 10  # contexts that are shown
N_READ = 16  # characters of a context
CHUNK = 2048  # tokens of one pass: some 0.1 s

METRICS = (
    Metric("character_explained_median"),
    Metric("unit_character_explained"),
    Metric("unit_active_share"),
    Metric("top_character_share"),
)
PLOTS = (
    Plot("contexts", table="contexts", x="context_read", y="unit_activation", mark="bar"),
    Plot("explained", table="explained", x="explained_sorted", y="character_explained", by="ffn_of_layer"),
)
BUDGET_S = 0.3


def memory_bytes(params: Params) -> int:
    """Hidden units of all layers at all places, twice, one pass, and the model."""
    places = params.n_texts * SEQ_LEN
    a_pass = CHUNK * (24 * D_MODEL + 4 * D_FF + 4 * N_HEADS * SEQ_LEN)
    model = sum(math.prod(shape) for shape in shapes().values())
    return 8 * (4 * N_LAYERS * D_FF * places + a_pass + 2 * model)


def run(params: Params, run: Run) -> Result:
    """Read stories that no training saw, and keep all hidden units.

    ``character_explained_median``: of the units of the chosen layer. ``top_character_share``: share of the largest
    activations at the character that is most frequent among them. ``unit_active_share``: places at which it is above 0.
    """
    import torch

    weights = load_weights(run.device, run.dtype)
    tokens = draw_texts(run, "stories", params.n_texts, SEQ_LEN).tokens
    kept: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, hidden: torch.Tensor) -> torch.Tensor:
        kept.setdefault(name, []).append(hidden.flatten(0, 1))
        return hidden

    chunks = tokens.split(max(1, CHUNK // SEQ_LEN))
    for done, some in enumerate(chunks):
        run.progress(done / (len(chunks) + N_LAYERS))
        forward(weights, some, edit_hidden=keep)
    explained = []
    for done, parts in enumerate(kept.values()):
        run.progress((len(chunks) + done) / (len(chunks) + N_LAYERS))
        explained.append(_explained(tokens.flatten(), torch.cat(parts)).cpu().double().numpy())

    unit = torch.cat(kept[f"L{params.layer} FFN"])[:, params.hidden_unit].cpu().double()
    top = unit.argsort(descending=True, stable=True)[:N_TOP].tolist()
    texts = tokens.cpu().tolist()
    contexts = [_context(texts, place) for place in top]
    characters = [context[-1] for context in contexts]
    metrics = {
        "character_explained_median": float(np.median(explained[params.layer])),
        "unit_character_explained": float(explained[params.layer][params.hidden_unit]),
        "unit_active_share": float((unit > 0).to(unit.dtype).mean()),
        "top_character_share": max(characters.count(c) for c in characters) / len(characters),
    }
    tables = {
        "contexts": {
            "context_read": np.array([f"No. {place + 1}: {context}" for place, context in enumerate(contexts)]),
            "unit_activation": unit[top].numpy(),
        },
        "explained": {
            "explained_sorted": np.tile(np.arange(1, D_FF + 1), N_LAYERS),
            "ffn_of_layer": np.repeat([f"L{layer}" for layer in range(N_LAYERS)], D_FF),
            "character_explained": np.concatenate([np.sort(values) for values in explained]).astype(np.float32),
        },
    }
    return Result(metrics, tables)


def _explained(tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Share of the variance between characters, for each unit; 0 for one that never moves.

    Shapes: tokens (n,), hidden (n, d_ff); returns (d_ff,).
    """
    import torch
    from torch.nn.functional import one_hot

    centred = hidden - hidden.mean(dim=0)
    here = one_hot(tokens, corpus.N_TOKENS).to(hidden.dtype)  # (n, n_tokens)
    count = here.sum(dim=0).clamp_min(1)
    between = ((here.mT @ centred).square() / count[:, None]).sum(dim=0)
    whole = centred.square().sum(dim=0)
    return torch.where(whole > 0, between / whole.clamp_min(torch.finfo(hidden.dtype).tiny), 0.0)


def _context(texts: list[list[int]], place: int) -> str:
    """The characters up to a place, the last one being the one that stands there."""
    text, at = divmod(place, SEQ_LEN)
    return corpus.decode(texts[text][max(0, at - N_READ + 1) : at + 1]).replace("\n", "↵").replace(" ", "␣")
