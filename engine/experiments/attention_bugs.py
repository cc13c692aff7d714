r"""Causal multi-head attention written by hand, eight slips in it, and which cheap test finds which slip.

The reference is ``torch.nn.MultiheadAttention`` with the same matrices and biases. The slips:

``scale``     logits divided by the root of the model's width, not of the head's
``by_view``   (batch, seq_len, d_model) viewed as (batch, n_heads, seq_len, d_k), without a transpose
``merge``     (batch, n_heads, seq_len, d_k) reshaped to (batch, seq_len, d_model), without a transpose
``axis``      the softmax runs along the other axis of the logits
``late_mask`` future weights are multiplied by 0, the softmax has seen their logits
``no_mask``   no causal mask at all
``corner``    the triangle begins at the first key, also where a cache holds keys of earlier tokens
``no_bias``   the four biases that PyTorch's layer has by default are left out

All of them return the right shape. Each test gives a number that a correct layer has at 0, up to rounding for the
comparisons and exactly for the others:

``relative_error``      :math:`\|\mathrm{out}-\mathrm{ref}\|/\|\mathrm{ref}\|`; also with one head of full width, with
                        one token, and with equal tokens in all places
``future_gradient_max`` :math:`\max_{t<s}\|\partial(g^\top\mathrm{out}_t)/\partial x_s\|` for one random g
``last_token_change``   largest change of an earlier output when the last token is replaced, in units of their rms
``chunks_error``        the layer on chunks, with a cache of keys and values, against itself in one pass
``parameters_missing``  parameters of PyTorch's layer minus those of this one

Source: pytorch-code, ``MultiheadAttention``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import context, mask_logits, qk_product, row_norm
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number

if TYPE_CHECKING:
    import torch

BUGS = (
    "scale",
    "by_view",
    "merge",
    "axis",
    "late_mask",
    "no_mask",
    "corner",
    "no_bias",
)


@dataclass(frozen=True)
class Params(BaseParams):
    bug: str = choice("by_view", "correct", *(bug for bug in BUGS if bug != "by_view"))
    n_heads: int = number(4, low=1, high=16, log2=True)
    seq_len: int = number(7, low=2, high=32)
    d_model: int = number(32, low=1, high=128, log2=True)
    batch: int = number(2, low=1, high=8, log2=True)
    chunk_len: int = number(4, low=1, high=32)
    logits_gain: float = number(1.0, low=1 / 64, high=16, log2=True)
    biases: str = choice("zero", "random")
    computed_in: str = choice("float64", "float32", "bfloat16")

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            values = {"d_model": self.d_model}
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values=values)


TESTS = (
    "output_shape",
    "parameters_missing",
    "relative_error",
    "relative_error_one_head",
    "relative_error_one_token",
    "relative_error_equal_tokens",
    "future_gradient_max",
    "last_token_change",
    "chunks_error",
)
METRICS = (
    Metric("relative_error"),
    Metric("future_gradient_max"),
    Metric("chunks_error"),
    Metric("relative_error_one_head"),
    Metric("relative_error_one_token"),
    Metric("relative_error_equal_tokens"),
    Metric("last_token_change"),
    Metric("layer_parameters"),
    Metric("parameters_missing"),
    Metric("tests_failed"),
    Metric("quieter_bugs"),
    *(Metric(f"found_by_{test}") for test in TESTS),
    Metric("found_by_three_tests"),
    Metric("found_by_all_tests"),
)
PLOTS = (
    Plot("leak", table="pairs", mark="heat", x="input_position", y="output_position", value="gradient_log10"),
    Plot("found", table="tests", mark="bar", x="test", y="bugs_found"),
    Plot("errors", table="errors", mark="bar", x="bug", y="relative_error"),
)
BUDGET_S = 0.05

THREE = ("parameters_missing", "relative_error", "future_gradient_max")
# where rounding counts; the other tests are exact. The same row of two products may be summed in another order.
COMPARISONS = ("relative_error", "chunks_error", "last_token_change")
ROUNDINGS = 8  # relative errors up to so many roundings of the dtype are taken for rounding
FLOOR, ZERO = -8, -9  # of the map: what is smaller than 1e-8, and what is exactly 0


def memory_bytes(params: Params) -> int:
    """The matrices in float64 with their copies, and one pass with its gradients for each output."""
    n, copies = params.seq_len, 3 * params.batch + params.seq_len
    a_copy = n * (14 * params.d_model + 6 * params.n_heads * n)
    return 8 * (24 * (params.d_model + 1) ** 2 + 2 * copies * a_copy) + 2**18


def run(params: Params, run: Run) -> Result:
    """Every test on every slip; the metrics without ``found_by`` are those of the chosen one.

    ``found_by_*``: slips that the test finds. ``found_by_three_tests``: by the count, the comparison or the gradient.
    ``tests_failed``: tests that find the chosen one. ``quieter_bugs``: other slips whose relative error is more than
    rounding and smaller than that of the chosen one.

    Matrices and inputs are rounded to ``computed_in``, and the reference is worked out in float64 from the rounded
    ones; all on the CPU, for not every device has float64.

    Shapes: x (batch, seq_len, d_model).
    """
    import torch

    tests = _Tests(params, run)
    run.progress(0.05)
    values: dict[str, dict[str, float]] = {}
    for bug in dict.fromkeys((params.bug, *BUGS)):
        values[bug], slopes = tests(bug)
        if bug == params.bug:
            gradient = slopes
        run.progress(len(values) / (len(BUGS) + 2))

    limit = ROUNDINGS * torch.finfo(tests.dtype).eps
    found = {
        test: {bug for bug in BUGS if values[bug][test] > (limit if test.startswith(COMPARISONS) else 0)}
        for test in TESTS
    }
    chosen = values[params.bug]
    heard = found["relative_error"] - {params.bug}
    metrics = {
        **{name: chosen[name] for name in chosen if name != "output_shape"},
        "tests_failed": sum(params.bug in found[test] for test in TESTS),
        "quieter_bugs": sum(values[bug]["relative_error"] < chosen["relative_error"] for bug in heard),
        **{f"found_by_{test}": len(found[test]) for test in TESTS},
        "found_by_three_tests": len(set().union(*(found[test] for test in THREE))),
        "found_by_all_tests": len(set().union(*found.values())),
    }
    n = params.seq_len
    tables = {
        "pairs": {
            "output_position": np.repeat(np.arange(n), n),
            "input_position": np.tile(np.arange(n), n),
            "gradient_log10": _log10(gradient),
        },
        "tests": {"test": np.array(TESTS), "bugs_found": np.array([len(found[test]) for test in TESTS])},
        "errors": {
            "bug": np.array(BUGS),
            "relative_error": np.array([values[bug]["relative_error"] for bug in BUGS]),
        },
    }
    return Result({m.name: float(metrics[m.name]) for m in METRICS}, tables)


# --------------------------------------------------------------------------------------------------------------------
# The layer, by hand


class _Weights(NamedTuple):
    """Matrices as in ``torch.nn.Linear``, one row for each output; W_in is W_q, W_k and W_v, one below the other.

    Shapes: W_in (3 d_model, d_model), W_o (d_model, d_model), b_in (3 d_model,), b_o (d_model,).
    """

    W_in: torch.Tensor
    W_o: torch.Tensor
    b_in: torch.Tensor
    b_o: torch.Tensor


class _Layer:
    """Causal multi-head attention, with one slip or none; a cache lets it go on where the last call ended."""

    def __init__(self, bug: str, weights: _Weights, n_heads: int) -> None:
        self.bug, self.weights, self.n_heads = bug, weights, n_heads
        self.biases = (None, None) if bug == "no_bias" else (weights.b_in, weights.b_o)

    def parameters(self) -> list[torch.Tensor]:
        return [*self.weights[:2], *(b for b in self.biases if b is not None)]

    def __call__(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Shapes: x (batch, q_len, d_model), as what comes back. ``cache`` holds k and v and grows."""
        import torch
        from torch.nn.functional import linear

        d_model = x.shape[-1]
        q, k, v = (self._split(part) for part in linear(x, self.weights.W_in, self.biases[0]).chunk(3, dim=-1))
        if cache is not None:
            if cache:
                k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
            cache[:] = k, v
        width = d_model if self.bug == "scale" else q.shape[-1]
        logits = qk_product(q, k) / math.sqrt(width)
        weights = self._masked_softmax(logits)
        joined = self._merge(context(weights, v))
        return linear(joined, self.weights.W_o, self.biases[1])

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq_len, d_model) to (batch, n_heads, seq_len, d_k)."""
        batch, seq_len, d_model = x.shape
        d_k = d_model // self.n_heads
        if self.bug == "by_view":
            return x.contiguous().view(batch, self.n_heads, seq_len, d_k)
        return x.view(batch, seq_len, self.n_heads, d_k).transpose(1, 2)

    def _merge(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, n_heads, seq_len, d_k) to (batch, seq_len, d_model)."""
        batch, n_heads, seq_len, d_k = x.shape
        if self.bug != "merge":
            x = x.transpose(1, 2)
        return x.reshape(batch, seq_len, n_heads * d_k)

    def _masked_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        q_len, kv_len = logits.shape[-2:]
        last = 0 if self.bug == "corner" else kv_len - q_len  # the key of the first query's own token
        keep = torch.ones(q_len, kv_len, dtype=torch.bool).tril(last)
        if self.bug == "late_mask":
            return logits.softmax(dim=-1) * keep
        if self.bug != "no_mask":
            logits = mask_logits(logits, keep)
        if self.bug == "axis":
            return logits.softmax(dim=-2)
        return logits.softmax(dim=-1)


