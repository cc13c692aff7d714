"""The command, what it compares with the engine, and the deck itself."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from content.loader import HOME, PROJECT, display, load_deck, parse
from content.schema import Strings
from engine import registry
from tests.content.examples import edited, example, folder, line_of, problems
from tools import check_strings, cloze, export_schema, new_card
from tools.check_content import check, main
from tools.check_engine import engine_sources


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/check_content.py", *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_deck_is_clean():
    """Of errors; its cloze items are run as well."""
    assert [str(p) for p in check(HOME, code=True) if not p.warning] == []


def test_a_clean_folder_exits_0(tmp_path, capsys):
    assert main([str(folder(tmp_path, example()))]) == 0
    assert capsys.readouterr().out.endswith("0 errors, 0 warnings\n")


def test_a_folder_without_cards_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "no card in it; wanted cards/<topic>/<id>.yaml" in out
    assert out.endswith(": 1 error, 0 warnings\n")


def test_a_warning_exits_0(tmp_path, capsys):
    assert main([str(folder(tmp_path, edited(("    fails_when: {d_k: 1024}\n", ""))))]) == 0
    assert ": warning: claims[2]: no fails_when" in capsys.readouterr().out


def test_all_errors_of_all_files_in_order_and_exit_1(tmp_path, capsys):
    folder(
        tmp_path,
        edited(("minutes: 5", "minutes: five"), ("level: core", "level: x")),
        example().replace("topic: scaling", "topic: heads").replace("id: dot-product-spread", "id: mla"),
    )
    assert main([str(tmp_path)]) == 1
    places = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert len(places) >= 3
    assert all(re.fullmatch(r".*\.yaml:\d+:\d+", place) for place in places)
    assert places == sorted(places, key=lambda p: (p.split(":")[0], *map(int, p.split(":")[1:])))
    assert {p.split("/")[-1].split(":")[0] for p in places} == {"mla.yaml", "dot-product-spread.yaml"}


@pytest.mark.parametrize("what", ["missing", "bad strings"])
def test_what_stops_the_deck_from_loading_is_a_message(what, tmp_path, capsys):
    place = tmp_path / "nowhere" if what == "missing" else folder(tmp_path, strings="ui: []\n")
    assert main([str(place)]) == 1
    assert "Traceback" not in capsys.readouterr().out


BAD_CARDS = {
    "alias bomb": "\n".join(
        ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    ),
    "deep": "a: " + "[" * 100_000,
    "binary": "\x00\x01\x02",
    "large": "x" * 10_000_000,
    "no card": "hello",
}


def test_bad_cards_one_message_each_and_the_others_load(tmp_path, capsys):
    folder(tmp_path, example())
    for name, text in BAD_CARDS.items():
        (tmp_path / "cards" / "scaling" / f"{name.replace(' ', '-')}.yaml").write_text(text, "utf-8")
    started = time.monotonic()
    assert main([str(tmp_path)]) == 1
    assert time.monotonic() - started < 10
    out = capsys.readouterr().out
    assert {re.search(r"/([a-z-]+)\.yaml:", line)[1] for line in out.splitlines()[:-1]} == {
        n.replace(" ", "-") for n in BAD_CARDS
    }
    assert list(load_deck(tmp_path).cards) == ["dot-product-spread"]


def test_the_command_itself(tmp_path):
    """As CI and an author call it. Torch stays out: one card takes far less than its import."""
    folder(tmp_path, edited(("level: core", "level: x")))
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert "level: got 'x'" in done.stdout
    assert done.stderr == ""
    assert run(str(tmp_path), "--nonsense").returncode == 2


def test_torch_is_not_imported_by_the_check(tmp_path):
    folder(tmp_path, example())
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, '.'); from tools.check_content import main; "
        f"raise SystemExit(main([{str(tmp_path)!r}]))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, timeout=60, check=False
        ).returncode
        == 0
    )


# --------------------------------------------------------------------------------------------------------------------
# Against the engine


ENGINE = {
    "experiment of a claim": (
        [
            ("    metric: logits_mean", "    metric: logits_mean\n    observation: false"),
            (
                "    params: {d_k: 512, scale: inv_sqrt_d_k}\n    metric: logits_variance",
                "    params: {d_k: 512, scale: inv_sqrt_d_k}\n    metric: logit_var",
            ),
        ],
        "metric: logit_var\n",
        "claims[1].metric: got 'logit_var'; qk_variance has logits_mean, logits_variance",
    ),
    "nearest metric": (
        [("    metric: logits_variance", "    metric: logits_varianc")],
        "metric: logits_varianc\n",
        "(did you mean logits_variance?)",
    ),
    "experiment of a lab": (
        [("  - id: spread\n    experiment: qk_variance", "  - id: spread\n    experiment: qk_varience")],
        "experiment: qk_varience",
        "labs[0].experiment: got 'qk_varience'; engine/experiments has",
    ),
    "nearest experiment": (
        [("  - id: spread\n    experiment: qk_variance", "  - id: spread\n    experiment: qk_varience")],
        "experiment: qk_varience",
        "(did you mean qk_variance?)",
    ),
    "parameter unknown": (
        [("params: {d_k: 512, scale: inv_sqrt_d_k}", "params: {d_kk: 512, scale: inv_sqrt_d_k}")],
        "params: {d_kk",
        "claims[1].params.d_kk: got 'd_kk', wanted one of d_k",
    ),
    "parameter out of bounds": (
        [("params: {d_k: 512, scale: inv_sqrt_d_k}", "params: {d_k: 5120, scale: inv_sqrt_d_k}")],
        "params: {d_k: 5120",
        "wanted a value from 1 to 4096",
    ),
    "parameter not whole": (
        [("params: {d_k: 512, scale: inv_sqrt_d_k}", "params: {d_k: 51.2, scale: inv_sqrt_d_k}")],
        "params: {d_k: 51.2",
        "wanted a whole number",
    ),
    "choice unknown": (
        [("params: {d_k: 512, scale: inv_sqrt_d_k}", "params: {d_k: 512, scale: inv_sqrt}")],
        "params: {d_k: 512, scale: inv_sqrt}",
        "claims[1].params.scale: got 'inv_sqrt', wanted one of",
    ),
    "two parameters at once": (
        [("params: {d_k: 512, scale: inv_sqrt_d_k}", "params: {d_k: 0, scale: inv_sqrt}")],
        "params: {d_k: 0",
        "claims[1].params.d_k",
    ),
    "rule between parameters": (
        [
            (
                "    params: {d_k: 256, qk_correlation: 0.5}\n    metric",
                "    params: {d_k: 256, qk_correlation: 0.5, distribution: uniform}\n    metric",
            )
        ],
        "distribution: uniform",
        "correlation_needs_normal",
    ),
    "versus out of bounds": (
        [("    versus: {d_k: 64}", "    versus: {d_k: 64000}")],
        "versus: {d_k: 64000}",
        "claims[2].versus.d_k",
    ),
    "versus of an unknown metric": (
        [("    versus: {d_k: 64}", "    versus: {metric: logits_str}")],
        "versus: {metric: logits_str}",
        "claims[2].versus.metric: got 'logits_str'",
    ),
    "fails_when out of bounds": (
        [("    fails_when: {d_k: 1024}", "    fails_when: {d_k: 10240}")],
        "fails_when: {d_k: 10240}",
        "claims[2].fails_when.d_k",
    ),
    "fails_when is the default": (
        [("    fails_when: {scale: inv_sqrt_d_k}\n  - id: scaled", "    fails_when: {scale: none}\n  - id: scaled")],
        "fails_when: {scale: none}\n  - id: scaled",
        "changes nothing; this is the experiment's default",
    ),
    "control unknown": (
        [("controls: [d_k, scale, qk_correlation]", "controls: [d_k, scal]")],
        "controls:",
        "labs[0].controls[1]: got 'scal'; qk_variance has the parameters",
    ),
    "figure unknown": (
        [("controls: [d_k, scale, qk_correlation]", "controls: [d_k]\n    figures: [logits]")],
        "figures:",
        "labs[0].figures[0]: got 'logits'; qk_variance has",
    ),
    "parameter of a follow-up": (
        [("lab: {use: spread, params: {q_std: 2}}", "lab: {use: spread, params: {q_std: 20}}")],
        "q_std: 20}",
        "follow_ups[1].lab.params.q_std",
    ),
    "drawn parameter unknown": (
        [
            ("q_std: [0.5, 0.75, 1, 1.25, 1.5, 2, 3]}", "q_sd: [0.5, 0.75, 1, 1.25, 1.5, 2, 3]}"),
            ("standard deviation {{q_std}}, k", "standard deviation {{q_sd}}, k"),
            ("标准差是 {{q_std}}，k", "标准差是 {{q_sd}}，k"),
        ],
        "    vary: {d_k: [16, 36",
        "quiz[0].vary: got 'q_sd'; qk_variance has the parameters",
    ),
    "draws that the experiment refuses": (
        [("vary: {d_k: [16, 36, 64, 100, 144, 256, 400, 576]", "vary: {d_k: [16, 36, 64, 100, 144, 5000, 6000, 7000]")],
        "    vary: {d_k: [16, 36",
        "qk_variance accepts 35 different draws of these; at least 50",
    ),
    "draws that are the same run": (
        [("q_std: [0.5, 0.75, 1, 1.25, 1.5, 2, 3]}", "q_std: [1, 1.0, 1.00, 2, 2.0, 2.00, 2.000]}")],
        "    vary: {d_k: [16, 36",
        "qk_variance accepts 16 different draws",
    ),
    "table over an unknown parameter": (
        [("over: {scale: [none, inv_sqrt_d_k, inv_d_k]}", "over: {scales: [none]}")],
        "over: {scales",
        "alternatives.table.over",
    ),
    "table of an unknown metric": (
        [("metrics: [logits_std, logits_abs_max]", "metrics: [logits_sd]")],
        "metrics: [logits_sd]",
        "alternatives.table.metrics[0]",
    ),
}


@pytest.mark.parametrize("name", ENGINE)
def test_against_the_engine(name, tmp_path):
    edits, piece, words = ENGINE[name]
    found = [p for p in problems(tmp_path, *edits) if words in f"{p.where}: {p.message}"]
    assert found, f"{words!r} is not among\n" + "\n".join(map(str, check(tmp_path)))
    assert not found[0].warning
    assert found[0].line == line_of(piece, edited(*edits))


@pytest.fixture
def counted(monkeypatch):
    """qk_variance as if one of its metrics were bytes and one a time."""
    from dataclasses import replace

    from engine.base import Metric

    real = registry.get("qk_variance")
    metrics = tuple(
        Metric(m.name, {"logits_std": "bytes", "logits_mean": "s"}.get(m.name, m.unit)) for m in real.metrics
    )
    monkeypatch.setattr(registry, "get", lambda name: replace(real, metrics=metrics))


def test_counts_are_exact_and_times_are_observations(counted, tmp_path):
    messages = [f"{p.where}: {p.message}" for p in check(folder(tmp_path, example()))]
    assert any(
        m.startswith("claims[0].expect: got approx for bytes; a count is exact, write equals:") for m in messages
    )
    assert any(
        m.startswith("claims[2].expect: got ratio_approx for bytes; a count is exact, write ratio_equals:")
        for m in messages
    )
    time = "claims[4]: logits_mean is a time, or follows from one; write `observation: true`"
    assert any(m.startswith(time) for m in messages)


@pytest.mark.parametrize(
    ("measured", "edits", "wanted"),
    [
        ("logits_mean", [], "claims[4]"),
        (
            "theory_std",
            [("    versus: {d_k: 64}", "    versus: {metric: theory_std}")],
            "claims[2]",
        ),  # compared with it
    ],
)
def test_what_follows_from_a_time_is_an_observation_too(monkeypatch, tmp_path, measured, edits, wanted):
    from dataclasses import replace

    real = registry.get("qk_variance")
    metrics = tuple(replace(m, measured=m.name == measured) for m in real.metrics)
    monkeypatch.setattr(registry, "get", lambda name: replace(real, metrics=metrics))
    found = [p for p in check(folder(tmp_path, edited(*edits))) if "follows from one" in p.message]
    assert [p.where for p in found] == [wanted]
    assert found[0].message.startswith(f"{measured} is a time")


def test_sources_that_the_engine_names_are_listed():
    keys = set(load_deck().sources)
    found = engine_sources()
    assert ("vaswani2017", PROJECT / "engine" / "experiments" / "qk_variance.py") in {
        (key, path) for key, path, _ in found
    }
    for key, path, line in found:
        assert key in keys, f"{display(path)}:{line}"


def test_an_experiment_without_a_claim_and_an_unused_source_are_orphans(monkeypatch):
    """As soon as the deck has a card; seen here with the example in the deck's place."""
    from dataclasses import replace

    from tools.check_engine import check_deck_engine

    card, document = parse(example(), "x.yaml")
    deck = load_deck()
    bare = card.model_copy(update={"claims": (), "sources": (), "labs": (), "quiz": (), "follow_ups": ()})
    sources = {**deck.sources, "nobody2000": deck.sources["vaswani2017"]}
    given = replace(deck, cards={"x": bare}, documents={**deck.documents, "x": document}, sources=sources, loose={})
    messages = {f"{p.file}: {p.message}" for p in check_deck_engine(given)}
    assert any(m.startswith("engine/experiments/qk_variance.py: no claim uses this experiment") for m in messages)
    assert any("cites this source; delete it" in m for m in messages)
    with_claims = replace(
        given, loose={"qk_variance": card.claims[:1]}, documents={**given.documents, "claims/qk_variance": document}
    )
    assert not any("qk_variance.py" in f"{p.file}: {p.message}" for p in check_deck_engine(with_claims))


