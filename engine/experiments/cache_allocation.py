r"""A stream of requests in a pool of KV slots under four ways of giving them room, and what each slot is used for.

Requests wait in line and never run out; whoever is first starts as soon as there is room, and holds what it was given
until its last token. In a step each that runs gets one more token into the cache.

``reserve_maximum``       a contiguous region for the longest request that is allowed
``reserve_power_of_two``  one for the prompt and for the answer's length, rounded up to a power of two
``reserve_exact``         one for exactly the tokens that will be there at the end, as if somebody knew
``paged_blocks``          blocks for the prompt, one more whenever the last is full. A request starts when its prompt
                          leaves ``kept_free_share`` of the pool free. When no block is left, the request that started
                          last is preempted: it gives all its blocks back, waits at the head of the line, and its
                          tokens are computed again, or swapped in, when it returns

Slots are counted in each step: ``holds_token``, ``reserved_slot`` (will be written later by the request that holds it),
``never_written`` (held, but its request ends before: internal fragmentation), ``between_regions`` (free, together
enough for the next request, but nowhere in one piece: external fragmentation), ``too_few_left`` (free, but fewer
than the next request needs). Of the allocators of regions, ``first_fit`` takes the first gap that is large enough,
``buddy`` rounds every region up to a power of two, which counts as never written.

Source: kwon2023, section 3.1 and figure 2 (the kinds of waste, and the systems), section 4.5 (preemption).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.paging import BlockTable, Buddy, FirstFit, Paging, PoolFull

POLICIES = ("paged_blocks", "reserve_maximum", "reserve_power_of_two", "reserve_exact")
SLOT_USES = ("holds_token", "reserved_slot", "never_written", "between_regions", "too_few_left")
LENGTH_LAWS = ("long_tail", "even_spread", "all_alike")
MOST_BLOCK_TAKES = 2**16


@dataclass(frozen=True)
class Params(BaseParams):
    cache_policy: str = choice(*POLICIES)
    block_size: int = number(16, low=1, high=256, log2=True)
    region_allocator: str = choice("first_fit", "buddy")
    length_law: str = choice(*LENGTH_LAWS)
    mean_prompt_tokens: int = number(64, low=1, high=2048, log2=True)
    mean_output_tokens: int = number(128, low=1, high=2048, log2=True)
    longest_request: int = number(1024, low=16, high=8192, log2=True)
    pool_slots: int = number(4096, low=1024, high=65536, log2=True)
    kept_free_share: float = number(0.01, low=0.0, high=0.5, step=0.01)
    serving_steps: int = number(1024, low=64, high=4096, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.mean_prompt_tokens + self.mean_output_tokens > self.longest_request:
            values = {"longest": self.longest_request}
            yield Problem(
                "rule", "longest_request", self.longest_request, rule="mean_request_within_longest", values=values
            )
        if self.pool_slots & (self.pool_slots - 1):
            yield Problem("rule", "pool_slots", self.pool_slots, rule="pool_is_power_of_two")
        if self.pool_slots % self.block_size:
            yield Problem("rule", "block_size", self.block_size, rule="blocks_divide_pool")
        if self.longest_request + self.block_size > (1 - self.kept_free_share) * self.pool_slots:
            values = {"pool": self.pool_slots}
            yield Problem("rule", "pool_slots", self.pool_slots, rule="pool_holds_longest_request", values=values)
        # a request at a time takes a block every block_size steps, and those of its prompt
        together = self.pool_slots / (self.mean_prompt_tokens + self.mean_output_tokens / 2)
        blocks = (self.mean_prompt_tokens + self.mean_output_tokens) / self.block_size + 4
        takes = int(self.serving_steps * together / self.mean_output_tokens * blocks)
        if takes > MOST_BLOCK_TAKES:
            values = {"takes": takes, "limit": MOST_BLOCK_TAKES}
            yield Problem("rule", "serving_steps", self.serving_steps, rule="too_many_block_takes", values=values)


METRICS = (
    Metric("token_slot_share"),
    Metric("requests_together"),
    Metric("reserved_slot_share"),
    Metric("never_written_share"),
    Metric("between_regions_share"),
    Metric("too_few_left_share"),
    Metric("preemptions"),
    Metric("recomputed_over_generated"),
)
PLOTS = (
    Plot("uses", table="by_policy", x="cache_policy", y="pool_share", by="slot_use", mark="bar"),
    Plot("memory_map", table="memory_map", x="serving_step", y="pool_piece", value="piece_filled", mark="heat"),
    Plot("together", table="together", x="cache_policy", y="requests_together", mark="bar"),
    Plot("over_time", table="over_time", x="serving_step", y="kv_slots", by="slot_use", mark="area"),
)
BUDGET_S = 0.04

WARM_UP = 4  # the first quarter of the steps fills the pool and is not counted
N_REQUESTS = 256  # drawn; the stream goes through them again and again
MAP_COLUMNS, MAP_ROWS = 24, 32
REPORT_EVERY = 64


def memory_bytes(params: Params) -> int:
    """Python's own: tables and lists of blocks; columns of numbers for each step."""
    return 2**20 + 2**10 * params.serving_steps + 2**6 * params.pool_slots