# --------------------------------------------------------------------------------------------------------------------
# The tests


class _Tests:
    """Inputs, weights and references of one run; called with the name of a slip."""

    def __init__(self, params: Params, run: Run) -> None:
        import torch

        self.dtype = getattr(torch, params.computed_in)
        self.n_heads, self.chunk_len = params.n_heads, params.chunk_len
        d = params.d_model
        self.x = run.randn(params.batch, params.seq_len, d).cpu().to(self.dtype)
        other_token = run.randn(params.batch, 1, d).cpu().to(self.dtype)
        self.g = run.randn(d).cpu().to(self.dtype)
        self.weights = _draw_weights(params, run, self.dtype)
        equal = self.x[:, :1].expand_as(self.x)
        changed = torch.cat((self.x[:, :-1], other_token), dim=1)
        self.inputs = torch.cat((self.x, equal, changed))
        layer = _reference(self.weights, params.n_heads)
        one_head = copy(layer)  # the same matrices
        one_head.num_heads, one_head.head_dim = 1, d
        self.n_wanted = sum(p.numel() for p in layer.parameters())
        self.wanted = {
            "relative_error": _call(layer, self.x),
            "relative_error_one_head": _call(one_head, self.x),
            "relative_error_one_token": _call(layer, self.x[:, :1]),
            "relative_error_equal_tokens": _call(layer, equal),
        }

    def __call__(self, bug: str) -> tuple[dict[str, float], torch.Tensor]:
        """The number of each test, and how strongly each output depends on each input, (output, input)."""
        import torch

        n = self.x.shape[1]
        layer = _Layer(bug, self.weights, self.n_heads)
        copies = self.x[0].repeat(n, 1, 1).requires_grad_()  # copy t is differentiated at its output t
        (gradients,) = torch.autograd.grad((layer(copies).diagonal().mT @ self.g).sum(), copies)
        slopes = row_norm(gradients)
        with torch.inference_mode():
            out, equal, changed = layer(self.inputs).chunk(3)
            got = {
                "relative_error": out,
                "relative_error_one_head": _Layer(bug, self.weights, 1)(self.x),
                "relative_error_one_token": layer(self.x[:, :1]),
                "relative_error_equal_tokens": equal,
            }
            cache: list[torch.Tensor] = []
            chunks = [layer(chunk, cache) for chunk in self.x.split(self.chunk_len, dim=1)]
            size = out.cpu().double().square().mean().sqrt()
            moved = (changed - out)[:, :-1].abs().max() / size
            chunks_error = _relative_error(torch.cat(chunks, dim=1), out)
            errors = {name: _relative_error(got[name], wanted) for name, wanted in self.wanted.items()}
        n_parameters = sum(p.numel() for p in layer.parameters())
        values = {
            "output_shape": float(any(got[name].shape != wanted.shape for name, wanted in self.wanted.items())),
            **errors,
            "future_gradient_max": slopes.triu(1).max().item(),
            "last_token_change": moved.item(),
            "chunks_error": chunks_error,
            "layer_parameters": n_parameters,
            "parameters_missing": self.n_wanted - n_parameters,
        }
        return values, slopes


