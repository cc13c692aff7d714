"""receipts.py: what is kept, what is carried on, what makes a receipt stale, and what a file looks like."""

import dataclasses
import json
import math

import numpy as np
import pytest

from claims import receipts
from claims.receipts import (
    CardReceipts,
    LabReceipt,
    Machine,
    Receipt,
    ReceiptsError,
    claim_hash,
    load,
    staleness,
    write,
)
from claims.verify import Verdict
from content.loader import load_deck
from engine import registry, runner
from engine.base import Plot
from tests.claims import DECK
from tests.claims.pretended import claim

HERE = Machine("A processor", "2.13.0", "3.11.7")


@pytest.fixture(autouse=True)
def _hashes(monkeypatch):
    """Experiments that exist in these tests only have a code hash as well."""
    monkeypatch.setattr(receipts, "code_hash", lambda experiment: f"code of {experiment}")


def verdict(
    values: dict[int, float], *, holds: bool = True, failed: tuple[int, ...] = (), seconds: float = 0.1234
) -> Verdict:
    return Verdict(
        claim="a-claim",
        card="a-card",
        value=float(np.median(list(values.values()))),
        values=tuple(values.values()),
        low=1.0,
        high=None,
        holds=holds,
        failed_seeds=failed,
        seeds=tuple(values),
        device="cpu",
        dtype="float32",
        torch="2.13.0",
        seconds=seconds,
    )


CLAIM = claim({"at_least": 1}, seeds=(0, 1, 2))
THREE = {0: 3.0, 1: 1.0, 2: 2.0}


# --------------------------------------------------------------------------------------------------------------------
# One receipt


def test_a_receipt_is_the_verdict_with_its_date_and_hashes():
    made = receipts.receipt(CLAIM, verdict(THREE), "2026-01-02")
    assert (made.value, made.values, made.seeds, made.tried) == (2.0, (3.0, 1.0, 2.0), (0, 1, 2), 3)
    assert (made.date, made.claim_hash, made.code_hash) == ("2026-01-02", claim_hash(CLAIM), "code of pretended")
    assert (made.claim, made.card, made.holds, made.low, made.high) == ("a-claim", "a-card", True, 1.0, None)


def test_further_seeds_are_counted_but_the_value_shown_is_that_of_the_claims_own():
    many = {**dict.fromkeys(range(50), 100.0), **THREE}
    made = receipts.receipt(CLAIM, verdict(many), "2026-01-02")
    assert (made.value, made.values, made.seeds, made.tried) == (2.0, (3.0, 1.0, 2.0), (0, 1, 2), 50)


def test_a_claim_that_fails_on_a_further_seed_does_not_hold():
    many = {**dict.fromkeys(range(50), 100.0), **THREE, 37: 0.0}
    made = receipts.receipt(CLAIM, verdict(many, holds=False, failed=(37,)), "2026-01-02")
    assert (made.holds, made.failed_seeds, made.tried) == (False, (37,), 50)


def test_the_date_changes_only_with_the_values():
    first = receipts.receipt(CLAIM, verdict(THREE), "2026-01-02")
    same = receipts.receipt(CLAIM, verdict(THREE, seconds=9.9), "2026-05-05", first)
    assert same == first
    other = receipts.receipt(CLAIM, verdict({**THREE, 2: 2.5}), "2026-05-05", first)
    assert other.date == "2026-05-05"
    assert other.value == 2.5


def test_new_code_with_old_values_renews_the_hash_and_keeps_the_date(monkeypatch):
    first = receipts.receipt(CLAIM, verdict(THREE), "2026-01-02")
    monkeypatch.setattr(receipts, "code_hash", lambda experiment: "mended")
    again = receipts.receipt(CLAIM, verdict(THREE), "2026-05-05", first)
    assert (again.code_hash, again.date) == ("mended", "2026-01-02")


def test_the_number_of_seeds_tried_is_carried_on_while_claim_and_code_stay(monkeypatch):
    many = receipts.receipt(CLAIM, verdict({**dict.fromkeys(range(50), 5.0), **THREE}), "2026-01-02")
    assert receipts.receipt(CLAIM, verdict(THREE), "2026-05-05", many).tried == 50
    reworded = CLAIM.model_copy(update={"because": "otherwise"})
    assert receipts.receipt(reworded, verdict(THREE), "2026-05-05", many).tried == 50
    stricter = claim({"at_least": 1.5}, seeds=(0, 1, 2))
    assert receipts.receipt(stricter, verdict(THREE), "2026-05-05", many).tried == 3
    failed = dataclasses.replace(many, holds=False)
    assert receipts.receipt(CLAIM, verdict(THREE), "2026-05-05", failed).tried == 3
    monkeypatch.setattr(receipts, "code_hash", lambda experiment: "mended")
    assert receipts.receipt(CLAIM, verdict(THREE), "2026-05-05", many).tried == 3


