"""tools/run_claims.py on the small deck: what it prints, writes and returns, and what it does with bad claims."""

import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from claims import receipts
from claims.receipts import Machine
from engine import runner
from tests.claims import DECK
from tools import run_claims

ROOT = Path(run_claims.__file__).parent.parent
CARD = "cards/scaling/spread-of-qk.yaml"
ALL = 8  # claims of the deck, one of them without a card


@pytest.fixture(autouse=True)
def _empty_cache():
    runner.cache.clear()


@pytest.fixture
def deck(tmp_path):
    """A copy of the deck to spoil."""
    return Path(shutil.copytree(DECK, tmp_path / "deck"))


def spoil(deck: Path, old: str, new: str, file: str = CARD) -> None:
    text = (deck / file).read_text("utf-8")
    assert text.count(old) == 1, (old, text.count(old))
    (deck / file).write_text(text.replace(old, new), "utf-8")


def run(capsys, *arguments: object, deck: Path = DECK) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        status = run_claims.main(["--deck", str(deck), *map(str, arguments)])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def test_it_runs_as_a_script_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tools/run_claims.py", "--deck", DECK, "--card", "spread-of-qk"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith("holds  spread-of-qk variance-is-d-k  ")
    assert done.stdout.splitlines()[-1] == "7 of 7 claims hold"


def test_a_line_for_each_claim_with_value_interval_seeds_and_seconds(capsys):
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[2].split("  ")[:6] == [
        "holds",
        "spread-of-qk scale-divides-variance-by-d-k",
        "64",
        "= 64",
        "seeds 0-1",
        "cpu float32",
    ]
    assert lines[3].split("  ")[:5] == ["holds", "spread-of-qk formula-at-64", "8", "= 8", "seed 0"]
    assert lines[5].split("  ")[2:4] == ["0.125", "< 1"]
    assert sum(line.startswith("holds") for line in lines) == ALL
    dear = lines[lines.index(next(line for line in lines if line.startswith("Dearest"))) + 1 : -1]
    costs = [float(line.split()[0]) for line in dear]
    assert len(dear) == ALL
    assert costs == sorted(costs, reverse=True)


def test_json_is_one_list_with_exactly_the_agreed_fields(capsys):
    status, out, err = run(capsys, "--json")
    found = json.loads(out)
    assert status == 0
    assert [set(entry) for entry in found] == [set(run_claims.JSON_FIELDS)] * ALL
    by_claim = {entry["claim"]: entry for entry in found}
    exact = by_claim["scale-divides-variance-by-d-k"]
    assert {name: exact[name] for name in ("card", "value", "low", "high", "holds", "seeds", "device", "dtype")} == {
        "card": "spread-of-qk",
        "value": 64.0,
        "low": 64.0,
        "high": 64.0,
        "holds": True,
        "seeds": [0, 1],
        "device": "cpu",
        "dtype": "float32",
    }
    assert by_claim["correlated-variance-doubles"]["high"] is None
    assert by_claim["uniform-spreads-the-same"]["card"] == "claims/qk_variance"
    assert err.count("holds  ") == ALL  # the lines for people


def test_choosing_cards_claims_and_seeds(capsys):
    _, out, _ = run(capsys, "--json", "--claim", "variance-is-d-k", "--claim", "formula-at-64", "--seeds", 5)
    assert [(entry["claim"], entry["seeds"]) for entry in json.loads(out)] == [
        ("variance-is-d-k", [0, 1, 2, 3, 4]),
        ("formula-at-64", [0]),  # nothing is random in it
    ]
    _, out, _ = run(capsys, "--json", "--card", "claims/qk_variance")
    assert [entry["claim"] for entry in json.loads(out)] == ["uniform-spreads-the-same"]
    _, out, _ = run(capsys, "--json", "--claim", "variance-is-d-k", "--dtype", "float64")
    assert json.loads(out)[0]["dtype"] == "float64"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--card", "spread-of-kq"], "did you mean spread-of-qk?"),
        (["--claim", "variance-is-d_k"], "did you mean variance-is-d-k?"),
        (["--device", "cuda:7"], "this machine has"),
        (["--seeds", "0"], "at least 1"),
        (["--write", "--dtype", "float64"], "float32 only"),
    ],
)
def test_a_bad_command_line_says_what_would_do(capsys, arguments, said):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert said in err