def _draw_weights(params: Params, run: Run, dtype: torch.dtype) -> _Weights:
    """Uniform, in the ranges of ``torch.nn.MultiheadAttention``'s own initialization; the gain goes to the queries."""
    import torch

    d = params.d_model
    ranges = (math.sqrt(6 / (4 * d)),) * 3 + (1 / math.sqrt(d),)  # Xavier on the three stacked; as Linear
    matrices = [(2 * run.rand(d, d).cpu().double() - 1) * bound for bound in ranges]
    biases = [run.randn(d).cpu().double() * (params.biases == "random") for _ in range(4)]
    matrices[0] *= params.logits_gain
    biases[0] *= params.logits_gain
    stacked = torch.cat(matrices[:3]), matrices[3], torch.cat(biases[:3]), biases[3]
    return _Weights(*(tensor.to(dtype) for tensor in stacked))


def _reference(weights: _Weights, n_heads: int) -> torch.nn.MultiheadAttention:
    """PyTorch's layer with these weights, in float64."""
    import torch

    # without its own initialization, which would take numbers from the global generator
    layer = torch.nn.utils.skip_init(
        torch.nn.MultiheadAttention, len(weights.W_o), n_heads, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        layer.in_proj_weight.copy_(weights.W_in)
        layer.out_proj.weight.copy_(weights.W_o)
        layer.in_proj_bias.copy_(weights.b_in)
        layer.out_proj.bias.copy_(weights.b_o)
    return layer


def _call(reference: torch.nn.MultiheadAttention, x: torch.Tensor) -> torch.Tensor:
    """What PyTorch's layer makes of x under a causal mask; there True hides a key."""
    import torch

    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    x = x.cpu().double()
    with torch.no_grad():
        out, _ = reference(x, x, x, attn_mask=hidden, need_weights=False)
    return out


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    from torch.linalg import vector_norm

    wanted = wanted.cpu().double()
    return float(vector_norm(got.cpu().double() - wanted) / vector_norm(wanted))


def _log10(values: torch.Tensor) -> np.ndarray:
    """For a map of values over many powers of ten: log10, at least FLOOR, and ZERO for what is exactly 0."""
    import torch

    logs = values.cpu().double().log10().clamp_min(FLOOR)
    return np.asarray(torch.where(values == 0, float(ZERO), logs).flatten())