def test_a_claim_in_which_nothing_is_random_has_the_one_seed_0():
    made = receipts.receipt(claim({"at_least": 1}, seeds=()), verdict({0: 7.0}), "2026-01-02")
    assert (made.seeds, made.values, made.tried) == ((0,), (7.0,), 1)


# --------------------------------------------------------------------------------------------------------------------
# Stale


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"because": "another reason"}, None),
        ({"statement": {"en": "Otherwise.", "zh": "换句话说。"}}, None),
        ({"fails_when": {"other": 3}}, None),
        ({"limit": True}, None),
        ({"params": {"size": 64.0}}, None),  # the same number written otherwise
        ({"params": {"size": 65}}, "claim"),
        ({"params": {}}, "claim"),
        ({"metric": "second"}, "claim"),
        ({"seeds": (0, 1)}, "claim"),
        ({"expect": {"at_least": 1.001}}, "claim"),
        ({"expect": {"at_most": 1}}, "claim"),
        ({"expect": {"greater": True}, "versus": {"other": 1}}, "claim"),
    ],
)
def test_what_makes_a_receipt_stale(change, reason):
    fields = {"expect": {"at_least": 1}, "params": {"size": 64}}
    held = receipts.receipt(claim(**fields), verdict(THREE), "2026-01-02")
    assert staleness(held, claim(**{**fields, **change})) == reason


def test_changed_or_vanished_code_makes_a_receipt_stale(monkeypatch):
    held = receipts.receipt(CLAIM, verdict(THREE), "2026-01-02")
    monkeypatch.setattr(receipts, "code_hash", lambda experiment: "mended")
    assert staleness(held, CLAIM) == "code"
    assert staleness(held, claim({"at_least": 2})) == "claim"

    def gone(experiment):
        raise registry.UnknownExperiment(experiment)

    monkeypatch.setattr(receipts, "code_hash", gone)
    assert staleness(held, CLAIM) == "code"


def test_a_labs_receipt_goes_stale_with_its_run(monkeypatch):
    card = load_deck(DECK).cards["spread-of-qk"]
    lab = card.lab("spread")
    made = receipts.lab_receipt(lab, runner.run(lab.experiment, lab.params))
    assert receipts.lab_staleness(made, lab) is None
    assert receipts.lab_staleness(made, lab.model_copy(update={"controls": ("d_k",)})) is None
    assert receipts.lab_staleness(made, card.lab("scaled")) == "lab"
    monkeypatch.setattr(receipts, "code_hash", lambda experiment: "mended")
    assert receipts.lab_staleness(made, lab) == "code"


# --------------------------------------------------------------------------------------------------------------------
# Labs


def test_a_labs_receipt_holds_what_its_plots_draw_to_six_digits():
    lab = load_deck(DECK).cards["spread-of-qk"].lab("spread")
    result = runner.run(lab.experiment, lab.params)
    made = receipts.lab_receipt(lab, result)
    assert set(made.tables) == {"histogram"}
    assert set(made.tables["histogram"]) == {"logits", "density", "theory_density"}
    assert set(made.metrics) == set(result.metrics)
    for name, value in result.metrics.items():
        assert made.metrics[name] == pytest.approx(value, rel=1e-5)  # half a unit of the sixth digit
        assert len(f"{made.metrics[name]:.12g}".replace("-", "").replace(".", "").strip("0")) <= 6


def curve(n: int, series: tuple[str, ...] = ("a", "b")) -> dict:
    """A table of several series over the same n values of x."""
    x = np.tile(np.arange(n), len(series))
    return {"x": x, "y": np.sin(x).astype(np.float32) * 1.234567, "by": np.repeat(np.array(series), n)}


LINE = (Plot("p", table="t", x="x", y="y", by="by"),)


def test_tables_that_fit_stay_as_they_are():
    labs = {"one": LabReceipt({}, {"t": curve(50)})}
    fitted = receipts.fitted(labs, {"one": LINE})
    assert fitted["one"].tables["t"]["x"].tolist() == curve(50)["x"].tolist()


def test_a_curve_is_thinned_until_it_fits_in_all_its_series_alike():
    labs = {"small": LabReceipt({}, {"t": curve(50)}), "large": LabReceipt({"m": 1.0}, {"t": curve(3000)})}
    fitted = receipts.fitted(labs, {"small": LINE, "large": LINE})
    for made in fitted.values():
        assert sum(map(receipts._size, made.tables.values())) <= receipts.TABLE_BYTES
    assert len(fitted["small"].tables["t"]["x"]) == 100
    table = fitted["large"].tables["t"]
    points = {name: table["x"][table["by"] == name].tolist() for name in "ab"}
    assert points["a"] == points["b"]
    assert (points["a"][0], points["a"][-1]) == (0, 2999)  # the ends of a curve are what people look for
    assert len(set(np.diff(points["a"][1:]))) == 1
    assert 100 < len(points["a"]) < 1000
    whole = curve(3000)
    assert set(zip(table["x"].tolist(), table["y"].tolist(), strict=True)) <= set(
        zip(whole["x"].tolist(), whole["y"].tolist(), strict=True)
    )
    assert fitted["large"].metrics == {"m": 1.0}


