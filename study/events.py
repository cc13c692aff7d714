"""The events of a reader's log: what was answered, taken back, predicted, set. Immutable; each with an id and a time.

A line of an exported log is one event as JSON. ``v`` is the version of its form: what is written today must be read for
ever, so a form never changes; a new one gets a new number beside the old. Events of a newer app are refused with their
line, never dropped.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from study.schedule import RETENTION

LONGEST_LINE = 100_000  # characters; an event of ours has some hundreds
LONGEST_TEXT = 20_000

Id = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]
EARLIEST, LATEST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


def _in_utc(time: datetime) -> datetime:
    if not EARLIEST <= time < LATEST:
        raise ValueError(f"got {time}; wanted a time from {EARLIEST.year} on, before {LATEST.year}")
    return time.astimezone(UTC)


def _is_day(value: str | None) -> str | None:
    if value is not None and not EARLIEST.date() <= date.fromisoformat(value) < LATEST.date():
        raise ValueError(f"got {value}; wanted a day from {EARLIEST.year} on, before {LATEST.year}")
    return value


Time = Annotated[AwareDatetime, AfterValidator(_in_utc)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def new_id() -> str:
    """An id that no other event has."""
    return uuid.uuid4().hex


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    id: Id = Field(default_factory=new_id)
    at: Time


class Review(_Event):
    """An item was answered. ``rating``: 1 again, 2 hard, 3 good, 4 easy; only those that ``counts`` move its date."""

    kind: Literal["review"] = "review"
    item: Name
    mode: Literal["review", "practice", "exam"]
    score: Annotated[float, Field(ge=0, le=1)]
    rating: Annotated[int, Field(ge=1, le=4)]
    counts: bool
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    attempt: Annotated[int, Field(ge=0)] = 0
    answer: Annotated[str, Field(max_length=LONGEST_TEXT)] = ""


class Undo(_Event):
    """A review is taken back. The review stays in the log; what is computed leaves it out."""

    kind: Literal["undo"] = "undo"
    of: Id


class Prediction(_Event):
    """A value, or a direction (2: larger, 0.5: smaller), that was committed to before a run, and what came out."""

    kind: Literal["prediction"] = "prediction"
    ask: Literal["value", "direction"] = "value"
    experiment: Name
    metric: Name
    predicted: Number
    measured: Number
    claim: str = ""


# What each setting may be.
SETTINGS: dict[str, TypeAdapter[Any]] = {
    "retention": TypeAdapter(Annotated[float, Field(strict=True, ge=RETENTION[0], le=RETENTION[1])]),
    "new_a_day": TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=200)]),
    "minutes_a_day": TypeAdapter(Annotated[float, Field(strict=True, ge=5, le=480)]),
    "interview": TypeAdapter(Annotated[str | None, AfterValidator(_is_day)]),
    "track": TypeAdapter(Annotated[str, Field(max_length=200)] | None),
    "practice_counts": TypeAdapter(StrictBool),
}


class Setting(_Event):
    """A setting of the reader: the last of each name counts."""

    kind: Literal["setting"] = "setting"
    name: Literal["retention", "new_a_day", "minutes_a_day", "interview", "track", "practice_counts"]
    value: str | float | bool | None

    @model_validator(mode="after")
    def _fits(self) -> Setting:
        SETTINGS[self.name].validate_python(self.value)
        return self


class Exam(_Event):
    """An exam was begun: its items, each with its attempt, and its clock. Its id is the event's."""

    kind: Literal["exam"] = "exam"
    items: Annotated[tuple[tuple[Name, Annotated[int, Field(ge=0)]], ...], Field(min_length=1, max_length=500)]
    minutes: Annotated[float, Field(gt=0, le=600)]


class Sheet(_Event):
    """What stands on the answer sheet of an exam at one place; the last for each place counts."""

    kind: Literal["sheet"] = "sheet"
    exam: Id
    place: Annotated[int, Field(ge=0)]
    answer: Annotated[str, Field(max_length=LONGEST_TEXT)] = ""
    flagged: bool = False


class Submitted(_Event):
    """An exam was handed in; the first counts."""

    kind: Literal["submitted"] = "submitted"
    exam: Id


class Report(_Event):
    """A reader says that something is wrong with an item."""

    kind: Literal["report"] = "report"
    item: Name
    words: Annotated[str, Field(max_length=LONGEST_TEXT)]


class Measured(_Event):
    """A receipt of the reader's own device."""

    kind: Literal["measured"] = "measured"
    card: Name
    claim: Name
    claim_hash: Name  # of what was measured, and by which code: another one is another claim
    code_hash: Name
    values: tuple[Number | None, ...]  # None is no number: a ratio to 0, a run that diverged
    value: Number | None
    holds: bool
    seeds: tuple[int, ...]
    failed_seeds: tuple[int, ...]
    device: Name
    dtype: Name
    torch: Name
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]


Event = Annotated[
    Review | Undo | Prediction | Setting | Exam | Sheet | Submitted | Report | Measured,
    Field(discriminator="kind"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class BadLine(ValueError):
    """A line that is no event of ours. ``reason`` is a name of strings.yaml."""

    def __init__(self, line: int, reason: str, detail: str) -> None:
        super().__init__(f"line {line}: {reason}: {detail}")
        self.line, self.reason, self.detail = line, reason, detail


def write_line(event: Any) -> str:
    """An event as one line of JSON."""
    return str(event.model_dump_json())


def read_line(line: str, number: int = 1) -> Event:
    """The event of a line.

    Raises: BadLine.
    """
    if len(line) > LONGEST_LINE:
        raise BadLine(number, "log_line_too_long", f"{len(line)} > {LONGEST_LINE}")
    try:
        return _EVENT.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = [str(part) for part in first["loc"]]
        newer = where[-1:] == ["v"] or (first["type"] == "union_tag_invalid" and re.search(r'"v":\s*\d', line))
        field = {"union_tag_invalid": "kind", "union_tag_not_found": "kind", "json_invalid": "JSON"}.get(first["type"])
        detail = field or ".".join(where[1:] or where)
        raise BadLine(number, "log_line_newer" if newer else "log_line_damaged", detail) from None


def read_lines(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a file, empty lines left out.

    Raises: BadLine at the first that is none.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield read_line(line, number)


def now() -> datetime:
    """The time, as events have it."""
    return datetime.now(UTC)