def test_a_claim_that_does_not_hold_is_told_with_its_seeds(capsys, deck):
    spoil(deck, "expect: {approx: 64, rel_tol: 0.13}", "expect: {approx: 65.3, rel_tol: 0.01}")
    status, out, _ = run(capsys, deck=deck)
    assert status == 1
    lines = out.splitlines()
    assert lines[0].startswith("FAILS  spread-of-qk variance-is-d-k")
    assert any(line.strip().startswith("seed ") for line in lines[1:4])
    assert lines[-1] == f"{ALL - 1} of {ALL} claims hold"
    status, out, _ = run(capsys, "--json", deck=deck)
    assert status == 1
    assert [entry["holds"] for entry in json.loads(out)] == [False] + [True] * (ALL - 1)


def test_a_ratio_to_zero_is_a_failure_in_words(capsys, deck):
    spoil(deck, "versus: {metric: theory_mean}", "versus: {q_mean: 0}\n    # the formula's mean is 0 then")
    spoil(deck, "metric: logits_mean\n", "metric: theory_mean\n")
    status, out, _ = run(capsys, deck=deck)
    assert status == 1
    failed = out.splitlines()[4]
    assert failed.startswith("FAILS  spread-of-qk measured-agrees-with-formula  undefined  [0.95, 1.05]")
    assert "a ratio to 0" in out.splitlines()[5]
    status, out, _ = run(capsys, "--json", deck=deck)
    assert json.loads(out)[4]["value"] is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("metric: theory_std", "metric: theory_st", "qk_variance has logits_mean"),
        (
            "params: {d_k: 64, n_pairs: 256}\n    metric: theory_std",
            "params: {d_k: 0}\n    metric: theory_std",
            "wanted a value from 1",
        ),
        (
            "    experiment: qk_variance\n    params: {d_k: 64, n_pairs: 256}\n",
            "    experiment: qk_varianc\n",
            "did you mean qk_variance?",
        ),
        ("expect: {equals: 8}", "expect: {equals: [8, 8]}", "a metric is one number"),
    ],
)
def test_a_claim_that_can_not_run_is_an_error_and_the_others_go_on(capsys, deck, old, new, said):
    spoil(deck, old, new)
    status, out, err = run(capsys, deck=deck)
    assert (status, err) == (1, "")
    assert "error  spread-of-qk formula-at-64" in out
    assert said in out
    assert out.splitlines()[-1] == f"{ALL - 1} of {ALL} claims hold"
    status, out, _ = run(capsys, "--json", deck=deck)
    entry = json.loads(out)[3]
    assert (entry["claim"], entry["holds"], entry["value"]) == ("formula-at-64", False, None)


def test_a_card_that_can_not_be_read_is_named_and_the_others_go_on(capsys, deck):
    (deck / "cards/scaling/broken.yaml").write_text("id: [")
    status, out, err = run(capsys, deck=deck)
    assert status == 1
    assert "broken.yaml:" in err
    assert out.splitlines()[-1] == f"{ALL} of {ALL} claims hold"


def test_an_empty_deck_has_nothing_to_fail(capsys, tmp_path):
    assert run(capsys, deck=tmp_path)[:2] == (0, "0 of 0 claims hold\n")
    assert run(capsys, "--json", deck=tmp_path)[:2] == (0, "[]\n")
    status, _, err = run(capsys, deck=tmp_path / "nowhere")
    assert status == 1
    assert "no such folder" in err


def test_check_fails_finds_a_claim_that_can_not_fail(capsys, deck):
    assert run(capsys, "--check-fails", deck=deck)[0] == 0
    spoil(deck, "fails_when: {d_k: 65}", "fails_when: {n_pairs: 512}")
    assert run(capsys, deck=deck)[0] == 0
    status, out, _ = run(capsys, "--check-fails", deck=deck)
    assert status == 1
    assert "still holds with {'n_pairs': 512} on seed 0" in out


def test_a_dear_claim_is_warned_of(capsys, deck):
    spoil(
        deck,
        "params: {d_k: 64, q_mean: 1, k_mean: 1, n_pairs: 4096}",
        "params: {d_k: 4096, q_mean: 1, k_mean: 1, n_pairs: 8192}",
    )
    _, out, _ = run(capsys, deck=deck)  # 67 million random numbers take half a second and more on any core
    assert [line.split()[2] for line in out.splitlines() if "too dear" in line] == ["measured-agrees-with-formula"]