# --------------------------------------------------------------------------------------------------------------------
# Words of the interface and of the engine


def strings_problems(text: str) -> list[str]:
    from dataclasses import replace

    strings, document = parse(text, "strings.yaml", Strings)
    deck = load_deck()
    given = replace(deck, strings=strings, documents={**deck.documents, "strings": document})
    return [str(p) for p in check_strings.check_strings(given)]


def strings_text() -> str:
    return (HOME / "strings.yaml").read_text("utf-8")


def test_nothing_is_without_words_and_no_words_without_use():
    assert strings_problems(strings_text()) == []


STRINGS = {
    "parameter without words": (
        r"  qk_correlation:\n(?:    .*\n)*",
        "",
        "engine/experiments/qk_variance.py:1:1: parameter: 'qk_correlation' has no words",
    ),
    "metric without words": (r"  logits_abs_max:\n(?:    .*\n)*", "", "metric: 'logits_abs_max' has no words"),
    "column without words": (r"  theory_density:\n(?:    .*\n)*", "", "column: 'theory_density' has no words"),
    "choice without words": (
        r"  heavy_tail:\n(?:    .*\n)*",
        "",
        "choice: 'heavy_tail' has no words; add it to choices",
    ),
    "rule without words": (
        r"  log_needs_two:\n(?:    .*\n)*",
        "",
        "rule: 'log_needs_two' has no words; add it to rules",
    ),
    "experiment without words": (
        r"(?ms)^experiments:\n.*\Z",
        "experiments: {}\n",
        "experiment: 'qk_variance' has no words",
    ),
    "words without a name": (
        r"(?m)^names:\n",
        "names:\n  nobody: {label: {en: 'x', zh: '无'}}\n",
        "names.nobody: nothing of the engine is called so",
    ),
    "words without a choice": (
        r"(?m)^choices:\n",
        "choices:\n  nobody: {label: {en: 'x', zh: '无'}}\n",
        "choices.nobody: nothing of the engine",
    ),
    "words without a rule": (
        r"(?m)^rules:\n",
        "rules:\n  nobody: {en: 'x', zh: '无'}\n",
        "rules.nobody: nothing of the engine",
    ),
    "words without a unit": (
        r"(?m)^units:\n",
        "units:\n  parsec: {en: 'pc', zh: '秒差距'}\n",
        "units.parsec: nothing of the engine",
    ),
    "words without an experiment": (
        r"(?m)^experiments:\n",
        "experiments:\n  nobody:\n    title: {en: 'x', zh: '无'}\n    about: {en: 'x', zh: '无'}\n    formula: "
        "'x'\n    plots: {}\n    summary: {en: 'x', zh: '无'}\n",
        "experiments.nobody: nothing of the engine",
    ),
    "plot without a title": (r"      histogram: \{.*\}\n", "      {}\n", "the plot 'histogram' has no title"),
    "title without a plot": (
        r"(?m)^    plots:\n      histogram:",
        "    plots:\n      histogrm: {en: 'x', zh: '无'}\n      histogram:",
        "no such plot; qk_variance has histogram",
    ),
    "summary of an unknown metric": (
        r"\{logits_std:\.2f\}; the",
        "{logit_std:.2f}; the",
        "{logit_std}: no such metric; qk_variance has",
    ),
    "summary that can't be filled": (r"\{logits_std:\.2f\}; the", "{logits_std:.2q}; the", "can't be filled"),
    "interface word without a page": (
        r"(?m)^ui:\n",
        "ui:\n  nobody_says_this: {en: 'x', zh: '无'}\n",
        "ui.nobody_says_this: no page says this",
    ),
    "interface word missing": (
        r"(?m)^  app_title:\n(?:    .*\n)*",
        "",
        "t: got 'app_title'; add it to ui in strings.yaml",
    ),
    "hole in one language": (
        r"en: 'The logits have mean \{logits_mean:\.2f\} and",
        "en: 'The logits have",
        "{logits_mean} stands in one language only",
    ),
    "brace alone": (r"    en: 'Attention|    en: Attention", "    en: 'Open { Attention' #", "can't be filled"),
    "formula without plain words": (
        r"    plain: \{en: '1/√d_k', zh: '1/√d_k'\}\n",
        "",
        "choices.inv_sqrt_d_k: the label holds a formula",
    ),
    "formula in plain words": (
        r"    plain: \{en: '1/√d_k'",
        "    plain: {en: '$d_k$'",
        "choices.inv_sqrt_d_k.plain: plain words hold no",
    ),
}


