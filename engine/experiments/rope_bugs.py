r"""Rotary attention written by hand, fifteen slips in it, and which usual unit test finds which slip.

The weights that the layer is written for turn the first ``rotary_dims`` coordinates of a head, pair j of
(j, j + rotary_dims/2) by :math:`t\,base^{-2j/rotary\_dims}`. The reference is ``engine/attention.py`` on
pairs that are multiplied as complex numbers, in float64. The slips, all of which run and return the right shape:

``other_pairing``       pairs (2j, 2j + 1) instead, in q and in k
``mixed_pairing``       pairs (2j, 2j + 1) in k only
``repeated_angles``     the table of angles made for pairs (2j, 2j + 1), the rest for halves
``no_minus``            the halves change places without a minus sign
``backwards``           the minus sign is on the wrong half
``head_width_exponent`` :math:`base^{-2j/d_k}`, where only a part of the head is turned
``default_base``        base 10,000, whatever the weights were trained with
``whole_head``          all coordinates are turned
``heads_for_tokens``    the positions run along the axis of the heads
``bfloat16_angles``     positions, frequencies and their product in bfloat16
``rotated_v``           v is turned as well
``no_offset``           positions begin at 0 in every call, also where a cache holds earlier tokens
``turned_twice``        keys are cached after they are turned, and all of them are turned again in the next call
``rescaled_base``       with a cache the base is four times as large; the keys in it were turned with the old one
``padding_gap``         the prompt counts columns, padding included, the new tokens count real tokens

``columns_counted`` counts columns, padding included, in all calls: it is no slip.

Each test gives a number that a correct layer has at 0, up to rounding:

``length_change``         largest relative change of the length of a q or k by turning it
``first_token_change``  change of q and k at position 0
``shift_change``        change of the output when all positions are moved
``reference_error``     output of one pass against the reference; ``far_error`` with all positions moved
``decoding_error``      a prompt, then one token after another with a cache, against the layer's own single pass
``padded_error``        the same for a shorter text in the same batch, padded on the left

Sources: su2021-roformer, sections 3.2.2 and 3.4.2; transformers-llama (halves) and llama-code (neighbours).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.positions import BASE
from engine.rotary import complex_pairs, exact_angles, rounded_angles

if TYPE_CHECKING:
    import torch

BUGS = (
    "other_pairing",
    "mixed_pairing",
    "repeated_angles",
    "no_minus",
    "backwards",
    "head_width_exponent",
    "default_base",
    "whole_head",
    "heads_for_tokens",
    "bfloat16_angles",
    "rotated_v",
    "no_offset",
    "turned_twice",
    "rescaled_base",
    "padding_gap",
)


@dataclass(frozen=True)
class Params(BaseParams):
    bug: str = choice(*BUGS, "correct", "columns_counted")
    n_heads: int = number(4, low=1, high=8, log2=True)
    n_kv_heads: int = number(2, low=1, high=8, log2=True)
    d_k: int = number(16, low=2, high=64, log2=True)
    rotary_dims: int = number(8, low=2, high=64, log2=True)
    seq_len: int = number(12, low=2, high=32)
    decoded_tokens: int = number(2, low=0, high=8)
    padding: int = number(3, low=0, high=16)
    position_shift: int = number(1000, low=1, high=16384, log2=True)
    base: float = number(500_000.0, low=10, high=10_000_000)
    computed_in: str = choice("float64", "float32", "bfloat16")

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            values = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.rotary_dims > self.d_k or self.rotary_dims % 2 or self.d_k % 2:
            values = {"d_k": self.d_k}
            yield Problem("rule", "rotary_dims", self.rotary_dims, rule="rotary_part_of_head", values=values)
        if self.padding + self.decoded_tokens >= self.seq_len:
            values = {"seq_len": self.seq_len}
            yield Problem("rule", "padding", self.padding, rule="prompt_has_a_token", values=values)


TESTS = (
    "output_shape",
    "length_change",
    "first_token_change",
    "shift_change",
    "decoding_error",
    "padded_error",
    "reference_error",
    "far_error",
)
METRICS = (
    Metric("reference_error"),
    Metric("padded_error"),
    Metric("shift_change"),
    Metric("decoding_error"),
    Metric("far_error"),
    Metric("length_change"),
    Metric("first_token_change"),
    Metric("tests_failed"),
    *(Metric(f"found_by_{test}") for test in TESTS),
    Metric("found_by_properties"),
    Metric("found_by_two_tests"),
    Metric("found_by_all_tests"),
)
PLOTS = (
    Plot("where", table="pairs", mark="heat", x="key_position", y="query_position", value="logit_difference"),
    Plot("found", table="tests", mark="bar", x="test", y="bugs_found"),
    Plot("by_distance", table="distances", x="token_distance", y="logit_difference", by="bug"),
)
BUDGET_S = 0.05

DRAWN = TESTS[1:-1]  # the shape finds nothing, the far comparison what the near one does, in float64
NEED_A_REFERENCE = ("reference_error", "far_error")
TWO = ("reference_error", "padded_error")
OTHER_ENCODINGS = ("other_pairing", "backwards", "head_width_exponent", "default_base", "whole_head")
ONLY_WITH_A_CACHE = ("no_offset", "turned_twice", "rescaled_base", "padding_gap")
OWN_TABLES = ("repeated_angles", *OTHER_ENCODINGS[2:], "heads_for_tokens", "bfloat16_angles")
RESCALED = 4  # the base of ``rescaled_base``, in units of the right one
ROUNDINGS = 8  # relative errors up to so many roundings are taken for rounding


def memory_bytes(params: Params) -> int:
    """Three texts in one pass and two with a cache, with their logits, some copies each, in float64."""
    numbers = params.n_heads * params.seq_len * (8 * params.d_k + 6 * params.seq_len)
    return 8 * 7 * numbers + 2**18


def run(params: Params, run: Run) -> Result:
    """Every test on every slip; the metrics without ``found_by`` are those of the chosen one.

    ``found_by_*``: slips that the test finds. ``found_by_properties``: those that some test finds without the
    reference; ``found_by_two_tests``: those that the reference or the padded text finds.

    q, k and v are rounded to ``computed_in``, and the reference is worked out in float64 from the rounded ones; all on
    the CPU, for not every device has float64.
    """
    import torch

    # angles at far positions are themselves rounded, in float64
    far = params.position_shift * torch.finfo(torch.float64).eps
    limit = ROUNDINGS * (torch.finfo(getattr(torch, params.computed_in)).eps + far)
    tests = _Tests(params, run)
    run.progress(0.05)
    values: dict[str, dict[str, float]] = {}
    by_distance: dict[str, np.ndarray] = {}
    for bug in dict.fromkeys((params.bug, *BUGS)):
        values[bug], in_one_pass, decoded = tests(bug)
        if bug == params.bug:
            error = tests.logits_error(_one_below_another(decoded))
            by_pair = error.where(error > limit, 0)
        if bug in OTHER_ENCODINGS:
            by_distance[bug] = _by_distance(tests.logits_error(in_one_pass))
        run.progress(len(values) / (len(BUGS) + 2))

    found = {test: {bug for bug in BUGS if values[bug][test] > limit} for test in TESTS}
    chosen = values[params.bug]
    properties = set(TESTS) - set(NEED_A_REFERENCE)
    metrics = {
        **chosen,
        "tests_failed": sum(chosen[test] > limit for test in TESTS),
        **{f"found_by_{test}": len(found[test]) for test in TESTS},
        "found_by_properties": len(set().union(*(found[test] for test in properties))),
        "found_by_two_tests": len(set().union(*(found[test] for test in TWO))),
        "found_by_all_tests": len(set().union(*found.values())),
    }
    n = params.seq_len
    tables: dict[str, Table] = {
        "pairs": {
            "query_position": np.repeat(np.arange(n), n),
            "key_position": np.tile(np.arange(n), n),
            "logit_difference": by_pair.flatten().numpy(),
        },
        "tests": {"test": np.array(DRAWN), "bugs_found": np.array([len(found[test]) for test in DRAWN])},
        "distances": {
            "bug": np.repeat(OTHER_ENCODINGS, n),
            "token_distance": np.tile(np.arange(n), len(OTHER_ENCODINGS)),
            "logit_difference": np.concatenate([by_distance[bug] for bug in OTHER_ENCODINGS]),
        },
    }
    return Result({m.name: float(metrics[m.name]) for m in METRICS}, tables)


# --------------------------------------------------------------------------------------------------------------------
# The layer, by hand


class _Seen(NamedTuple):
    """What one call computes, and q and k as they were turned.

    Shapes: out and turned (batch, n_heads, q_len, d_k), logits (batch, n_heads, q_len, kv_len), not yet masked.
    """

    out: torch.Tensor
    logits: torch.Tensor
    turned: tuple[torch.Tensor, torch.Tensor]


class _Table(NamedTuple):
    """Shapes: (batch, 1, q_len, coordinates turned), with the heads in place of 1 and 1 for q_len in one slip."""

    cos: torch.Tensor
    sin: torch.Tensor


class _Layer:
    """Causal rotary attention behind its projections, with one slip or none."""

    def __init__(self, bug: str, params: Params, tables: dict[tuple[object, ...], _Table]) -> None:
        """``tables`` keeps cos and sin for slips that have them in common."""
        self.bug, self.params, self.tables = bug, params, tables

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keep: torch.Tensor,
        padding: torch.Tensor,
        *,
        first: torch.Tensor | int = 0,
        cache: list[torch.Tensor] | None = None,
    ) -> _Seen:
        """``padding`` counts each row's columns before its text, ``first`` is added to all positions.

        Shapes: q (batch, n_heads, q_len, d_k), k and v (batch, n_kv_heads, q_len, d_k), keep as from :func:`_keep`,
        padding and first (batch, 1). ``cache`` holds k and v and grows.
        """
        import torch

        q_len, cached = q.shape[2], cache[0].shape[2] if cache else 0
        offset = 0 if self.bug == "no_offset" else cached
        counts_columns = self.bug == "columns_counted" or (self.bug == "padding_gap" and not cache)
        skipped = torch.zeros_like(padding) if counts_columns else padding
        base = RESCALED * self.params.base if self.bug == "rescaled_base" and cache else self.params.base

        positions = (torch.arange(offset, offset + q_len) - skipped).clamp_min(0) + first
        table = self._table(positions, base, q.shape[1])
        q = self._turn(q, table)
        if self.bug == "rotated_v":
            v = self._turn(v, table)
        if self.bug == "turned_twice" and cache:
            k = torch.cat((cache[0], k), dim=2)
            positions = (torch.arange(cached + q_len) - skipped).clamp_min(0) + first
            table = self._table(positions, base, q.shape[1])
            k = self._turn(k, table, of_keys=True)
        else:
            k = self._turn(k, table, of_keys=True)
            if cache:
                k = torch.cat((cache[0], k), dim=2)
        if cache is not None:
            v = torch.cat((cache[1], v), dim=2) if cache else v
            cache[:] = k, v
        groups = q.unflatten(1, (k.shape[1], -1))  # (batch, n_kv_heads, group, q_len, d_k)
        logits = attention_logits(groups, k[:, :, None])
        out = context(softmax(mask_logits(logits, keep[:, :, None])), v[:, :, None])
        return _Seen(out.flatten(1, 2), logits.flatten(1, 2), (q, k))

    def _table(self, positions: torch.Tensor, base: float, n_heads: int) -> _Table:
        """cos and sin for each coordinate that is turned. Shapes: positions (batch, q_len)."""
        if self.bug in OWN_TABLES:
            return self._new_table(positions, base, n_heads)
        key = (base, positions.shape, *positions.flatten().tolist())
        if key not in self.tables:
            self.tables[key] = self._new_table(positions, base, n_heads)
        return self.tables[key]

    def _new_table(self, positions: torch.Tensor, base: float, n_heads: int) -> _Table:
        import torch

        params, bug = self.params, self.bug
        if bug == "heads_for_tokens":
            at = positions[:, :1, None] + torch.arange(n_heads)[:, None]  # (batch, n_heads, 1)
        else:
            at = positions[:, None]
        dims = params.d_k if bug == "whole_head" else params.rotary_dims
        base = BASE if bug == "default_base" else base
        if bug == "bfloat16_angles":
            angles = rounded_angles(at, dims, base, torch.bfloat16)
        elif bug == "head_width_exponent":
            angles = exact_angles(at, params.d_k, base)[..., : dims // 2]
        else:
            angles = exact_angles(at, dims, base)
        dtype = getattr(torch, params.computed_in)
        neighbours = bug == "repeated_angles"
        angles = angles.repeat_interleave(2, dim=-1) if neighbours else torch.cat((angles, angles), dim=-1)
        return _Table(angles.cos().to(dtype), angles.sin().to(dtype))

    def _turn(self, x: torch.Tensor, table: _Table, of_keys: bool = False) -> torch.Tensor:
        """Shapes: x (batch, n_heads, q_len, d_k)."""
        import torch

        bug = self.bug
        cos, sin = table
        if bug == "heads_for_tokens":
            cos, sin = cos[:, : x.shape[1]], sin[:, : x.shape[1]]
        dims = cos.shape[-1]
        part, rest = x[..., :dims], x[..., dims:]
        if bug == "other_pairing" or (bug == "mixed_pairing" and of_keys):
            even, odd = part[..., 0::2], part[..., 1::2]
            cos, sin = cos[..., : dims // 2], sin[..., : dims // 2]
            turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
            return torch.cat((turned, rest), dim=-1)
        first, second = part.chunk(2, dim=-1)
        if bug == "no_minus":
            exchanged = torch.cat((second, first), dim=-1)
        elif bug == "backwards":
            exchanged = torch.cat((second, -first), dim=-1)
        else:
            exchanged = torch.cat((-second, first), dim=-1)
        return torch.cat((part * cos + exchanged * sin, rest), dim=-1)


def _keep(q_len: int, cached: int, padding: torch.Tensor) -> torch.Tensor:
    """What each query may see: no later column and no padding, but itself (else a row of padding would be empty).

    Shapes: padding (batch, 1); returns (batch, 1, q_len, cached + q_len).
    """
    import torch

    queries, keys = torch.arange(cached, cached + q_len)[:, None], torch.arange(cached + q_len)
    real = keys >= padding[:, None, None]
    return (keys <= queries) & (real | (keys == queries))


# --------------------------------------------------------------------------------------------------------------------
# The tests


class _Tests:
    """Two texts, the second one shorter by ``padding``, and the reference; called with the name of a slip."""

    def __init__(self, params: Params, run: Run) -> None:
        import torch

        self.params, self.dtype = params, getattr(torch, params.computed_in)
        self.tables: dict[tuple[object, ...], _Table] = {}
        self.right: tuple[_Seen, dict[str, float]] | None = None

        def draw(n_heads: int) -> torch.Tensor:
            """The text, and the shorter text with what stands in place of padding behind it. (2, n_heads, ...)."""
            return run.randn(2, n_heads, params.seq_len, params.d_k).cpu().to(self.dtype)

        texts = draw(params.n_heads), draw(params.n_kv_heads), draw(params.n_kv_heads)
        self.q, self.k = (x[:1] for x in texts[:2])
        self.reference, self.reference_logits = _reference(params, *(x[0] for x in texts))
        self.size = self.reference_logits.square().mean().sqrt()

        # one pass: the text, the text moved, the shorter text; causal, so what stands behind it changes nothing in it
        none = torch.zeros(3, 1, dtype=torch.long)
        self.alone = (*(x[[0, 0, 1]] for x in texts), _keep(params.seq_len, 0, none), none)
        self.first = torch.tensor([[0], [params.position_shift], [0]])
        # with a cache: the text, and the shorter one behind its padding
        padding = torch.tensor([[0], [params.padding]])
        columns = [torch.stack((x[0], x[1].roll(params.padding, dims=1))) for x in texts]
        sizes = [params.seq_len - params.decoded_tokens] + [1] * params.decoded_tokens
        parts = zip(*(x.split(sizes, dim=2) for x in columns), strict=True)
        starts = [0, *np.cumsum(sizes).tolist()]
        self.calls = [
            (*part, _keep(size, start, padding), padding)
            for part, size, start in zip(parts, sizes, starts, strict=False)
        ]

    def __call__(self, bug: str) -> tuple[dict[str, float], torch.Tensor, list[torch.Tensor]]:
        """The number of each test; the text's logits in one pass, and in each call where it is decoded."""
        import torch

        params, layer = self.params, _Layer(bug, self.params, self.tables)
        with torch.inference_mode():
            if bug in ONLY_WITH_A_CACHE:  # all of these do the same in one pass
                self.right = self.right or self._in_one_pass(layer)
                alone, values = self.right
            else:
                alone, values = self._in_one_pass(layer)
            cache: list[torch.Tensor] = []
            steps = [layer(*call, cache=cache) for call in self.calls]
            out = torch.cat([step.out for step in steps], dim=2)
            same_shape = values["output_shape"] == 0 and out.shape == alone.out[:2].shape
            short = alone.out[2, :, : params.seq_len - params.padding]
            values = {
                **values,
                "output_shape": float(not same_shape),
                "decoding_error": _relative_error(out[0], alone.out[0]),
                "padded_error": _relative_error(out[1, :, params.padding :], short),
            }
            return values, alone.logits[0], [step.logits[0] for step in steps]

    def _in_one_pass(self, layer: _Layer) -> tuple[_Seen, dict[str, float]]:
        """What the layer computes without a cache, and the numbers of the tests that need no more."""
        alone = layer(*self.alone, first=self.first)
        q, k = alone.turned
        values = {
            "output_shape": float(alone.out.shape[1:] != self.reference.shape),
            "length_change": max(_length_change(q[:2], self.q), _length_change(k[:2], self.k)),
            "first_token_change": max(
                _relative_error(q[0, :, 0], self.q[0, :, 0]), _relative_error(k[0, :, 0], self.k[0, :, 0])
            ),
            "shift_change": _relative_error(alone.out[1], alone.out[0]),
            "reference_error": _relative_error(alone.out[0], self.reference),
            "far_error": _relative_error(alone.out[1], self.reference),
        }
        return alone, values

    def logits_error(self, logits: torch.Tensor) -> torch.Tensor:
        """Root mean square over the heads, in units of the logits' own; 0 where the mask hides them.

        Shapes: (n_heads, seq_len, seq_len) to (seq_len, seq_len).
        """
        return (logits.cpu().double() - self.reference_logits).square().mean(dim=0).sqrt().tril() / self.size


