r"""Sequences that begin alike, in blocks with reference counts: what is stored, copied, computed and read.

``parallel_samples``  several answers to one prompt
``beam_search``       each step every beam goes on from one that is drawn at random, as the best candidates would be
``shared_prefix``     requests with the same beginning, each with ``own_prompt_tokens`` of a prompt behind it

``copy_on_write``     all blocks are shared; who writes into one that others have as well gets a copy of it first
``full_blocks``       only full blocks are shared; the tokens behind them are computed again into a block of one's own
``nothing_shared``    each sequence has blocks of its own. A beam that goes on from another gets a copy of all of them
``overwritten``       all blocks are shared and written into without a copy: a mistake

Every token that is computed is another number; at the end each sequence is compared with a history kept apart.

Sources: kwon2023, section 4.4 (parallel sampling, beam search, shared prefix, copy on write); vllm-prefix-caching ("We
only cache full blocks").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.paging import BlockTable, PagedCache, Paging

if TYPE_CHECKING:
    import torch

SHARINGS = ("copy_on_write", "full_blocks", "nothing_shared", "overwritten")
BRANCHINGS = ("parallel_samples", "beam_search", "shared_prefix")
BLOCK_SIZES = tuple(2**n for n in range(9))
MAX_APPENDS = 2**11
MAX_BLOCK_VISITS = 2**20


@dataclass(frozen=True)
class Params(BaseParams):
    block_sharing: str = choice(*SHARINGS)
    decode_branching: str = choice(*BRANCHINGS)
    n_branches: int = number(4, low=1, high=32, log2=True)
    prompt_len: int = number(100, low=1, high=8192, log2=True)
    own_prompt_tokens: int = number(20, low=1, high=1024, log2=True)
    new_tokens: int = number(24, low=1, high=256, log2=True)
    block_size: int = number(16, low=1, high=256, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset() if self.decode_branching == "shared_prefix" else frozenset({"own_prompt_tokens"})

    def rules(self) -> Iterator[Problem]:
        if self.n_branches * self.new_tokens > MAX_APPENDS:
            values = {"product": self.n_branches * self.new_tokens, "limit": MAX_APPENDS}
            yield Problem("rule", "new_tokens", self.new_tokens, rule="too_many_branch_tokens", values=values)
        blocks = (self.prompt_len + self.new_tokens) / self.block_size
        visits = int(self.n_branches * self.new_tokens * blocks)
        if self.decode_branching == "beam_search" and visits > MAX_BLOCK_VISITS:
            values = {"visits": visits, "limit": MAX_BLOCK_VISITS}
            yield Problem("rule", "new_tokens", self.new_tokens, rule="too_many_beam_blocks", values=values)


METRICS = (
    Metric("blocks_held"),
    Metric("blocks_held_share"),
    Metric("tokens_copied"),
    Metric("prefilled_tokens"),
    Metric("wrong_token_share"),
    Metric("step_tokens_read"),
    Metric("distinct_tokens_read"),
    Metric("shared_prefix_tokens"),
)
PLOTS = (
    Plot("held", table="by_step", x="new_token", y="blocks_held", by="block_sharing"),
    Plot("work", table="work", x="block_sharing", y="tokens_moved", by="moved_how", mark="bar"),
    Plot(
        "granularity",
        table="by_block_size",
        x="block_size",
        y="shared_prefix_tokens",
        theory="whole_prompt_tokens",
        x_scale="log2",
    ),
)
BUDGET_S = 0.05


def memory_bytes(params: Params) -> int:
    """A key and a value of one number for each slot, histories, and Python's lists of blocks."""
    tokens = params.n_branches * (params.prompt_len + params.own_prompt_tokens + params.new_tokens + params.block_size)
    return 2**20 + 2**8 * tokens + 2**9 * tokens // params.block_size