@pytest.mark.claims  # two more imports of torch
def test_worker_processes_find_the_same(capsys):
    def without_seconds(out):
        return sorted(({**entry, "seconds": 0} for entry in json.loads(out)), key=lambda entry: entry["claim"])

    one = run(capsys, "--json")
    two = run(capsys, "--json", "--jobs", 2)
    assert (one[0], two[0]) == (0, 0)
    assert without_seconds(two[1]) == without_seconds(one[1])


def test_claims_about_one_training_stay_together(monkeypatch):
    from tests.claims.pretended import claim, install

    install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 0.0}, trains=True)
    tasks = [
        run_claims.Task(card, claim({"equals": 1}, id=name, experiment=experiment), (0,), "cpu", "float32", False)
        for card, name, experiment in [
            ("one", "a-a", "pretended"),
            ("one", "b-b", "qk_variance"),
            ("one", "c-c", "pretended"),
            ("one", "d-d", "qk_variance"),
            ("two", "e-e", "pretended"),
        ]
    ]
    assert [[task.claim.id for task in group] for group in run_claims.groups(tasks)] == [
        ["a-a", "c-c"],
        ["b-b"],
        ["d-d"],
        ["e-e"],
    ]


def test_claims_about_one_training_share_its_runs(monkeypatch):
    from tests.claims.pretended import claim, install

    calls = install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 0.0}, trains=True)
    for name in ("a-a", "b-b"):
        task = run_claims.Task("one", claim({"equals": 1}, id=name), (0, 1, 2), "cpu", "float32", False)
        assert run_claims.measure(task).good
    assert len(calls) == 3


# --------------------------------------------------------------------------------------------------------------------
# Receipts


def write(capsys, folder: Path, *arguments: object, deck: Path = DECK) -> str:
    status, out, err = run(capsys, "--write", "--receipts", folder, *arguments, deck=deck)
    assert (status, err) == (0, "")
    return out


def test_write_keeps_receipts_that_are_fresh_and_do_not_change_when_renewed(capsys, tmp_path, monkeypatch):
    out = write(capsys, tmp_path)
    assert "spread-of-qk: 7 claims and 2 labs written" in out
    assert "claims/qk_variance: 1 claims and 0 labs written" in out
    file = tmp_path / "spread-of-qk.json"
    first = file.read_text()
    made = receipts.load("spread-of-qk", tmp_path)
    card = run_claims.load_deck(DECK).cards["spread-of-qk"]
    assert set(made.claims) == {claim.id for claim in card.claims}
    assert {receipts.staleness(made.claims[claim.id], claim) for claim in card.claims} == {None}
    assert {receipts.lab_staleness(made.labs[lab.id], lab) for lab in card.labs} == {None}
    assert made.machine == receipts.this_machine()
    assert made.claims["variance-is-d-k"].date == datetime.date.today().isoformat()
    assert len(first) < 20_000
    monkeypatch.setattr(run_claims, "datetime", FutureDates)
    write(capsys, tmp_path)
    assert file.read_text() == first


class FutureDates:
    """The module datetime, a year on."""

    class date:
        @staticmethod
        def today():
            return datetime.date.today() + datetime.timedelta(days=366)


def test_write_with_more_seeds_records_how_many_and_shows_the_claims_own(capsys, tmp_path):
    write(capsys, tmp_path)
    own = receipts.load("spread-of-qk", tmp_path).claims["variance-is-d-k"]
    write(capsys, tmp_path, "--seeds", 6)
    more = receipts.load("spread-of-qk", tmp_path).claims["variance-is-d-k"]
    assert (own.tried, more.tried) == (3, 6)
    assert (more.seeds, more.values, more.date) == (own.seeds, own.values, own.date)
    write(capsys, tmp_path, "--seeds", 2)  # fewer than its own: those are run as well
    assert receipts.load("spread-of-qk", tmp_path).claims["variance-is-d-k"] == more


