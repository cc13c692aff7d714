"""Associative recall once more, one model at a time and on a whiteboard: what engine/training.py must agree with.

Written from the description, with k and v formed, attention by engine/attention.py and PyTorch's own optimizers.
"""

import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy, layer_norm, one_hot

from engine.attention import attention_logits, context, softmax

D_MODEL, N_ANSWERS, BATCH, BLOCK, N_EVALUATION = 32, 8, 32, 10, 256


def generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, stream]).generate_state(1)[0]))


def sequences(g: torch.Generator, kv_len: int, *shape: int):
    cues = torch.rand(*shape, 2 * kv_len, generator=g).argsort(-1)[..., :kv_len]
    answers = torch.randint(8, (*shape, kv_len), generator=g)
    slot = torch.randint(kv_len, (*shape, 1), generator=g)
    asked = one_hot(slot[..., 0], kv_len)
    return cues, answers, (cues * asked).sum(-1), (answers * asked).sum(-1)


def batches(seed: int, kv_len: int):
    g = generator(seed, 1)
    while True:
        yield from zip(*sequences(g, kv_len, BLOCK, BATCH), strict=True)


class Model:
    def __init__(self, seed: int, d_k: int, kv_len: int, n_heads: int, init: str, scale: float, learned: bool) -> None:
        g = generator(seed, 0)
        d = D_MODEL

        def normal(*shape):
            return torch.randn(*shape, generator=g)

        self.cue, self.answer, self.query = normal(2 * kv_len, d), normal(8, d), normal(d)
        self.v = normal(n_heads, d // n_heads, d) / math.sqrt(d)
        self.o, self.u = normal(d, d) / math.sqrt(d), normal(8, d) / math.sqrt(d)
        if init == "linear_default":
            self.q, self.k = ((2 * torch.rand(n_heads, d_k, d, generator=g) - 1) / math.sqrt(d) for _ in range(2))
        else:
            self.q, self.k = (normal(n_heads, d_k, d) * (0.02 if init == "normal_002" else d**-0.5) for _ in range(2))
        if init == "folded":
            self.q = self.q / math.sqrt(d_k)
        self.log_scale = torch.full((n_heads,), math.log(scale), dtype=torch.float64)
        self.learned = learned
        self.names = ["cue", "answer", "query", "q", "k", "v", "o", "u", *(["log_scale"] if learned else [])]
        for name in self.names:
            setattr(self, name, getattr(self, name).double().requires_grad_())

    def parameters(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.names]

    def __call__(self, cues, answers, query, target):
        """Loss in nats, accuracy, entropy and largest |logit| of sequences (batch, ...)."""
        x = layer_norm(self.cue[cues] + self.answer[answers], (D_MODEL,))[:, None]  # (batch, 1, kv_len, d_model)
        seen = self.cue[query] + self.query
        x_q = layer_norm(seen, (D_MODEL,))[:, None, None]
        q, k, v = x_q @ self.q.mT, x @ self.k.mT, x @ self.v.mT  # (batch, n_heads, positions, width)
        logits = attention_logits(q, k, "none") * self.log_scale.exp()[:, None, None]
        weights = softmax(logits)
        heads = context(weights, v)[:, :, 0]  # (batch, n_heads, d_v)
        out = heads.reshape(len(cues), D_MODEL) @ self.o.mT
        classes = layer_norm(seen + out, (D_MODEL,)) @ self.u.mT
        entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean()
        accuracy = (classes.argmax(-1) == target).double().mean()
        return cross_entropy(classes, target), accuracy, entropy, logits.abs().max()


def train(
    seed: int,
    *,
    scale: float,
    learned: bool,
    steps: int,
    d_k: int,
    kv_len: int,
    n_heads: int,
    init: str,
    optimizer: str,
    lr: float,
):
    """The curves of one model, a value at every step. Keys as the columns of scale_training."""
    model = Model(seed, d_k, kv_len, n_heads, init, scale, learned)
    weights = model.parameters()
    adam = optimizer == "adam"
    steps_of = torch.optim.AdamW(weights, lr, weight_decay=0) if adam else torch.optim.SGD(weights, lr, momentum=0.9)
    evaluation = sequences(generator(seed, 2), kv_len, N_EVALUATION)
    curves = {n: [] for n in ("loss", "accuracy", "entropy_nats", "logits_abs_max", "grad_W_q_norm", "grad_W_v_norm")}
    for step, batch in zip(range(steps + 1), batches(seed, kv_len), strict=False):
        steps_of.zero_grad()
        model(*batch)[0].backward()
        with torch.no_grad():
            measured = [value.item() for value in model(*evaluation)]
        for name, value in zip(
            curves, [*measured, model.q.grad.norm().item(), model.v.grad.norm().item()], strict=True
        ):
            curves[name].append(value)
        if step < steps:
            steps_of.step()
    return {name: np.array(values) for name, values in curves.items()}, model
