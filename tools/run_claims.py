#!/usr/bin/env python
"""Verify the claims of the deck: a line per claim, and which of them are dear.

    python tools/run_claims.py                          every claim on its own seeds
    python tools/run_claims.py --card ID --seeds 50     one card on the seeds 0 to 49
    python tools/run_claims.py --write                  and renew the committed receipts
    python tools/run_claims.py --check-fails            and see that each fails under its fails_when
    python tools/run_claims.py --json                   one list of objects on standard output

Ends with 0 when everything holds, 1 when something does not, 2 for a bad command line, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parent.parent))

from claims import receipts
from claims.verify import Unfinished, Verdict, interval, under_fails_when, verify
from content.bindings import format_number
from content.loader import HOME, ContentError, Deck, load_deck
from content.problems import did_you_mean
from content.schema import Card, Claim
from engine import devices, registry, runner
from engine.base import ParamsError

CPU_SECONDS = 0.1  # that a run of a claim may take; training aside
DEAREST = 10
JSON_FIELDS = ("claim", "card", "value", "low", "high", "holds", "seeds", "device", "dtype", "torch", "seconds")
FORESEEN = (ParamsError, LookupError, ValueError, Unfinished, runner.TooLarge, runner.OutOfMemory)


@dataclass(frozen=True)
class Task:
    """One claim to verify, as data for a worker. ``check_fails``: also that it fails under its fails_when."""

    card: str
    claim: Claim
    seeds: tuple[int, ...]
    device: str
    dtype: str
    check_fails: bool


@dataclass(frozen=True)
class Outcome:
    """What came of it: a verdict, or why there is none; and the seeds on which it held although it should not."""

    task: Task
    verdict: Verdict | None
    error: str
    held_under_fails_when: tuple[int, ...]
    cpu_seconds: float  # of one run: the whole ÷ the seeds

    @property
    def good(self) -> bool:
        return self.verdict is not None and self.verdict.holds and not self.held_under_fails_when


# --------------------------------------------------------------------------------------------------------------------
# Measuring


def trains(claim: Claim) -> bool:
    """Whether its experiment trains; one that is unknown does not."""
    try:
        return registry.get(claim.experiment).trains
    except registry.UnknownExperiment:
        return False


def measure(task: Task, on_progress: Callable[[float], None] | None = None) -> Outcome:
    """Verify one claim; an error that an author can cause becomes part of the outcome."""
    try:
        # claims about one training share it
        shared = trains(task.claim)
        verified = functools.partial(verify, card=task.card, device=task.device, dtype=task.dtype, cached=shared)
        started = time.thread_time()
        verdict = verified(task.claim, seeds=task.seeds, on_progress=on_progress)
        cpu_seconds = (time.thread_time() - started) / len(verdict.seeds)
        held: tuple[int, ...] = ()
        changed = under_fails_when(task.claim) if task.check_fails else None
        if changed is not None:
            under = verified(changed)
            held = tuple(seed for seed in under.seeds if seed not in under.failed_seeds)
    except FORESEEN as error:
        return Outcome(task, None, f"{type(error).__name__}: {error}", (), 0.0)
    return Outcome(task, verdict, "", held, cpu_seconds)


def measure_group(tasks: Sequence[Task]) -> list[Outcome]:
    """The tasks of one worker's turn: those that share training runs stay together."""
    return [measure(task) for task in tasks]


def groups(tasks: Sequence[Task]) -> list[list[Task]]:
    """Claims that train by card and experiment, all others by themselves."""
    found: dict[object, list[Task]] = {}
    for task in tasks:
        key = (task.card, task.claim.experiment) if trains(task.claim) else (task.card, task.claim.id)
        found.setdefault(key, []).append(task)
    return list(found.values())


def warm_up() -> None:
    """Have torch imported and its first products and backward pass done, so that no claim is charged for them.

    The first product of tensors without storage makes torch import sympy: half a second, once in a process.
    """
    import torch

    runner.settle_process()
    x = torch.ones(4, 4, requires_grad=True)
    (x @ x).softmax(-1).sum().backward()
    _ = x.detach().to("meta") @ torch.empty(4, 4, device="meta")