@pytest.mark.parametrize("name", STRINGS)
def test_strings(name):
    pattern, new, words = STRINGS[name]
    text, n = re.subn(pattern, lambda _: new, strings_text(), count=1)
    assert n == 1
    found = strings_problems(text)
    assert [p for p in found if words in p], found


def test_keys_in_the_interface_are_found_however_they_are_written(tmp_path, monkeypatch):
    (tmp_path / "page.py").write_text(
        'x = text.t("one", n=1)\ny = f"{t(\'two\')} {t(f\'level_{l}\')}"  # t("level_a")\nz = t("four" if l else '
        '"five")\nu = t(name)\nv = set("six")\n'
    )
    monkeypatch.setattr(check_strings, "INTERFACE", (str(tmp_path),))
    ui = "\n".join(f"  {k}: {{en: 'x', zh: '无'}}" for k in ("level_a", "four", "unused"))
    found = strings_problems(re.sub(r"(?ms)^ui:\n.*?(?=^\S)", f"ui:\n{ui}\n\n", strings_text()))
    keys = [re.search(r"got '(\w+)'|ui\.(\w+): no page", p) for p in found]
    assert {next(g for g in k.groups() if g) for k in keys if k} == {"one", "two", "unused"}
    assert any(f"{tmp_path}/page.py:1:10: t: got 'one'" in p for p in found)