def run(params: Params, run: Run) -> Result:
    """All policies on the same requests; the metrics are those of the chosen one.

    Shares are means over the steps behind the warm-up. ``requests_together``: how many run, on average; each gets a
    token in a step, so it is the throughput in tokens a step as well, as if computing again took no time.
    ``recomputed_over_generated``: tokens that had to be computed again after preemption, over those that were
    generated.
    """
    lengths = _draw_lengths(params, run)
    served = {}
    for done, policy in enumerate(POLICIES):
        report = _Progress(run, done / len(POLICIES), 1 / len(POLICIES))
        served[policy] = _Served(params, policy, lengths, report, with_map=policy == params.cache_policy)
    shares = {policy: served[policy].shares() for policy in POLICIES}
    chosen, share = served[params.cache_policy], shares[params.cache_policy]
    metrics = {
        "token_slot_share": share["holds_token"],
        "requests_together": chosen.together(),
        "reserved_slot_share": share["reserved_slot"],
        "never_written_share": share["never_written"],
        "between_regions_share": share["between_regions"],
        "too_few_left_share": share["too_few_left"],
        "preemptions": float(chosen.preemptions),
        "recomputed_over_generated": chosen.recomputed / chosen.generated,
    }
    tables = {
        "by_policy": {
            "cache_policy": np.repeat(POLICIES, len(SLOT_USES)),
            "slot_use": np.tile(SLOT_USES, len(POLICIES)),
            "pool_share": np.array([shares[policy][use] for policy in POLICIES for use in SLOT_USES]),
        },
        "together": {
            "cache_policy": np.array(POLICIES),
            "requests_together": np.array([served[policy].together() for policy in POLICIES]),
        },
        "over_time": chosen.over_time(),
        "memory_map": chosen.memory_map(),
    }
    return Result(metrics, tables)


@dataclass
class _Progress:
    run: Run
    begin: float
    width: float

    def __call__(self, share: float) -> None:
        self.run.progress(self.begin + share * self.width)


def _draw_lengths(params: Params, run: Run) -> np.ndarray:
    """Prompt and output of each request, at least one token each and together at most the longest.

    ``long_tail`` is exponential, ``even_spread`` uniform from 1 to twice the mean. Shapes: (N_REQUESTS, 2).
    """
    drawn = run.rand(N_REQUESTS, 2).cpu().double().numpy()
    means = np.array([params.mean_prompt_tokens, params.mean_output_tokens], dtype=np.float64)
    if params.length_law == "long_tail":
        lengths = -np.log1p(-drawn) * means + 0.5
    elif params.length_law == "even_spread":
        lengths = 0.5 + drawn * (2 * means - 1)
    else:
        lengths = np.broadcast_to(means, drawn.shape)
    whole = np.maximum(1, np.rint(lengths)).astype(int)
    prompt = np.minimum(whole[:, 0], params.longest_request - 1)
    return np.stack((prompt, np.minimum(whole[:, 1], params.longest_request - prompt)), axis=1)


@dataclass(eq=False)
class _Request:
    """``prompt``: tokens that are cached when it starts; ``output``: steps that it runs, each with one more token.

    The last token of the answer is never fed back, so it never gets into the cache.
    """

    prompt: int
    output: int
    started: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    region: int | None = None
    room: int = 0  # slots that it holds

    @property
    def final(self) -> int:
        return self.prompt + self.output - 1

    @property
    def ends(self) -> int:
        return self.started + self.output

    def tokens(self, step: int) -> int:
        return self.prompt + step - self.started


