"""Receipts: what the reference run measured for each claim, and drew for each lab, of a card.

One file a card, ``claims/receipts/<card>.json``, committed; it lets a page show its numbers and plots before torch is
imported. Keys are sorted, and a receipt whose values did not change keeps its date, so that a renewal shows in a diff
only what moved. A reader's own receipts never come here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from claims.verify import Verdict
from content.schema import Claim, Lab
from engine import devices, registry
from engine.base import Plot, Result, Table
from engine.fingerprint import code_hash

FOLDER = Path(__file__).parent / "receipts"
TABLE_BYTES = 20_000  # of all plot tables of a lab
DIGITS = 6  # significant ones of a number in a plot table: float32 has no more


@dataclass(frozen=True)
class Machine:
    """The machine of the reference run."""

    cpu: str = ""
    torch: str = ""
    python: str = ""

    def __str__(self) -> str:
        return f"{self.cpu} · torch {self.torch} · Python {self.python}" if self.cpu else "—"


@dataclass(frozen=True)
class Receipt(Verdict):
    """A verdict with its date and what it was about. ``tried``: on how many seeds the claim was run as it stands now.

    ``values`` are those of the claim's own seeds; ``holds`` and ``failed_seeds`` speak of all that were tried.
    """

    date: str
    claim_hash: str
    code_hash: str
    tried: int


@dataclass(frozen=True)
class LabReceipt:
    """What the default run of a lab measured, with the columns that its plots draw; ``done`` as in Result."""

    metrics: dict[str, float]
    tables: dict[str, Table]
    done: float = 1.0
    lab_hash: str = ""
    code_hash: str = ""


@dataclass(frozen=True)
class CardReceipts:
    """All receipts of a card; empty for a card that was never run."""

    machine: Machine = Machine()
    claims: Mapping[str, Receipt] = dataclasses.field(default_factory=dict)
    labs: Mapping[str, LabReceipt] = dataclasses.field(default_factory=dict)


class ReceiptsError(ValueError):
    """A file of receipts that can't be read, or tables that do not fit into one; the message names it."""


# --------------------------------------------------------------------------------------------------------------------
# Is a receipt still about this claim and this code?


def claim_hash(claim: Claim) -> str:
    """Changes with what a claim measures and expects, not with how it is said."""
    return _hash(
        claim.model_dump(include={"experiment", "params", "versus", "metric", "seeds", "expect"}, exclude_none=True)
    )


def lab_hash(lab: Lab) -> str:
    """Changes with what the default run of a lab is."""
    return _hash(lab.model_dump(include={"experiment", "params"}))


def staleness(receipt: Receipt, claim: Claim) -> Literal["claim", "code"] | None:
    """What changed since the receipt was made: the claim, the code behind it, or nothing that matters."""
    if receipt.claim_hash != claim_hash(claim):
        return "claim"
    return "code" if _code_changed(receipt.code_hash, claim.experiment) else None


def lab_staleness(receipt: LabReceipt, lab: Lab) -> Literal["lab", "code"] | None:
    """The same of a lab's run."""
    if receipt.lab_hash != lab_hash(lab):
        return "lab"
    return "code" if _code_changed(receipt.code_hash, lab.experiment) else None


def _code_changed(hash_then: str, experiment: str) -> bool:
    try:
        return hash_then != code_hash(experiment)
    except registry.UnknownExperiment:
        return True