def test_writing_one_claim_leaves_the_others_but_not_those_of_another_machine(capsys, tmp_path, deck):
    write(capsys, tmp_path, deck=deck)
    before = receipts.load("spread-of-qk", tmp_path)
    spoil(deck, "expect: {equals: 8}", "expect: {at_most: 8}")
    write(capsys, tmp_path, "--claim", "formula-at-64", deck=deck)
    after = receipts.load("spread-of-qk", tmp_path)
    changed = {name for name in before.claims if before.claims[name] != after.claims[name]}
    assert changed == {"formula-at-64"}
    assert set(after.labs) == set(before.labs)
    elsewhere = receipts.CardReceipts(Machine("Another", "2.13.0", "3.12.1"), before.claims, before.labs)
    receipts.write("spread-of-qk", elsewhere, tmp_path)
    status, out, err = run(capsys, "--write", "--receipts", tmp_path, "--claim", "formula-at-64", deck=deck)
    assert (status, err) == (1, "")
    assert "not written, its receipts are from another machine (Another" in out
    assert receipts.load("spread-of-qk", tmp_path).machine == elsewhere.machine
    write(capsys, tmp_path, deck=deck)
    assert receipts.load("spread-of-qk", tmp_path).machine == receipts.this_machine()


def test_a_file_that_can_not_be_read_is_replaced_by_a_whole_card_and_left_by_one_claim(capsys, tmp_path):
    (tmp_path / "spread-of-qk.json").write_text("{")
    arguments = ("--write", "--receipts", tmp_path, "--card", "spread-of-qk")
    status, out, err = run(capsys, *arguments, "--claim", "formula-at-64")
    assert (status, err) == (1, "")
    assert "spread-of-qk: not written, spread-of-qk.json: can't be read" in out
    assert (tmp_path / "spread-of-qk.json").read_text() == "{"
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    assert receipts.load("spread-of-qk", tmp_path).claims


def test_a_folder_that_can_not_be_written_is_told(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status, out, err = run(capsys, "--write", "--receipts", tmp_path / "file" / "nope", "--card", "spread-of-qk")
    assert (status, err) == (1, "")
    assert "spread-of-qk: not written" in out


def test_a_claim_of_another_card_is_refused(capsys):
    status, _, err = run(capsys, "--card", "claims/qk_variance", "--claim", "formula-at-64")
    assert status == 2
    assert "none of the claims formula-at-64 is of claims/qk_variance" in err


def test_receipts_of_claims_that_are_gone_go(capsys, tmp_path, deck):
    write(capsys, tmp_path, deck=deck)
    spoil(deck, "  - id: scaled-extremes-are-smaller", "  - id: extremes-are-smaller")
    write(capsys, tmp_path, deck=deck)
    found = receipts.load("spread-of-qk", tmp_path).claims
    assert "scaled-extremes-are-smaller" not in found
    assert "extremes-are-smaller" in found


def test_a_failing_claim_is_written_as_failing(capsys, tmp_path, deck):
    spoil(deck, "expect: {equals: 8}", "expect: {equals: 9}")
    status, _, _ = run(capsys, "--write", "--receipts", tmp_path / "out", deck=deck)
    assert status == 1
    found = receipts.load("spread-of-qk", tmp_path / "out").claims["formula-at-64"]
    assert (found.holds, found.value, found.failed_seeds) == (False, 8.0, (0,))


# --------------------------------------------------------------------------------------------------------------------
# Ctrl-C


@pytest.mark.claims  # processes of their own
@pytest.mark.parametrize(("jobs", "everybody"), [(1, False), (2, False), (2, True)])
def test_ctrl_c_ends_it_cleanly_and_writes_nothing(tmp_path, deck, jobs, everybody):
    spoil(
        deck, "params: {d_k: 512, scale: inv_sqrt_d_k, n_pairs: 4096}", "params: {d_k: 4096, n_pairs: 131072}"
    )  # half a minute
    command = [
        sys.executable,
        ROOT / "tools/run_claims.py",
        "--deck",
        deck,
        "--write",
        "--receipts",
        tmp_path / "out",
        "--jobs",
        jobs,
    ]
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # as under a terminal: what a shell starts in the background inherits that Ctrl-C is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        for _ in range(
            1 if jobs == 1 else ALL - 1
        ):  # until one worker is at the long claim and the other has no more to do
            assert process.stdout.readline().startswith("holds")
        if everybody:  # as a terminal does: the workers are told as well
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert err.strip().startswith("stopped: ")
    assert err.strip().endswith(f"of {ALL} claims verified, no receipts written")
    assert not (tmp_path / "out").exists()