def run(params: Params, run: Run) -> Result:
    """Every way to share on the same tokens; the metrics are those of the chosen one, at the last step.

    ``blocks_held_share``: blocks against those that are held when nothing is shared. ``tokens_copied``: from block to
    block; ``prefilled_tokens``: those that prefill passes go through, tokens computed again among them.
    ``step_tokens_read``: by the last step's attention, of each sequence by itself; ``distinct_tokens_read``: each slot
    once.
    ``shared_prefix_tokens``: of the common beginning, those in blocks that a second sequence shares.
    ``wrong_token_share``: tokens that are not what their sequence wrote.
    """
    import torch

    parents = []
    if params.decode_branching == "beam_search":
        parents = (run.rand(params.new_tokens, params.n_branches).cpu() * params.n_branches).long().tolist()
    own = params.own_prompt_tokens if params.decode_branching == "shared_prefix" else 0
    n_tokens = params.prompt_len + params.n_branches * (own + params.new_tokens)
    tokens = torch.arange(1, n_tokens + 1, device=run.device, dtype=run.dtype)
    decoded = {}
    for done, sharing in enumerate(SHARINGS):

        def report(share: float, done: int = done) -> None:
            run.progress((done + share) / len(SHARINGS))

        decoded[sharing] = _Decoding(
            params, sharing, parents, tokens, report, with_numbers=sharing == params.block_sharing
        )
    chosen = decoded[params.block_sharing]
    metrics = {
        "blocks_held": chosen.held[-1],
        "blocks_held_share": chosen.held[-1] / decoded["nothing_shared"].held[-1],
        "tokens_copied": chosen.copied,
        "prefilled_tokens": chosen.prefilled,
        "wrong_token_share": chosen.wrong_share(),
        "step_tokens_read": sum(table.length for table in chosen.tables),
        "distinct_tokens_read": chosen.distinct(),
        "shared_prefix_tokens": chosen.shared_tokens,
    }
    work = [(decoded[s].copied, decoded[s].prefilled) for s in SHARINGS]
    tables = {
        "by_step": {
            "new_token": np.tile(np.arange(params.new_tokens + 1), len(SHARINGS)),
            "block_sharing": np.repeat(SHARINGS, params.new_tokens + 1),
            "blocks_held": np.concatenate([decoded[s].held for s in SHARINGS]),
        },
        "work": {
            "block_sharing": np.repeat(SHARINGS, 2),
            "moved_how": np.tile(["copied_between_blocks", "through_prefill"], len(SHARINGS)),
            "tokens_moved": np.array(work).flatten(),
        },
        "by_block_size": _by_block_size(params.prompt_len),
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _by_block_size(prompt_len: int) -> Table:
    """Tokens of a prompt that a second sequence finds in full blocks."""
    shared = []
    for size in BLOCK_SIZES:
        paging, prompt = Paging(-(-prompt_len // size), size), BlockTable()
        paging.grow(prompt, prompt_len)
        shared.append(paging.full_prefix(prompt, prompt_len).length)
    return {
        "block_size": np.array(BLOCK_SIZES),
        "shared_prefix_tokens": np.array(shared),
        "whole_prompt_tokens": np.full(len(BLOCK_SIZES), prompt_len),
    }


class _Decoding:
    """The branches under one way to share, step by step.

    ``tokens`` holds the prompt, then each branch's own, then those of each step. With ``with_numbers`` they are stored;
    else the tables alone are kept.
    """

    def __init__(
        self,
        params: Params,
        sharing: str,
        parents: list[list[int]],
        tokens: torch.Tensor,
        report: Callable[[float], None],
        *,
        with_numbers: bool,
    ) -> None:
        n, size = params.n_branches, params.block_size
        own = params.own_prompt_tokens if params.decode_branching == "shared_prefix" else 0
        longest = -(-(params.prompt_len + own + params.new_tokens) // size)
        # a step of beam search holds the old branches and the new ones together
        self.paging = Paging(2 * n * longest, size, copy_on_write=sharing != "overwritten")
        self.cache = None
        if with_numbers:
            slots = tokens.new_zeros(len(self.paging.references), 1, size, 1)
            self.cache = PagedCache(self.paging, slots, slots.clone())
        self.sharing, self.all_tokens = sharing, tokens
        self.copied = self.prefilled = 0
        prompt = range(params.prompt_len)
        first, self.histories = BlockTable(), [list(prompt) for _ in range(n)]
        self._append(first, prompt)
        self.prefilled += len(prompt)
        others = [self._branch(first, self.histories[0], decoding=False) for _ in range(n - 1)]
        self.shared_tokens = self._in_common(first)
        self.tables = [first, *others]
        at = len(prompt)
        for branch in range(n):
            self._extend(branch, range(at, at + own))
            self.prefilled += own
            at += own
        self.held = [self._held()]
        for step in range(params.new_tokens):
            report(step / params.new_tokens)
            if params.decode_branching == "beam_search":
                self._choose(parents[step])
            for branch in range(n):
                self._extend(branch, range(at, at + 1))
                at += 1
            self.held.append(self._held())

    def _held(self) -> int:
        return len(self.paging.references) - self.paging.free_blocks

    def _in_common(self, table: BlockTable) -> int:
        """Tokens of a table that lie in blocks which another has as well."""
        size = self.paging.block_size
        return sum(
            min(size, table.length - place * size)
            for place, block in enumerate(table.blocks)
            if self.paging.references[block] > 1
        )

    def _append(self, table: BlockTable, places: Sequence[int]) -> None:
        """Tokens from those places of all tokens, behind those of a table."""
        if not places:
            return
        if self.cache:
            k = self.all_tokens[list(places)][None, :, None]
            copied = self.cache.append(table, k, k)
        else:
            copied = self.paging.grow(table, len(places))
        self.copied += copied.tokens if copied else 0

    def _extend(self, branch: int, places: range) -> None:
        self._append(self.tables[branch], places)
        self.histories[branch] += places

    def _branch(self, table: BlockTable, history: list[int], *, decoding: bool) -> BlockTable:
        """Another sequence with the tokens of a table."""
        if self.sharing in ("copy_on_write", "overwritten"):
            return self.paging.fork(table)
        if self.sharing == "full_blocks":
            branch = self.paging.full_prefix(table, table.length)
            self.prefilled += table.length - branch.length
        else:
            branch = BlockTable()
            if decoding:
                self.copied += table.length
            else:
                self.prefilled += table.length
        self._append(branch, history[branch.length :])
        return branch

    def _choose(self, parents: list[int]) -> None:
        """The next generation of beams. Without sharing, a beam that goes on from itself stays where it is."""
        old, histories = self.tables, self.histories
        stays = [self.sharing == "nothing_shared" and parent == branch for branch, parent in enumerate(parents)]
        self.tables = [
            old[branch] if stays[branch] else self._branch(old[parent], histories[parent], decoding=True)
            for branch, parent in enumerate(parents)
        ]
        self.histories = [list(histories[parent]) for parent in parents]
        for table, stayed in zip(old, stays, strict=True):
            if not stayed:
                self.paging.free(table)

    def distinct(self) -> int:
        """Slots that the tables name, each counted once."""
        filled: dict[int, int] = {}
        for table in self.tables:
            for place, block in enumerate(table.blocks):
                here = min(self.paging.block_size, table.length - place * self.paging.block_size)
                filled[block] = max(filled.get(block, 0), here)
        return sum(filled.values())

    def wrong_share(self) -> float:
        """Tokens that are not what their sequence wrote, over all."""
        assert self.cache
        wrong = total = 0
        for table, history in zip(self.tables, self.histories, strict=True):
            stored = self.cache.gather(table)[0][0, :, 0]
            wrong += int((stored != self.all_tokens[history]).sum())
            total += len(history)
        return wrong / total
