r"""A one-layer transformer that learns associative recall, and many of them trained side by side as one batched model.

A sequence has ``kv_len`` slots; each is the sum of the embeddings of a cue and of an answer, and no cue comes twice.
The query repeats one of the cues; the model has to name the answer in that slot, out of N_ANSWERS (chance 1/8). The
vocabulary has two cues for each slot. Only attention can solve it: the query must find its own cue among the keys.

    x = LN(cue + answer),  k = W_k x,  v = W_v x,  q = W_q LN(r) with r = cue + e_query
    class logits = W_u LN(r + W_o context)

LN has no gain and no bias, so W_q and W_k with variance 1/d_model make q and k of unit variance.

Every tensor has a leading axis ``model``. The loss is summed over it, so no gradient passes between models, and Adam
and SGD work on each number by itself: each model trains as it would alone. A model draws from generators of its own
(:func:`stream`), so its curve depends on its seed and on nothing else in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.side_by_side import look_up

if TYPE_CHECKING:
    import torch

D_MODEL = 32
N_ANSWERS = 8
BATCH = 32
CUES_PER_SLOT = 2
INITS = ("unit", "linear_default", "normal_002", "folded")
DRAW_STEPS = 10  # batches drawn at once; a constant, so that a longer run begins with the same batches
STREAMS = ("init", "train", "evaluation")


@dataclass(frozen=True)
class Sizes:
    """What fixes the shapes of one model; d_v is D_MODEL / n_heads."""

    d_k: int
    kv_len: int
    n_heads: int = 1

    @property
    def n_cues(self) -> int:
        return CUES_PER_SLOT * self.kv_len

    @property
    def n_weights(self) -> int:
        """Learned numbers of one model, a temperature per head included."""
        attention = 2 * self.n_heads * self.d_k * D_MODEL + 2 * D_MODEL * D_MODEL
        return attention + (self.n_cues + 2 * N_ANSWERS + 1) * D_MODEL + self.n_heads


class Sequences(NamedTuple):
    """Token numbers. Shapes: cues, answers (..., batch, kv_len); query, target (..., batch)."""

    cues: torch.Tensor
    answers: torch.Tensor
    query: torch.Tensor
    target: torch.Tensor


class Pass(NamedTuple):
    """Shapes: class_logits (model, batch, N_ANSWERS); logits, weights (model, batch, n_heads, kv_len)."""

    class_logits: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor


# --------------------------------------------------------------------------------------------------------------------
# What is drawn


def stream(seed: int, name: str) -> torch.Generator:
    """One of a model's own generators: its weights, its batches and its evaluation set don't share a stream."""
    import numpy as np
    import torch

    state = np.random.SeedSequence([seed, STREAMS.index(name)]).generate_state(1)
    return torch.Generator().manual_seed(int(state[0]))


def draw_sequences(generator: torch.Generator, kv_len: int, *shape: int) -> Sequences:
    """Sequences with distinct cues, uniform answers and a uniform query. Shapes: ``shape`` ends with the batch."""
    import torch

    order = torch.rand(*shape, CUES_PER_SLOT * kv_len, generator=generator).argsort(dim=-1)
    cues = order[..., :kv_len]
    answers = torch.randint(N_ANSWERS, (*shape, kv_len), generator=generator)
    slot = torch.randint(kv_len, (*shape, 1), generator=generator)
    return Sequences(cues, answers, cues.gather(-1, slot)[..., 0], answers.gather(-1, slot)[..., 0])


def draw_weights(generator: torch.Generator, sizes: Sizes, init: str) -> dict[str, torch.Tensor]:
    r"""The weights of one model at step 0, float32 on the CPU.

    W_q and W_k by ``init``: ``unit`` variance 1/d_model (q and k get unit variance), ``linear_default`` as
    ``torch.nn.Linear`` draws them, uniform on :math:`\pm 1/\sqrt{d_{model}}`, ``normal_002`` standard deviation 0.02,
    ``folded`` as ``unit`` with :math:`1/\sqrt{d_k}` multiplied into W_q. The rest: embeddings N(0, 1), matrices
    variance 1/d_model.
    """
    import torch

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        "E_cue": normal(sizes.n_cues, D_MODEL),
        "E_answer": normal(N_ANSWERS, D_MODEL),
        "e_query": normal(D_MODEL),
        "W_v": normal(sizes.n_heads, D_MODEL // sizes.n_heads, D_MODEL) / math.sqrt(D_MODEL),
        "W_o": normal(D_MODEL, D_MODEL) / math.sqrt(D_MODEL),
        "W_u": normal(N_ANSWERS, D_MODEL) / math.sqrt(D_MODEL),
    }
    for name in ("W_q", "W_k"):
        shape = (sizes.n_heads, sizes.d_k, D_MODEL)
        if init == "linear_default":
            weights[name] = (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(D_MODEL)
        else:
            weights[name] = normal(*shape) * (0.02 if init == "normal_002" else 1 / math.sqrt(D_MODEL))
    if init == "folded":
        weights["W_q"] /= math.sqrt(sizes.d_k)
    return weights


# --------------------------------------------------------------------------------------------------------------------
# The model


def forward(weights: dict[str, torch.Tensor], sequences: Sequences, scale: torch.Tensor) -> Pass:
    """The class logits of every sequence under every model, with the attention's logits and weights.

    k and v are never formed: with one query a sequence, (W_q x_q)·(W_k x) = (W_kᵀ W_q x_q)·x and W_v (Σ w x) = Σ w
    (W_v x), which costs 1/kv_len of the work and gives the same numbers up to rounding.

    Shapes: weights as :func:`draw_weights` behind (model, ...); sequences (model, batch, ...); scale (model, n_heads).
    """
    from torch.nn.functional import layer_norm

    width = (D_MODEL,)
    # every pair of a cue and an answer once: a batch shows each of them about twice
    pairs = layer_norm(weights["E_cue"][:, :, None] + weights["E_answer"][:, None], width).flatten(1, 2)
    x = look_up(pairs, sequences.cues * N_ANSWERS + sequences.answers)  # (model, batch, kv_len, d_model)
    residual = look_up(weights["E_cue"], sequences.query) + weights["e_query"][:, None]
    x_q = layer_norm(residual, width)[:, None]  # (model, 1, batch, d_model)

    q = x_q @ weights["W_q"].mT  # (model, n_heads, batch, d_k)
    q_to_x = (q @ weights["W_k"]).transpose(1, 2)  # (model, batch, n_heads, d_model)
    logits = q_to_x @ x.mT * scale[:, None, :, None]
    attention_weights = logits.softmax(dim=-1)
    mean_x = (attention_weights @ x).transpose(1, 2)  # (model, n_heads, batch, d_model)
    context = (mean_x @ weights["W_v"].mT).transpose(1, 2).flatten(2)  # heads side by side: (model, batch, d_model)
    out = layer_norm(residual + context @ weights["W_o"].mT, width)
    return Pass(out @ weights["W_u"].mT, logits, attention_weights)


def losses(result: Pass, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each model, in nats. Shapes: target (model, batch); returns (model,)."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(result.class_logits.mT, target, reduction="none").mean(dim=-1)


# --------------------------------------------------------------------------------------------------------------------
# The loop


class Adam:
    """Adam without weight decay, with PyTorch's defaults, at one learning rate or at one for each model, (model,).

    ``learning_rate`` may be set anew between steps.
    torch.optim does the same, but its first use imports torch._dynamo: one second and 70 MB in every process.
    """

    def __init__(self, weights: list[torch.Tensor], learning_rate: float | torch.Tensor) -> None:
        import torch

        self.weights, self.learning_rate, self.steps = weights, learning_rate, 0
        self.first = [torch.zeros_like(w, requires_grad=False) for w in weights]
        self.second = [torch.zeros_like(w, requires_grad=False) for w in weights]

    def step(self) -> None:
        import torch

        self.steps += 1
        first_bias, second_bias = 1 - 0.9**self.steps, 1 - 0.999**self.steps
        with torch.no_grad():
            for weight, first, second in zip(self.weights, self.first, self.second, strict=True):
                first.lerp_(weight.grad, 0.1)
                second.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
                spread = second.sqrt().div_(math.sqrt(second_bias)).add_(1e-8)
                rate = self.learning_rate / first_bias
                if isinstance(rate, float):
                    weight.addcdiv_(first, spread, value=-rate)
                else:
                    weight.sub_(rate.view(-1, *[1] * (weight.dim() - 1)) * first / spread)


class SGD:
    """Gradient descent with momentum 0.9."""

    def __init__(self, weights: list[torch.Tensor], learning_rate: float) -> None:
        import torch

        self.weights, self.learning_rate = weights, learning_rate
        self.velocity = [torch.zeros_like(w, requires_grad=False) for w in weights]

    def step(self) -> None:
        import torch

        with torch.no_grad():
            for weight, velocity in zip(self.weights, self.velocity, strict=True):
                weight.sub_(velocity.mul_(0.9).add_(weight.grad), alpha=self.learning_rate)


OPTIMIZERS: dict[str, type[Adam] | type[SGD]] = {"adam": Adam, "sgd": SGD}


class Models:
    """Models that train together: one for each pair of a scale and a seed, the seeds running fastest.

    The scales of one seed begin with the same weights and see the same batches, so that the scale is all that differs.
    ``learned`` marks the scales of which a logarithm per head is trained too (a learnable temperature).

    float16 and bfloat16 mean mixed precision: float32 weights, products in the lower type.
    """

    def __init__(
        self,
        sizes: Sizes,
        scales: list[float],
        learned: list[bool],
        seeds: list[int],
        *,
        init: str,
        optimizer: str,
        learning_rate: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        import torch

        self.sizes, self.n_scales, self.device, self.dtype = sizes, len(scales), device, dtype
        self.mixed = dtype in (torch.float16, torch.bfloat16)
        weight_dtype = torch.float32 if self.mixed else dtype
        per_seed = [draw_weights(stream(seed, "init"), sizes, init) for seed in seeds]
        self.weights = {
            name: torch.stack([w[name] for w in per_seed])
            .to(device, weight_dtype)
            .repeat(len(scales), *[1] * per_seed[0][name].dim())
            for name in per_seed[0]
        }
        fixed = torch.tensor(scales, device=device, dtype=weight_dtype).repeat_interleave(len(seeds))
        self._fixed_scale = fixed[:, None].expand(-1, sizes.n_heads)
        self._learned = torch.tensor(learned, device=device).repeat_interleave(len(seeds))[:, None]
        self.weights["log_scale"] = self._fixed_scale.log()
        for weight in self.weights.values():
            weight.requires_grad_()
        self._optimizer = OPTIMIZERS[optimizer](list(self.weights.values()), learning_rate)
        self._batches = self._training_batches(seeds)
        self._evaluation_streams = [stream(seed, "evaluation") for seed in seeds]

    def scale(self) -> torch.Tensor:
        """The scale of each model and head; only the learned ones pass a gradient on. Shapes: (model, n_heads)."""
        import torch

        return torch.where(self._learned, self.weights["log_scale"].exp(), self._fixed_scale)

    def gradient(self) -> torch.Tensor:
        """Take the next batch of every seed, leave its gradients in ``.grad``; the losses. Shapes: (model,)."""
        for weight in self.weights.values():
            weight.grad = None
        batch = next(self._batches)
        loss = losses(self._forward(batch), batch.target)
        loss.sum().backward()
        return loss.detach()

    def update(self) -> None:
        """One step of the optimizer along the gradients."""
        self._optimizer.step()

    def gradient_norm(self, name: str) -> torch.Tensor:
        """Euclidean norm of the gradient of one weight. Shapes: (model,)."""
        gradient = self.weights[name].grad
        assert gradient is not None, "gradient() comes first"
        return gradient.flatten(1).norm(dim=-1)

    def evaluation_set(self, n_sequences: int) -> Sequences:
        """The fixed sequences on which each seed is measured. Shapes: (model, n_sequences, ...)."""
        import torch

        drawn = [draw_sequences(g, self.sizes.kv_len, n_sequences) for g in self._evaluation_streams]
        return self._for_models(Sequences(*(torch.stack(parts) for parts in zip(*drawn, strict=True))))

    def evaluate(self, sequences: Sequences) -> Pass:
        """The forward pass alone."""
        import torch

        with torch.no_grad():
            return self._forward(sequences)

    def _forward(self, sequences: Sequences) -> Pass:
        import torch

        with torch.autocast(self.device.type, self.dtype, enabled=self.mixed):
            return forward(self.weights, sequences, self.scale())

    def _for_models(self, sequences: Sequences) -> Sequences:
        """(seed, ...) to (model, ...): every scale gets the sequences of its seed."""
        return Sequences(*(part.to(self.device).repeat(self.n_scales, *[1] * (part.dim() - 1)) for part in sequences))

    def _training_batches(self, seeds: list[int]) -> Iterator[Sequences]:
        import torch

        streams = [stream(seed, "train") for seed in seeds]
        while True:
            drawn = [draw_sequences(g, self.sizes.kv_len, DRAW_STEPS, BATCH) for g in streams]
            block = Sequences(*(torch.stack(parts, dim=1) for parts in zip(*drawn, strict=True)))
            for step in range(DRAW_STEPS):
                yield self._for_models(Sequences(*(part[step] for part in block)))