@pytest.mark.parametrize("mark", ["bar", "heat"])
def test_what_is_no_curve_and_does_not_fit_is_refused_with_its_size(mark):
    with pytest.raises(ReceiptsError, match=r"20000 are allowed: one\.t \d{5}"):
        receipts.fitted(
            {"one": LabReceipt({}, {"t": curve(3000)})}, {"one": (Plot("p", table="t", x="x", y="y", mark=mark),)}
        )


# --------------------------------------------------------------------------------------------------------------------
# Files


def everything() -> CardReceipts:
    tables = {
        "t": {"x": np.arange(3), "y": np.array([0.1, np.nan, 2.5], np.float32), "rule": np.array(["a", "b", "c"])}
    }
    return CardReceipts(
        HERE,
        {"a-claim": receipts.receipt(CLAIM, verdict(THREE), "2026-01-02")},
        {"a-lab": LabReceipt({"value": 1.5, "count": 4.0}, tables, 1.0, "lab", "code")},
    )


def test_a_file_gives_back_what_was_written(tmp_path):
    write("a-card", everything(), tmp_path)
    found = load("a-card", tmp_path)
    assert (found.machine, found.claims) == (HERE, everything().claims)
    assert isinstance(found.claims["a-claim"], Receipt)
    made, kept = found.labs["a-lab"], everything().labs["a-lab"]
    assert (made.metrics, made.done, made.lab_hash, made.code_hash) == (kept.metrics, 1.0, "lab", "code")
    for name, column in kept.tables["t"].items():
        assert made.tables["t"][name].dtype.kind == column.dtype.kind
        np.testing.assert_array_equal(made.tables["t"][name], column)
    assert [path.name for path in tmp_path.iterdir()] == ["a-card.json"]


def test_a_file_is_json_with_sorted_keys_one_a_line_and_lists_in_one(tmp_path):
    write("a-card", everything(), tmp_path)
    text = (tmp_path / "a-card.json").read_text()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(text, parse_constant=refuse)
    assert json.dumps(data, sort_keys=True) == json.dumps(data)
    assert '\n   "values": [3.0, 1.0, 2.0]\n' in text
    assert text.endswith("}\n")


def test_an_undefined_value_is_written_as_null_and_read_as_nan(tmp_path):
    made = receipts.receipt(
        CLAIM, verdict({0: 1.0, 1: math.nan, 2: math.inf}, holds=False, failed=(1, 2)), "2026-01-02"
    )
    write("a-card", CardReceipts(HERE, {"a-claim": made}, {}), tmp_path)
    found = load("a-card", tmp_path).claims["a-claim"]
    assert math.isnan(found.value)
    assert found.values[0] == 1.0
    assert math.isnan(found.values[1])
    assert not found.holds


def test_counts_stay_exact(tmp_path):
    count = 343597383680.0
    made = dataclasses.replace(everything().claims["a-claim"], value=count, values=(count,) * 3)
    lab = LabReceipt({"bytes": count}, {"t": {"x": np.array([2**40 + 1]), "y": np.array([2.0**20 + 1])}})
    write("a-card", CardReceipts(HERE, {"a-claim": made}, {"a-lab": lab}), tmp_path)
    found = load("a-card", tmp_path)
    assert found.claims["a-claim"].value == found.labs["a-lab"].metrics["bytes"] == count
    assert found.labs["a-lab"].tables["t"]["x"].tolist() == [2**40 + 1]
    assert found.labs["a-lab"].tables["t"]["y"].tolist() == [2**20 + 1]


def test_a_card_that_was_never_run_has_no_receipts(tmp_path):
    assert load("a-card", tmp_path) == CardReceipts()
    assert str(CardReceipts().machine) == "—"
    assert str(HERE) == "A processor · torch 2.13.0 · Python 3.11.7"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"machine": {}, "claims": {"a": {}}, "labs": {}}'])
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / "a-card.json").write_text(text)
    with pytest.raises(ReceiptsError, match=r"a-card\.json"):
        load("a-card", tmp_path)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    write("a-card", everything(), tmp_path)
    before = (tmp_path / "a-card.json").read_text()

    def crash(*paths):
        raise OSError("no space left")

    monkeypatch.setattr(receipts.os, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        write("a-card", CardReceipts(), tmp_path)
    assert (tmp_path / "a-card.json").read_text() == before