def _hash(value: object) -> str:
    def plain(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {str(key): plain(item) for key, item in part.items()}
        if isinstance(part, (list, tuple)):
            return [plain(item) for item in part]
        # 64 and 64.0 are the same number, whichever an author writes
        return float(part) if isinstance(part, int) and not isinstance(part, bool) else part

    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------------------
# Making receipts


def this_machine() -> Machine:
    """The machine that computes now."""
    import torch

    return Machine(devices.get("cpu").name, str(torch.__version__), platform.python_version())


def receipt(claim: Claim, verdict: Verdict, date: str, earlier: Receipt | None = None) -> Receipt:
    """A verdict as a receipt. It may be about more seeds than the claim's own; those that are not are only counted.

    While claim and code stay, the largest number of seeds on which the claim held is carried on; while the values
    stay, the date is.
    """
    measured = dict(zip(verdict.seeds, verdict.values, strict=True))
    seeds = claim.seeds or (0,)
    values = tuple(measured[seed] for seed in seeds)
    made = Receipt(
        **{
            **_fields(verdict),
            "seeds": seeds,
            "values": values,
            "value": math.nan if any(map(math.isnan, values)) else float(np.median(values)),
            "seconds": float(f"{verdict.seconds:.2g}"),
        },
        date=date,
        claim_hash=claim_hash(claim),
        code_hash=code_hash(claim.experiment),
        tried=len(verdict.seeds),
    )
    if earlier is None:
        return made
    if earlier.holds and (earlier.claim_hash, earlier.code_hash) == (made.claim_hash, made.code_hash):
        made = dataclasses.replace(made, tried=max(made.tried, earlier.tried))
    if (earlier.seeds, earlier.values) == (made.seeds, made.values):
        made = dataclasses.replace(made, date=earlier.date, seconds=earlier.seconds)
    return made


def lab_receipt(lab: Lab, result: Result) -> LabReceipt:
    """The run of a lab as a receipt, with those columns that its plots draw."""
    experiment = registry.get(lab.experiment)
    tables: dict[str, Table] = {}
    for plot in experiment.plots:
        for name in plot.columns:
            tables.setdefault(plot.table, {})[name] = result.tables[plot.table][name]
    metrics = {name: _rounded(value) for name, value in result.metrics.items()}
    return LabReceipt(metrics, tables, result.done, lab_hash(lab), code_hash(lab.experiment))


def fitted(labs: Mapping[str, LabReceipt], plots: Mapping[str, tuple[Plot, ...]]) -> dict[str, LabReceipt]:
    """The labs of a card, the tables of each thinned to :data:`TABLE_BYTES` together.

    The largest curve loses every other of its points, in all its series alike, until they fit. Bars and heat maps
    can't be thinned. ``plots``: those of each lab's experiment.

    Raises: ReceiptsError that names the sizes.
    """
    return {lab: _fitted(lab, made, plots[lab]) for lab, made in labs.items()}


def _fitted(lab: str, made: LabReceipt, plots: tuple[Plot, ...]) -> LabReceipt:
    while True:
        sizes = {name: _size(table) for name, table in made.tables.items()}
        if sum(sizes.values()) <= TABLE_BYTES:
            return made
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            thinner = _thinner(made.tables[name], [plot for plot in plots if plot.table == name])
            if thinner is not None:
                made = dataclasses.replace(made, tables={**made.tables, name: thinner})
                break
        else:
            listed = ", ".join(f"{lab}.{name} {size}" for name, size in sizes.items())
            raise ReceiptsError(
                f"the plot tables take {sum(sizes.values())} bytes, {TABLE_BYTES} are allowed: {listed}"
            )


def _thinner(table: Table, plots: list[Plot]) -> Table | None:
    """The table with every other value of x and both ends. None for what is no curve, or has become short."""
    axes = {plot.x for plot in plots}
    if len(axes) > 1 or any(plot.mark in ("bar", "heat") for plot in plots):
        return None
    x = table[axes.pop()]
    points = np.unique(x)
    if len(points) < 16 or x.dtype.kind not in "iuf":
        return None
    kept = np.isin(x, [points[0], *points[::-1][::2]])
    return {name: column[kept] for name, column in table.items()}


# --------------------------------------------------------------------------------------------------------------------
# Files


def load(card: str, folder: Path = FOLDER) -> CardReceipts:
    """The committed receipts of a card; none for a card that has no file.

    Raises: ReceiptsError.
    """
    path = folder / f"{card}.json"
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return CardReceipts()
    except (OSError, ValueError, RecursionError) as error:
        raise ReceiptsError(f"{path.name}: can't be read: {error}; run tools/run_claims.py --write") from None
    try:
        machine = Machine(**data["machine"])
        claims = {name: _receipt_from(card, name, machine, fields) for name, fields in data["claims"].items()}
        labs = {name: _lab_from(fields) for name, fields in data["labs"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ReceiptsError(f"{path.name}: not a file of receipts ({error}); run tools/run_claims.py --write") from None
    return CardReceipts(machine, claims, labs)


def write(card: str, receipts: CardReceipts, folder: Path = FOLDER) -> None:
    """Write the receipts of a card; a crash on the way leaves the old file."""
    data = {
        "machine": dataclasses.asdict(receipts.machine),
        "claims": {name: _receipt_data(made) for name, made in receipts.claims.items()},
        "labs": {name: _lab_data(made) for name, made in receipts.labs.items()},
    }
    path = folder / f"{card}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(f"{_lines(data)}\n", "utf-8")
    os.replace(new, path)


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {field.name: getattr(verdict, field.name) for field in dataclasses.fields(Verdict)}


_KNOWN_FROM_THE_FILE = ("claim", "card", "torch")


def _receipt_data(made: Receipt) -> dict[str, Any]:
    data = {name: value for name, value in dataclasses.asdict(made).items() if name not in _KNOWN_FROM_THE_FILE}
    return {**data, "value": _json_number(made.value), "values": [_json_number(value) for value in made.values]}


def _receipt_from(card: str, claim: str, machine: Machine, data: dict[str, Any]) -> Receipt:
    lists = {name: tuple(data[name]) for name in ("seeds", "failed_seeds")}
    values = tuple(_number_from(value) for value in data["values"])
    numbers = {"value": _number_from(data["value"]), "values": values}
    return Receipt(**{**data, **lists, **numbers, "claim": claim, "card": card, "torch": machine.torch})


def _lab_data(made: LabReceipt) -> dict[str, Any]:
    return {
        "metrics": {name: _json_number(value) for name, value in made.metrics.items()},
        "tables": {name: _table_data(table) for name, table in made.tables.items()},
        "done": made.done,
        "lab_hash": made.lab_hash,
        "code_hash": made.code_hash,
    }


def _lab_from(data: dict[str, Any]) -> LabReceipt:
    tables = {
        name: {column: _column_from(values) for column, values in table.items()}
        for name, table in data["tables"].items()
    }
    metrics = {name: _number_from(value) for name, value in data["metrics"].items()}
    return LabReceipt(metrics, tables, data["done"], data["lab_hash"], data["code_hash"])


def _table_data(table: Table) -> dict[str, list[Any]]:
    return {
        name: [_json_number(_rounded(value)) if isinstance(value, float) else value for value in column.tolist()]
        for name, column in table.items()
    }


def _column_from(values: list[Any]) -> np.ndarray:
    """Names, whole numbers as int64, everything else as float32; null is nan."""
    if all(isinstance(value, str) for value in values):
        return np.array(values, dtype=str)
    if all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    return np.array([_number_from(value) for value in values], dtype=np.float32)


def _rounded(value: float) -> float:
    """To six significant digits; whole numbers stay exact."""
    return value if not math.isfinite(value) or value == int(value) else float(f"{value:.{DIGITS}g}")


def _json_number(value: float) -> float | None:
    """JSON has no nan and no infinity."""
    return value if math.isfinite(value) else None


def _number_from(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _size(table: Table) -> int:
    return len(json.dumps(_table_data(table)))


def _lines(data: object, indent: str = "") -> str:
    """JSON with sorted keys, one key a line and lists in one line, so that a diff shows which number moved."""
    if not isinstance(data, dict) or not data:
        return json.dumps(data, ensure_ascii=False, allow_nan=False)
    inner = indent + " "
    items: Iterator[str] = (f"{inner}{json.dumps(key)}: {_lines(data[key], inner)}" for key in sorted(data))
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"
