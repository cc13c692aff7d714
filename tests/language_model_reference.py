"""The language model once more, on a whiteboard: numpy in float64, one text and one head at a time.

Written from the formulas in the docstring of engine/language_model.py; only the weights come from its file.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.language_model import load_weights

N_LAYERS, N_HEADS, D_K = 3, 4, 32


@dataclass(frozen=True)
class Passed:
    """One text read. Shapes: losses (seq_len - 1,); q, k, context (12, seq_len, 32); weights (12, seq_len, seq_len)."""

    losses: np.ndarray
    q: np.ndarray
    k: np.ndarray
    weights: np.ndarray
    context: np.ndarray


@functools.cache
def trained() -> dict[str, np.ndarray]:
    return {name: weight.double().numpy() for name, weight in load_weights().items()}


@functools.cache
def read(
    tokens: tuple[int, ...],
    factor: float = 1.0,
    put: tuple[tuple[int, tuple[float, ...]], ...] = (),
    window: int | None = None,
    first: int = 0,
) -> Passed:
    """A text read with the scale times ``factor``; ``put``: for some heads what stands in for their context;
    ``window``: how many keys up to its own a query sees, beside the ``first`` ones of the text.
    """
    w, n = trained(), len(tokens)
    x = w["embedding"][list(tokens)]
    qs, ks, rows, contexts = [], [], [], []
    for layer in range(N_LAYERS):
        a = norm(x) * w[f"{layer}.norm_1"]
        mixed = []
        for head in range(N_HEADS):
            of_head = slice(head * D_K, (head + 1) * D_K)
            q, k = (
                turned(a @ w[f"{layer}.W_{name}"][of_head].T + w[f"{layer}.b_{name}"][of_head]) for name in ("q", "k")
            )
            weights = np.zeros((n, n))
            for i in range(n):
                seen = [j for j in range(i + 1) if window is None or j > i - window or j < first]
                e = np.exp((z := k[seen] @ q[i] * factor / math.sqrt(D_K)) - z.max())
                weights[i, seen] = e / e.sum()
            context = weights @ (a @ w[f"{layer}.W_v"][of_head].T)
            for cut, instead in put:
                if cut == N_HEADS * layer + head:
                    context = np.tile(instead, (n, 1))
            for kept, array in zip((qs, ks, rows, contexts, mixed), (q, k, weights, context, context), strict=True):
                kept.append(array)
        x = x + np.concatenate(mixed, axis=1) @ w[f"{layer}.W_o"].T
        up = norm(x) * w[f"{layer}.norm_2"] @ w[f"{layer}.W_up"].T
        x = x + up * 0.5 * (1 + torch.erf(torch.tensor(up / math.sqrt(2))).numpy()) @ w[f"{layer}.W_down"].T
    logits = norm(x) * w["norm"] @ w["embedding"].T / math.sqrt(128)
    top = logits.max(axis=1)
    log_sum = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    losses = np.array([log_sum[i] - logits[i, tokens[i + 1]] for i in range(n - 1)])
    return Passed(losses, *map(np.array, (qs, ks, rows, contexts)))


def norm(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)


def turned(x: np.ndarray) -> np.ndarray:
    """Every pair (i, i + 16) as a complex number, multiplied by e^(i angle)."""
    angles = np.arange(len(x))[:, None].astype(np.float32) * _rates()
    z = (x[:, : D_K // 2] + 1j * x[:, D_K // 2 :]) * np.exp(1j * angles.astype(np.float64))
    return np.concatenate([z.real, z.imag], axis=1)


def _rates() -> np.ndarray:
    # the engine's angles are float32 on purpose; in float64 they would differ by some 1e-5 at place 256
    return (10_000.0 ** -(torch.arange(0, D_K, 2, dtype=torch.float32) / D_K)).numpy()