# --------------------------------------------------------------------------------------------------------------------
# Code of cloze items


def test_a_wrong_option_that_passes_is_found(tmp_path):
    found = check(
        folder(tmp_path, edited(("text: {en: 'd_k', zh: 'd_k'}", "text: {en: 'd_k ** 0.5', zh: 'd_k ** 0.5'}"))),
        code=True,
    )
    assert [p.message for p in found] == ["'d_k ** 0.5' passes, though it is wrong; let `assert` see the difference"]
    assert found[0].where == "quiz[3].holes[0][1]"


def test_right_options_that_fail_are_found(tmp_path):
    (problem,) = check(
        folder(tmp_path, edited(("      assert logits == 2.0", "      assert logits == 3.0"))), code=True
    )
    assert "the right options fail: AssertionError" in problem.message


def test_code_that_does_not_end_is_stopped():
    with pytest.raises(TimeoutError):
        cloze.outcomes(["while True: pass"], limit_s=1)


def test_code_that_ends_the_process_is_said():
    assert cloze.outcomes(["raise SystemExit(3)", "x = 1"]) == ["SystemExit: 3", None]
    with pytest.raises(RuntimeError, match="the process ended with 7"):
        cloze.outcomes(["import os; os._exit(7)"])


def test_each_wrong_option_is_tried_with_the_other_hole_right():
    card = parse(
        edited(
            ("logits = qk / ___", "logits = ___ / ___"),
            (
                "    holes:\n",
                "    holes:\n      - - text: {en: 'qk', zh: 'qk'}\n          right: true\n          why: {en: "
                "'a', zh: '甲'}\n        - text: {en: 'k', zh: 'k'}\n          why: {en: 'b', zh: '乙'}\n",
            ),
        ),
        "x.yaml",
    )[0]
    cases = cloze.fillings(next(i for i in card.quiz if i.kind == "cloze"))
    assert [(case, source.split("\n")[3]) for case, source in cases] == [
        (None, "logits = qk / math.sqrt(d_k)"),
        ((0, 1), "logits = k / math.sqrt(d_k)"),
        ((1, 1), "logits = qk / d_k"),
    ]


