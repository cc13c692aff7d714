r"""A trained model's residual stream taken apart: what each branch adds, what it does by itself, what without it.

The stream behind the last layer is a sum: the embedding of the token and what each of the six branches wrote. Three
things are measured on held-out texts with the trained language model:

* *lens*: the loss if all later branches write nothing, so the stream as it stands goes to the last norm and the
  unembedding.
* *taken out*: the loss added if one branch writes nothing and all that follows reads a stream without it.
* *direct*: the loss added if its vector is subtracted from the last stream alone. What later branches made of it stays.

If branches did nothing but add to the output, the last two would agree. They differ by what later branches read.

The *square to sum* of the last stream is its mean square over the sum of those of its parts: 1 where parts are
orthogonal on average, more where they point the same way, less where one takes back what another wrote.

Sources: elhage2021, section on the residual stream; nostalgebraist2020 (the lens).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import corpus, inputs, language_model
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number, text
from engine.chunks import chunks
from engine.language_model import D_FF, D_MODEL, N_HEADS, N_LAYERS

if TYPE_CHECKING:
    import torch

BRANCH_PARTS = tuple(f"layer_{layer}_{kind}" for layer in range(N_LAYERS) for kind in ("attention", "ffn"))
PARTS = ("embedding_part", *BRANCH_PARTS)


@dataclass(frozen=True)
class Params(BaseParams):
    stream_part: str = choice(*BRANCH_PARTS)
    source: str = choice(*inputs.SOURCES)
    text: str = text(inputs.EXAMPLE, most=inputs.LONGEST)
    n_texts: int = number(2, low=1, high=16, log2=True)
    seq_len: int = number(64, low=2 * corpus.REPEATED[1], high=language_model.SEQ_LEN, log2=True)

    def rules(self) -> Iterator[Problem]:
        yield from inputs.too_short(self.source, self.text)

    def unread(self) -> frozenset[str]:
        return frozenset(inputs.unread(self.source))


METRICS = (
    Metric("taken_out_loss_added_nats", "nats"),
    Metric("direct_loss_added_nats", "nats"),
    Metric("loss_nats", "nats"),
    Metric("embedding_lens_loss_nats", "nats"),
    Metric("last_layer_lens_loss_nats", "nats"),
    Metric("square_to_sum_trained"),
    Metric("part_to_stream_square"),
    Metric("n_unknown"),
)
PLOTS = (
    Plot(
        "effects", table="effects", mark="bar", x="stream_part", y="loss_added_nats", by="removal_effect", y_unit="nats"
    ),
    Plot("lens", table="by_part", mark="bar", x="stream_part", y="lens_loss_nats", y_unit="nats"),
)
BUDGET_S = 0.2
TOKENS_AT_ONCE = 512  # some 30 ms a pass


def memory_bytes(params: Params) -> int:
    """The weights, and one pass with its parts: token logits, hidden units, the logits and weights of a layer."""
    n_texts, seq_len = _size(params)
    n = min(n_texts, max(1, TOKENS_AT_ONCE // seq_len))
    attention_numbers = 6 * N_HEADS * n * seq_len**2
    return 8 * (700_000 + n * seq_len * (40 * D_MODEL + 4 * D_FF + 8 * corpus.N_TOKENS) + attention_numbers)


def run(params: Params, run: Run) -> Result:
    """Read the texts once for the parts, and once for every branch that is taken out.

    ``part_to_stream_square``: mean square of the chosen branch's vectors over that of the last stream.
    ``embedding_lens_loss``: the lens in front of the first layer, ``last_layer_lens_loss`` in front of the last.

    Shapes: (n_texts, seq_len) tokens, in chunks; a part (batch, seq_len, D_MODEL).
    """
    import torch

    weights = language_model.load_weights(run.device, run.dtype)
    texts = inputs.read_texts(run, params.source, params.text, *_size(params))
    n_texts, seq_len = texts.tokens.shape
    lens = np.zeros(len(PARTS))
    taken_out, direct = np.zeros(len(BRANCH_PARTS)), np.zeros(len(BRANCH_PARTS))
    part_squares, stream_square = np.zeros(len(PARTS)), 0.0
    with torch.inference_mode():
        for start, n in chunks(n_texts, max(1, TOKENS_AT_ONCE // seq_len)):
            some = inputs.Texts(texts.tokens[start : start + n], texts.period[start : start + n])

            def loss(stream: torch.Tensor, some: inputs.Texts = some) -> float:
                token_logits = _unembed(weights, stream)
                return float(language_model.token_losses(token_logits, some.tokens)[some.known()].sum())

            run.progress(start / n_texts)
            parts = _parts(weights, some.tokens)
            stream = torch.zeros_like(parts[0])
            for i, part in enumerate(parts):
                stream = stream + part
                lens[i] += loss(stream)
                part_squares[i] += float(part.cpu().double().square().sum())
            stream_square += float(stream.cpu().double().square().sum())
            for i, part in enumerate(parts[1:]):
                run.progress((start + n * (i + 1) / len(PARTS)) / n_texts)
                direct[i] += loss(stream - part)
                taken_out[i] += loss(sum(_parts(weights, some.tokens, taken_out=i)))

    n_known = int(texts.known().sum())
    lens, direct, taken_out = lens / n_known, direct / n_known, taken_out / n_known
    chosen = BRANCH_PARTS.index(params.stream_part)
    whole = float(lens[-1])
    metrics = {
        "taken_out_loss_added_nats": taken_out[chosen] - whole,
        "direct_loss_added_nats": direct[chosen] - whole,
        "loss_nats": whole,
        "embedding_lens_loss_nats": lens[0],
        "last_layer_lens_loss_nats": lens[-3],
        "square_to_sum_trained": stream_square / part_squares.sum(),
        "part_to_stream_square": part_squares[1 + chosen] / stream_square,
        "n_unknown": inputs.n_unknown(params.source, params.text),
    }
    effects = {
        "stream_part": np.tile(BRANCH_PARTS, 2),
        "removal_effect": np.repeat(["taken_out", "direct"], len(BRANCH_PARTS)),
        "loss_added_nats": np.concatenate((taken_out, direct)) - whole,
    }
    by_part = {"stream_part": np.array(PARTS), "lens_loss_nats": lens}
    return Result({name: float(value) for name, value in metrics.items()}, {"effects": effects, "by_part": by_part})


def _size(params: Params) -> tuple[int, int]:
    """Number and length of the texts."""
    return (1, len(params.text)) if params.source == "text" else (params.n_texts, params.seq_len)


def _parts(weights: language_model.Weights, tokens: torch.Tensor, taken_out: int | None = None) -> list[torch.Tensor]:
    """The embedding and what each branch writes; the branch that is taken out writes zeros."""
    import torch

    parts = [weights["embedding"][tokens]]

    def write(_: str, part: torch.Tensor) -> torch.Tensor:
        parts.append(torch.zeros_like(part) if len(parts) - 1 == taken_out else part)
        return parts[-1]

    language_model.forward(weights, tokens, edit_out=write)
    return parts


def _unembed(weights: language_model.Weights, stream: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import layer_norm

    return language_model.unembed(weights, layer_norm(stream, (D_MODEL,), weights["norm"]))