def _reference(params: Params, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logits of one text, q and k turned as complex numbers, in float64. Shapes: (n_heads, seq_len, ...)."""
    import torch

    q, k, v = q.cpu().double(), k.cpu().double(), v.cpu().double()
    dims, group = params.rotary_dims, params.n_heads // params.n_kv_heads
    angles = exact_angles(torch.arange(params.seq_len), dims, params.base)
    phases = torch.polar(torch.ones_like(angles), angles)
    pairs = [complex_pairs(x[..., :dims], "half_split") * phases for x in (q, k)]  # turning is multiplying
    q, k = (torch.cat((p.real, p.imag, x[..., dims:]), dim=-1) for p, x in zip(pairs, (q, k), strict=True))
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    logits = attention_logits(q, k)
    keep = torch.ones(params.seq_len, params.seq_len, dtype=torch.bool).tril()
    return context(softmax(mask_logits(logits, keep)), v), logits


def _one_below_another(parts: list[torch.Tensor]) -> torch.Tensor:
    """Logits of successive calls. Shapes: (n_heads, q_len, kv_len so far) each; returns (n_heads, seq_len, seq_len)."""
    import torch
    from torch.nn.functional import pad

    width = parts[-1].shape[-1]
    return torch.cat([pad(part, (0, width - part.shape[-1])) for part in parts], dim=-2)


def _by_distance(error: torch.Tensor) -> np.ndarray:
    """Root mean square over the pairs of each distance. Shapes: (seq_len, seq_len) to (seq_len,)."""
    squares = error.square().numpy()
    n = len(squares)
    distance = np.arange(n)[:, None] - np.arange(n)
    past = distance >= 0
    return np.sqrt(np.bincount(distance[past], squares[past]) / np.arange(n, 0, -1))


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    from torch.linalg import vector_norm

    wanted = wanted.cpu().double()
    return float(vector_norm(got.cpu().double() - wanted) / vector_norm(wanted))


def _length_change(turned: torch.Tensor, x: torch.Tensor) -> float:
    from torch.linalg import vector_norm

    return float((vector_norm(turned.cpu().double(), dim=-1) / vector_norm(x.cpu().double(), dim=-1) - 1).abs().max())