# --------------------------------------------------------------------------------------------------------------------
# A new card, and the schema for editors


def test_a_new_card_says_what_is_to_be_written_and_nothing_else(tmp_path, capsys):
    assert new_card.main(["scaling", "softmax-jacobian", "--folder", str(tmp_path)]) == 0
    path = tmp_path / "cards" / "scaling" / "softmax-jacobian.yaml"
    text = path.read_text("utf-8")
    assert parse(text, "x.yaml")[0].id == "softmax-jacobian"  # the schema takes it as it is
    found = check(tmp_path)
    assert {p.message.split(":")[0] for p in found} == {"still to be written"}
    marked = {
        n
        for n, line in enumerate(text.split("\n"), 1)
        if re.search(r"TODO|to_be_written|to-be-written", line) and not line.startswith("#")
    }
    assert {p.line for p in found} == marked


def test_a_new_card_knows_its_tracks(tmp_path, capsys):
    assert new_card.main(["scaling", "sdpa-walkthrough", "--folder", str(tmp_path)]) == 0
    card = load_deck(tmp_path).cards["sdpa-walkthrough"]
    assert card.tracks == ("algorithm-engineer", "new-graduate")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scalin", "softmax-jacobian"], "(did you mean scaling?)"),
        (["scaling", "softmax-jacobean"], "(did you mean softmax-jacobian?)"),
        (["scaling", "../../x"], "got the id '../../x'"),
    ],
)
def test_a_new_card_of_no_topic_or_no_plan(arguments, words, tmp_path, capsys):
    assert new_card.main([*arguments, "--folder", str(tmp_path)]) == 1
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_card_that_is_there_is_left_alone(tmp_path, capsys):
    folder(tmp_path, example())
    assert new_card.main(["scaling", "dot-product-spread", "--folder", str(tmp_path)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "cards" / "scaling" / "dot-product-spread.yaml").read_text("utf-8") == example()


def test_the_editors_schema_is_the_present_one():
    assert export_schema.TARGET.read_text("utf-8") == export_schema.exported(), "run python tools/export_schema.py"


def test_the_editors_schema_takes_the_example_and_refuses_a_bad_one():
    import json

    import jsonschema  # comes with altair

    schema = json.loads(export_schema.exported())
    data = parse(example(), "x.yaml")[1].data
    validator = jsonschema.Draft202012Validator(schema)
    assert [e.message for e in validator.iter_errors(data)] == []
    assert list(validator.iter_errors({**data, "level": "x"}))
    assert list(validator.iter_errors({**data, "question": {"en": "x"}}))
    assert list(validator.iter_errors({**data, "nobody": 1}))