class _Regions:
    """A contiguous region for each request, of a size that is settled when it starts."""

    def __init__(self, params: Params, policy: str) -> None:
        self.policy, self.longest = policy, params.longest_request
        made = FirstFit if params.region_allocator == "first_fit" else Buddy
        self.allocator = made(params.pool_slots)

    @property
    def free_slots(self) -> int:
        return self.allocator.free_slots

    def wanted(self, request: _Request) -> int:
        if self.policy == "reserve_maximum":
            slots = self.longest
        elif self.policy == "reserve_power_of_two":
            slots = min(request.prompt + (1 << (request.output - 1).bit_length()), self.longest)
        else:
            slots = request.final
        return self.allocator.room_for(slots)

    def start(self, request: _Request) -> bool:
        request.room = self.wanted(request)
        request.region = self.allocator.take(request.room)
        return request.region is not None

    def full_at(self, request: _Request) -> None:
        """The step at which it needs more: never."""

    def release(self, request: _Request) -> None:
        if request.region is not None:
            self.allocator.give_back(request.region)

    def mark(self, filled: np.ndarray, request: _Request, tokens: int) -> None:
        if request.region is not None:
            filled[request.region : request.region + tokens] = 1


class _Blocks:
    """Blocks from a pool for each request, taken when they are needed."""

    def __init__(self, params: Params) -> None:
        self.paging = Paging(params.pool_slots // params.block_size, params.block_size)
        self.kept = int(params.kept_free_share * params.pool_slots / params.block_size)

    @property
    def free_slots(self) -> int:
        return self.paging.free_blocks * self.paging.block_size

    def wanted(self, request: _Request) -> int:
        return (self.paging.blocks_for(request.prompt) + self.kept) * self.paging.block_size

    def start(self, request: _Request) -> bool:
        if self.wanted(request) > self.free_slots:
            return False
        request.table = BlockTable()
        self.grow(request, request.prompt)
        return True

    def grow(self, request: _Request, n_tokens: int) -> None:
        """Raises: PoolFull."""
        self.paging.grow(request.table, n_tokens)
        request.room = len(request.table.blocks) * self.paging.block_size

    def full_at(self, request: _Request) -> int | None:
        """The step at which its blocks hold no further token; None if it ends before."""
        return request.started + request.room - request.prompt + 1 if request.room < request.final else None

    def release(self, request: _Request) -> None:
        self.paging.free(request.table)

    def mark(self, filled: np.ndarray, request: _Request, tokens: int) -> None:
        size = self.paging.block_size
        blocks = filled[: len(self.paging.references) * size].reshape(-1, size)
        full, rest = divmod(tokens, size)
        blocks[request.table.blocks[:full]] = 1
        if rest:
            blocks[request.table.blocks[full], :rest] = 1


class _Served:
    """The stream under one policy, step by step.

    Only where a request ends or needs a block does anything change hands; in the other steps each that runs gets a
    token into a slot that it already holds.
    """

    def __init__(
        self, params: Params, policy: str, lengths: np.ndarray, report: Callable[[float], None], *, with_map: bool
    ) -> None:
        self.params = params
        self.memory = _Blocks(params) if policy == "paged_blocks" else _Regions(params, policy)
        self.lengths = lengths.tolist()
        self.next_number = 0
        self.waiting: deque[_Request] = deque()
        self.running: dict[_Request, None] = {}  # in the order in which they started
        self.due: list[list[_Request]] = [[] for _ in range(params.serving_steps + 1)]
        self.held = self.will_be_written = self.tokens = 0
        self.preemptions = self.recomputed = self.generated = 0
        self.counts: list[tuple[int, ...]] = []  # slots of each use, and the requests that run
        self.maps: list[tuple[int, np.ndarray]] = []
        map_every = max(1, params.serving_steps // MAP_COLUMNS)
        waits_for = (0, 0)
        for step in range(params.serving_steps):
            if step % REPORT_EVERY == 0:
                report(step / params.serving_steps)
            if self.due[step] or not step:
                self._change_hands(step)
                free = self.memory.free_slots
                fits = self.memory.wanted(self._first()) <= free
                waits_for = (free, 0) if fits else (0, free)
            used = (self.tokens, self.will_be_written - self.tokens, self.held - self.will_be_written, *waits_for)
            self.counts.append((*used, len(self.running)))
            if with_map and step % map_every == 0:
                self.maps.append((step, self._map(step)))
            self.tokens += len(self.running)
            self.generated += len(self.running)

    def _first(self) -> _Request:
        """The one at the head of the line."""
        if not self.waiting:
            prompt, output = self.lengths[self.next_number % len(self.lengths)]
            self.next_number += 1
            self.waiting.append(_Request(prompt, output))
        return self.waiting[0]

    def _change_hands(self, step: int) -> None:
        ended = [request for request in self.due[step] if request in self.running and request.ends == step]
        for request in ended:
            self._stop(request, request.final + 1)  # its last step counted one beyond what it caches
        for request in self.due[step]:
            if request in self.running and self.memory.full_at(request) == step:
                self._grow(request, step)
        while self.memory.start(self._first()):
            request = self.waiting.popleft()
            request.started = step
            self.running[request] = None
            self.tokens += request.prompt
            self._count_room(request, 1)
            self._plan(request, request.ends)
            self._plan(request, self.memory.full_at(request))

    def _grow(self, request: _Request, step: int) -> None:
        """One more block; whoever started last gives way, which may be the request itself."""
        assert isinstance(self.memory, _Blocks)
        while request in self.running:
            before = min(request.room, request.final)
            try:
                self.memory.grow(request, request.tokens(step) - request.table.length)
            except PoolFull:
                self._preempt(next(reversed(self.running)), step)
            else:
                self.held += self.memory.paging.block_size
                self.will_be_written += min(request.room, request.final) - before
                self._plan(request, self.memory.full_at(request))
                return

    def _preempt(self, request: _Request, step: int) -> None:
        done = step - request.started
        self._stop(request, request.tokens(step))
        # what it was given counts as its prompt from now on; the newest of these tokens was not computed yet
        again = _Request(request.prompt + done, request.output - done)
        self.waiting.appendleft(again)
        self.preemptions += 1
        self.recomputed += again.prompt - 1

    def _stop(self, request: _Request, counted: int) -> None:
        del self.running[request]
        self.tokens -= counted
        self._count_room(request, -1)
        self.memory.release(request)

    def _count_room(self, request: _Request, sign: int) -> None:
        self.held += sign * request.room
        self.will_be_written += sign * min(request.room, request.final)

    def _plan(self, request: _Request, step: int | None) -> None:
        if step is not None and step <= self.params.serving_steps:
            self.due[step].append(request)

    def _map(self, step: int) -> np.ndarray:
        """How much of each piece of the pool holds tokens. Shapes: (MAP_ROWS,)."""
        filled = np.zeros(self.params.pool_slots)
        for request in self.running:
            self.memory.mark(filled, request, request.tokens(step))
        return np.asarray(filled.reshape(MAP_ROWS, -1).mean(axis=1))

    def _counted(self) -> np.ndarray:
        return np.array(self.counts[len(self.counts) // WARM_UP :], dtype=np.float64)

    def shares(self) -> dict[str, float]:
        means = self._counted()[:, :-1].mean(axis=0) / self.params.pool_slots
        return dict(zip(SLOT_USES, means.tolist(), strict=True))

    def together(self) -> float:
        return float(self._counted()[:, -1].mean())

    def over_time(self) -> Table:
        steps = np.arange(0, len(self.counts), max(1, len(self.counts) // 128))
        counts = np.array(self.counts)[steps, :-1]
        return {
            "serving_step": np.repeat(steps, len(SLOT_USES)),
            "slot_use": np.tile(SLOT_USES, len(steps)),
            "kv_slots": counts.flatten(),
        }

    def memory_map(self) -> Table:
        piece = self.params.pool_slots // MAP_ROWS
        return {
            "serving_step": np.repeat([step for step, _ in self.maps], MAP_ROWS),
            "pool_piece": np.tile(np.arange(MAP_ROWS) * piece, len(self.maps)),
            "piece_filled": np.concatenate([column for _, column in self.maps]),
        }