def prepare_worker() -> None:
    """Ctrl-C ends a worker at once and without a word; the parent says what was done."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warm_up()


def measured(tasks: Sequence[Task], jobs: int, progress: Progress) -> Iterator[Outcome]:
    """Outcomes as they come: in order here, or from worker processes."""
    if jobs == 1:
        warm_up()
        for task in tasks:
            yield measure(task, progress.within(task))
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare_worker) as pool:
        try:
            for future in concurrent.futures.as_completed(pool.submit(measure_group, group) for group in groups(tasks)):
                yield from future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


# --------------------------------------------------------------------------------------------------------------------
# Saying


class Progress:
    """One line on a terminal that is written over; nothing elsewhere, where the lines of the claims say enough."""

    def __init__(self, total: int, out: TextIO) -> None:
        self.total, self.done, self._out, self._live = total, 0, out, out.isatty()

    def within(self, task: Task) -> Callable[[float], None]:
        return lambda fraction: self.show(f"{task.claim.id} {fraction:.0%}")

    def show(self, text: str) -> None:
        if self._live:
            self._out.write(f"\r\x1b[K[{self.done}/{self.total}] {text}")
            self._out.flush()

    def clear(self) -> None:
        if self._live:
            self._out.write("\r\x1b[K")
            self._out.flush()


def accepted(claim: Claim) -> str:
    """The interval as a reader of a terminal reads it."""
    low, high = interval(claim.expect)
    if claim.expect.kind in ("greater", "less"):
        return "> 1" if high is None else "< 1"
    if low is not None and high is not None:
        return f"= {format_number(low)}" if low == high else f"[{low:.6g}, {high:.6g}]"
    return f"≥ {low:.6g}" if low is not None else f"≤ {high:.6g}"


def seeds_in_words(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]}-{seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def line(outcome: Outcome) -> str:
    """One claim: verdict, name, value, what is accepted, seeds, seconds; what went wrong in lines of its own."""
    task, verdict = outcome.task, outcome.verdict
    name = f"{task.card} {task.claim.id}"
    if verdict is None:
        return f"error  {name}\n         {outcome.error}"
    value = f"{verdict.value:.6g}" if math.isfinite(verdict.value) else "undefined"
    text = f"{'holds' if outcome.good else 'FAILS'}  {name}  {value}  {accepted(task.claim)}  "
    text += f"{seeds_in_words(verdict.seeds)}  {verdict.device} {verdict.dtype}  {verdict.seconds:.2f} s"
    by_seed = dict(zip(verdict.seeds, verdict.values, strict=True))
    for seed in verdict.failed_seeds:
        why = "" if math.isfinite(by_seed[seed]) else "  (a run gave no finite number, or a ratio to 0)"
        text += f"\n         seed {seed}: {by_seed[seed]:.6g}{why}"
    if outcome.held_under_fails_when:
        text += (
            f"\n         still holds with {task.claim.fails_when} on {seeds_in_words(outcome.held_under_fails_when)}"
        )
    return text


def as_json(outcome: Outcome) -> dict[str, object]:
    """The agreed fields; a value that is no finite number is null."""
    task, verdict = outcome.task, outcome.verdict
    if verdict is None:
        return dict.fromkeys(JSON_FIELDS) | {
            "claim": task.claim.id,
            "card": task.card,
            "holds": False,
            "seeds": list(task.seeds),
            "device": task.device,
            "dtype": task.dtype,
        }
    data = dataclasses.asdict(verdict)
    data["value"] = verdict.value if math.isfinite(verdict.value) else None
    return {name: data[name] for name in JSON_FIELDS}


def dearest(outcomes: Sequence[Outcome]) -> list[str]:
    """The ten that cost most, and a warning for each above what a claim may cost."""
    known = [outcome for outcome in outcomes if outcome.verdict is not None]
    lines = ["", f"Dearest claims, CPU-seconds a run (at most {CPU_SECONDS}, training aside):"]
    for outcome in sorted(known, key=lambda outcome: -outcome.cpu_seconds)[:DEAREST]:
        dear = "  warning: too dear" if outcome.cpu_seconds > CPU_SECONDS else ""
        note = "  trains" if trains(outcome.task.claim) else dear
        lines.append(f"  {outcome.cpu_seconds:.3f}  {outcome.task.card} {outcome.task.claim.id}{note}")
    return lines


# --------------------------------------------------------------------------------------------------------------------
# Receipts


class NotWritten(Exception):
    """Receipts that must not be written as asked; the message says why and what to do."""


def renew(card_id: str, card: Card | None, outcomes: Sequence[Outcome], *, whole: bool, folder: Path) -> str:
    """Write the receipts of one card; what came of it, in words. A whole card replaces a file that can't be read.

    Raises: NotWritten for some claims of a file that can't be read or is from another machine.
    """
    machine = receipts.this_machine()
    try:
        earlier = receipts.load(card_id, folder)
    except receipts.ReceiptsError as error:
        if not whole:
            raise NotWritten(f"{error}, for the whole card") from None
        earlier = receipts.CardReceipts()
    if not whole and earlier.claims and earlier.machine != machine:
        raise NotWritten(f"its receipts are from another machine ({earlier.machine}); renew the whole card")
    today = datetime.date.today().isoformat()
    made = {
        outcome.task.claim.id: receipts.receipt(
            outcome.task.claim, outcome.verdict, today, earlier.claims.get(outcome.task.claim.id)
        )
        for outcome in outcomes
        if outcome.verdict is not None
    }
    claims = made if whole else {**earlier.claims, **made}
    labs = dict(earlier.labs)
    notes = []
    if whole and card is not None:
        results = {lab.id: runner.run(lab.experiment, lab.params) for lab in card.labs}
        notes = [
            f"  {card_id}: lab {lab} ended at {result.done:.0%} of its work"
            for lab, result in results.items()
            if result.done < 1
        ]
        labs = {lab.id: receipts.lab_receipt(lab, results[lab.id]) for lab in card.labs}
        labs = receipts.fitted(labs, {lab.id: registry.get(lab.experiment).plots for lab in card.labs})
    receipts.write(card_id, receipts.CardReceipts(machine, claims, labs), folder)
    return "\n".join([f"{card_id}: {len(made)} claims and {len(labs)} labs written", *notes])


# --------------------------------------------------------------------------------------------------------------------
# The command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="run_claims", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--card", metavar="ID", action="append", default=[], help="only this card; may be repeated")
    made.add_argument("--claim", metavar="ID", action="append", default=[], help="only this claim; may be repeated")
    made.add_argument("--seeds", metavar="N", type=_positive, help="on the seeds 0 to N-1 instead of the claim's own")
    made.add_argument("--device", default="cpu", help="cpu, cuda:0, mps, xpu:0 (default: cpu)")
    made.add_argument("--dtype", default="float32", choices=devices.DTYPES)
    made.add_argument("--check-fails", action="store_true", help="each claim must fail under its fails_when")
    made.add_argument("--write", action="store_true", help="renew the receipts (on the CPU in float32 only)")
    made.add_argument("--json", action="store_true", help="print one list of objects; everything else goes to stderr")
    made.add_argument("--jobs", metavar="N", type=_positive, default=1, help="worker processes (default: 1)")
    made.add_argument("--deck", metavar="FOLDER", type=Path, default=HOME, help="another deck")
    made.add_argument(
        "--receipts", metavar="FOLDER", type=Path, default=receipts.FOLDER, help="where receipts are kept"
    )
    return made


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, wanted at least 1")
    return value


def select(deck: Deck, options: argparse.Namespace) -> list[Task]:
    """What to verify.

    Raises: LookupError for a name that the deck lacks.
    """
    everything = deck.claims
    _know(options.card, list(everything), "card")
    _know(options.claim, [claim.id for claims in everything.values() for claim in claims], "claim")
    tasks = []
    for card, claims in everything.items():
        for claim in claims:
            if (not options.card or card in options.card) and (not options.claim or claim.id in options.claim):
                seeds = claim.seeds
                if options.seeds and seeds:
                    asked = set(range(options.seeds))
                    seeds = tuple(sorted(asked | set(seeds) if options.write else asked))  # a receipt shows its own
                tasks.append(Task(card, claim, seeds, options.device, options.dtype, options.check_fails))
    if not tasks and (options.card or options.claim):
        raise LookupError(f"none of the claims {', '.join(options.claim)} is of {', '.join(options.card)}")
    return tasks


def _know(asked: Sequence[str], known: list[str], what: str) -> None:
    for name in asked:
        if name not in known:
            raise LookupError(f"got {what} {name!r}; the deck has none{did_you_mean(name, known)}")


def main(arguments: Sequence[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(arguments)
    if options.write and (options.device, options.dtype) != ("cpu", "float32"):
        command.error("--write keeps receipts of the CPU in float32 only")
    say = sys.stderr if options.json else sys.stdout
    try:
        deck = load_deck(options.deck)
        for broken in deck.broken:
            print(*broken.problems, sep="\n", file=sys.stderr)
        devices.get(options.device)
        tasks = select(deck, options)
    except ContentError as error:
        print(error, file=sys.stderr)
        return 1
    except LookupError as error:
        command.error(str(error))

    progress = Progress(len(tasks), sys.stderr)
    outcomes: list[Outcome] = []
    written: list[str] = []
    unwritten = False
    try:
        for outcome in measured(tasks, options.jobs, progress):
            outcomes.append(outcome)
            progress.done += 1
            progress.clear()
            print(line(outcome), file=say, flush=True)
        if options.write:
            for card in dict.fromkeys(task.card for task in tasks):
                progress.show(f"receipts of {card}")
                of_card = [outcome for outcome in outcomes if outcome.task.card == card]
                try:
                    note = renew(card, deck.cards.get(card), of_card, whole=not options.claim, folder=options.receipts)
                    written.append(card)
                except (*FORESEEN, NotWritten, OSError) as error:
                    note = f"{card}: not written, {error}"
                    unwritten = True
                progress.clear()
                print(note, file=say, flush=True)
    except KeyboardInterrupt:
        progress.clear()
        left = f"receipts written: {len(written)} cards" if written else "no receipts written"
        print(f"stopped: {len(outcomes)} of {len(tasks)} claims verified, {left}", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps([as_json(outcome) for outcome in outcomes], indent=1, allow_nan=False))
    bad = sum(not outcome.good for outcome in outcomes)
    if outcomes:
        print(*dearest(outcomes), sep="\n", file=say)
    print(f"{len(outcomes) - bad} of {len(tasks)} claims hold", file=say)
    return 1 if bad or unwritten or deck.broken else 0


if __name__ == "__main__":
    sys.exit(main())
