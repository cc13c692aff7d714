"""What tools/setup_env.py decides, on machines that are only pretended: no package is installed here."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tools import setup_env

PAGE = "https://download.pytorch.org/whl/cpu/torch/"
NEEDS = {"app": "hash of today"}


@pytest.fixture
def commands(monkeypatch):
    """Programs of a pretended machine: first words of a command to what it prints; whatever is missing fails."""
    known: dict[str, str] = {}

    def output(command, seconds=20):
        line = " ".join(map(str, command))
        return next((text for start, text in known.items() if line.startswith(start)), None)

    monkeypatch.setattr(setup_env, "output", output)
    return known


@pytest.fixture
def kfd(monkeypatch):
    """Pretend that the kernel has AMD's compute device."""
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self, **kw: str(self) == "/dev/kfd" or real(self, **kw))


@pytest.fixture
def venv(tmp_path):
    return tmp_path / ".venv"


def make(venv: Path, **stamp: object) -> Path:
    venv.mkdir()
    if stamp:
        setup_env.write_stamp(venv, stamp)
    return venv


@pytest.fixture
def python_works(monkeypatch):
    monkeypatch.setattr(setup_env, "works", lambda venv: True)


@pytest.fixture
def python_broken(monkeypatch):
    monkeypatch.setattr(setup_env, "works", lambda venv: False)


# --------------------------------------------------------------------------------------------------------------------
# Which torch


def test_no_gpu_tool_means_cpu(commands):
    assert setup_env.accelerator() == "cpu"


@pytest.mark.parametrize(
    ("driver", "build"), [("580.95.05", "cuda"), ("610.1", "cuda"), ("535.183.01", "cuda12"), ("", "cuda")]
)
def test_an_nvidia_gpu_gets_the_build_its_driver_can_run(commands, driver, build):
    commands["nvidia-smi -L"] = "GPU 0: NVIDIA H200 (UUID: GPU-0)\n"
    commands["nvidia-smi --query-gpu=driver_version"] = driver + "\n"
    assert setup_env.accelerator() == build


def test_nvidia_tool_without_a_gpu_means_cpu(commands):
    commands["nvidia-smi -L"] = "No devices found.\n"
    assert setup_env.accelerator() == "cpu"


def test_an_amd_gpu_gets_rocm(commands, kfd):
    commands["rocminfo"] = "Agent 1\n  Name: AMD EPYC\nAgent 2\n  Name: gfx942\n"
    assert setup_env.accelerator() == "rocm"


def test_rocminfo_that_lists_only_cpus_means_cpu(commands, kfd):
    commands["rocminfo"] = "Agent 1\n  Name: AMD EPYC\n"
    assert setup_env.accelerator() == "cpu"


def test_rocminfo_without_the_kernels_device_means_cpu(commands):
    commands["rocminfo"] = "Agent 2\n  Name: gfx942\n"
    assert setup_env.accelerator() == ("rocm" if Path("/dev/kfd").exists() else "cpu")


def pip_arguments(monkeypatch, tmp_path, build, *, page_answers):
    monkeypatch.setattr(setup_env, "reachable", lambda url: page_answers)
    scratch = tmp_path / "requirements.txt"
    arguments = setup_env.pip_arguments(build, False, scratch)
    return arguments, scratch.read_text("utf-8")


def test_cpu_machine_takes_the_wheel_page(monkeypatch, tmp_path):
    arguments, requirements = pip_arguments(monkeypatch, tmp_path, "cpu", page_answers=True)
    assert f"--find-links {PAGE}" in requirements
    assert "--extra-index-url" not in arguments


def test_page_that_does_not_answer_is_left_out_and_said(monkeypatch, tmp_path, capsys):
    _, requirements = pip_arguments(monkeypatch, tmp_path, "cpu", page_answers=False)
    assert "--find-links" not in requirements
    assert re.search(r"^torch==2\.13\.0", requirements, re.MULTILINE)
    assert "does not answer" in capsys.readouterr().out


@pytest.mark.parametrize("build", ["cuda", "cuda12", "rocm"])
def test_gpu_never_takes_the_cpu_page(monkeypatch, tmp_path, build):
    arguments, requirements = pip_arguments(monkeypatch, tmp_path, build, page_answers=True)
    assert "--find-links" not in requirements
    extra = setup_env.BUILDS[build].extra_index
    if extra is None:
        assert "--extra-index-url" not in arguments
    else:  # named with its local version, so that no other build can slip in
        assert arguments[-3:] == ["--extra-index-url", extra, f"torch==2.13.0+{extra.rsplit('/', 1)[1]}"]


@pytest.mark.parametrize(("status", "answers"), [(200, True), (404, False)])
def test_a_page_is_asked_for_its_head_only(status, answers):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert setup_env.reachable(f"http://127.0.0.1:{server.server_port}/torch/", seconds=30) is answers
        server.shutdown()
        thread.join()
    assert asked == ["/torch/"]


def test_a_page_that_hangs_costs_no_more_than_its_seconds(monkeypatch):
    release = threading.Event()

    def urlopen(*args, **kw):
        release.wait(60)
        raise OSError("let go")

    monkeypatch.setattr(setup_env.urllib.request, "urlopen", urlopen)
    began = time.monotonic()
    assert setup_env.reachable("http://127.0.0.1:9/", seconds=0.2) is False
    assert time.monotonic() - began < 10  # far below the 60 s it would hang
    release.set()


# --------------------------------------------------------------------------------------------------------------------
# What to do with what is there


def action(venv, build="cpu", needs=NEEDS):
    return setup_env.decide(venv, build, needs)[0]


def test_a_fresh_clone_creates(venv):
    assert action(venv) == "create"


def test_a_finished_environment_is_left_alone(venv, python_works):
    assert action(make(venv, state="ready", ours=True, build="cpu", **NEEDS)) == "nothing"


def test_changed_requirements_are_filled_in(venv, python_works):
    assert action(make(venv, state="ready", ours=True, build="cpu", app="hash of yesterday")) == "fill"


def test_tests_need_more_than_the_app(venv, python_works):
    make(venv, state="ready", ours=True, build="cpu", **NEEDS)
    assert action(venv, needs={**NEEDS, "tests": "hash"}) == "fill"
    setup_env.write_stamp(venv, {"state": "ready", "ours": True, "build": "cpu", **NEEDS, "tests": "hash"})
    assert action(venv) == "nothing"  # the app does not mind what else is there


def test_a_half_made_environment_is_made_anew(venv, python_works):
    assert action(make(venv, state="installing", ours=True, build="cpu")) == "remake"


def test_a_stamp_written_halfway_is_a_half_made_environment(venv, python_works):
    make(venv)
    (venv / "setup.json").write_text('{"state": "rea')
    assert action(venv) == "remake"


def test_a_python_that_is_gone_is_replaced(venv, python_broken):
    assert action(make(venv, state="ready", ours=True, build="cpu", **NEEDS)) == "remake"


def test_a_new_gpu_gets_its_torch_but_a_silent_one_changes_nothing(venv, python_works):
    make(venv, state="ready", ours=True, build="cpu", **NEEDS)
    assert action(venv, build="cuda") == "remake"
    setup_env.write_stamp(venv, {"state": "ready", "ours": True, "build": "cuda", **NEEDS})
    assert action(venv, build="cpu") == "nothing"


@pytest.mark.parametrize("state", ["ready", "installing"])
def test_somebody_elses_environment_is_filled_and_never_deleted(venv, python_works, state):
    make(venv)
    assert action(venv) == "fill"
    setup_env.write_stamp(venv, {"state": state, "ours": False, "build": "cpu", "app": "old"})
    assert action(venv) == "fill"
    assert action(venv, build="cuda") == "fill"


def test_a_link_is_somebody_elses_whatever_its_stamp_says(venv, tmp_path, python_works):
    make(tmp_path / "elsewhere", state="installing", ours=True, build="cpu")
    venv.symlink_to(tmp_path / "elsewhere")
    assert action(venv) == "fill"


def test_somebody_elses_broken_environment_is_refused_with_what_to_do(venv, python_broken):
    with pytest.raises(setup_env.SetupError, match="Remove it"):
        action(make(venv))


def test_the_hash_follows_every_requirement_file(monkeypatch, tmp_path):
    for name in ("requirements.txt", "requirements-test.txt", "constraints.txt"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    before = setup_env.wanted(tests=True)
    (tmp_path / "requirements-test.txt").write_text("changed")
    after = setup_env.wanted(tests=True)
    assert after["app"] == before["app"]
    assert after["tests"] != before["tests"]
    (tmp_path / "constraints.txt").write_text("changed")
    assert setup_env.wanted(tests=False)["app"] != before["app"]


# --------------------------------------------------------------------------------------------------------------------
# Doing it


class Installer:
    """Stands in for venv and pip; ``fails`` is raised by pip."""

    def __init__(self, monkeypatch, root: Path) -> None:
        self.calls: list[list[str]] = []
        self.fails: BaseException | None = None
        for name in ("requirements.txt", "requirements-test.txt", "constraints.txt"):
            (root / name).write_bytes((setup_env.ROOT / name).read_bytes())
        monkeypatch.setattr(setup_env, "ROOT", root)
        monkeypatch.setattr(setup_env, "reachable", lambda url: False)
        monkeypatch.setattr(setup_env, "works", lambda venv: True)
        monkeypatch.setattr(setup_env, "accelerator", lambda: "cpu")
        monkeypatch.setattr(setup_env, "pip_install", self.pip)
        monkeypatch.setattr(setup_env.subprocess, "run", lambda *a, **kw: subprocess.CompletedProcess(a, 0))

    def pip(self, python, arguments):
        stamp = json.loads((python.parent.parent / "setup.json").read_text())
        assert stamp["state"] == "installing"  # what is true while pip runs
        self.calls.append(list(arguments))
        if self.fails:
            raise self.fails


@pytest.fixture
def installer(monkeypatch, tmp_path):
    return Installer(monkeypatch, tmp_path)


def test_an_interrupted_install_is_repaired_by_the_next_call(installer, venv):
    installer.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        setup_env.set_up(venv, tests=False)
    (venv / "half a package").touch()
    installer.fails = None
    setup_env.set_up(venv, tests=False)
    assert not (venv / "half a package").exists()
    assert setup_env.read_stamp(venv)["state"] == "ready"
    setup_env.set_up(venv, tests=False)
    assert len(installer.calls) == 2  # the third call had nothing to do


def test_the_tests_add_to_the_apps_environment(installer, venv):
    setup_env.set_up(venv, tests=False)
    (venv / "kept").touch()
    setup_env.set_up(venv, tests=True)
    assert (venv / "kept").exists()
    assert str(setup_env.ROOT / "requirements-test.txt") in installer.calls[1]
    setup_env.set_up(venv, tests=False)
    setup_env.set_up(venv, tests=True)
    assert len(installer.calls) == 2


def test_failed_pip_is_explained_and_exits_1(installer, capsys):
    installer.fails = setup_env.SetupError("pip failed: the disk is full.")
    assert setup_env.main([]) == 1
    assert "the disk is full" in capsys.readouterr().out


def test_a_full_disk_is_told_before_anything_is_made(installer, venv, monkeypatch):
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 4e8})())
    with pytest.raises(setup_env.SetupError, match=r"0\.4 GB free.*about 2 GB"):
        setup_env.set_up(venv, tests=False)
    assert not venv.exists()


@pytest.mark.parametrize(
    ("errors", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("Failed to establish: NameResolutionError: name resolution", "can't be reached"),
        ("SSLError(CERTIFICATE_VERIFY_FAILED)", "PIP_CERT"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no version for this Python"),
        ("something new", "pip's message above"),
    ],
)
def test_causes_of_a_failed_pip(errors, advice):
    assert advice in setup_env.explain(errors)


def test_pip_passes_its_words_on_and_fails_with_their_cause(monkeypatch, tmp_path, capsys):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space left on device' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(setup_env.SetupError, match="disk is full"):
        setup_env.pip_install(fake, [])
    assert "No space left" in capsys.readouterr().err


def test_an_unsupported_python_without_a_better_one_says_so(monkeypatch, capsys):
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(setup_env, "supported_python", lambda: None)
    assert setup_env.main([]) == 1
    assert "3.11, 3.12 or 3.13 is needed" in capsys.readouterr().out


def test_an_unsupported_python_hands_over_to_a_better_one(monkeypatch):
    called = []
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 14, 0))
    monkeypatch.setattr(setup_env, "supported_python", lambda: "/usr/bin/python3.12")
    monkeypatch.setattr(
        setup_env.subprocess,
        "run",
        lambda command, **kw: called.append(command) or subprocess.CompletedProcess(command, 7),
    )
    assert setup_env.main(["--tests"]) == 7
    assert called == [["/usr/bin/python3.12", setup_env.os.path.abspath(setup_env.__file__), "--tests"]]


def test_a_second_set_up_waits_for_the_first(monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    order = []
    inside = threading.Event()

    def second():
        inside.wait(10)
        with setup_env.alone():
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with setup_env.alone():
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


# --------------------------------------------------------------------------------------------------------------------
# A browser


def browser_machine(monkeypatch, *, root, present=(), apt_brings=None):
    """A pretended machine; returns the commands that ensure_chromium ran."""
    have, ran = set(present), []
    monkeypatch.setattr(setup_env, "find_chromium", lambda: "/usr/bin/chromium" if have & {"chromium"} else None)
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 0 if root else 1000, raising=False)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "apt-get" else None)

    def run(command, **kw):
        ran.append(command[:2] if command[0] == "apt-get" else list(command[1:4]))
        if command[:2] == ["apt-get", "install"] and apt_brings:
            have.add(apt_brings)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(setup_env.subprocess, "run", run)
    return ran


APT = [["apt-get", "update"], ["apt-get", "install"]]
OWN = [["-m", "playwright", "install"]]


def test_the_systems_chromium_is_enough(monkeypatch):
    ran = browser_machine(monkeypatch, root=True, present=["chromium"])
    setup_env.ensure_chromium(Path("python"))
    assert ran == []


def test_root_gets_debians_package(monkeypatch):
    ran = browser_machine(monkeypatch, root=True, apt_brings="chromium")
    setup_env.ensure_chromium(Path("python"))
    assert ran == APT


def test_a_package_that_brings_no_browser_is_followed_by_playwrights_own(monkeypatch):
    ran = browser_machine(monkeypatch, root=True, apt_brings="a note where to get it")
    setup_env.ensure_chromium(Path("python"))
    assert ran == APT + OWN


def test_who_is_not_root_gets_playwrights_own(monkeypatch):
    ran = browser_machine(monkeypatch, root=False)
    setup_env.ensure_chromium(Path("python"))
    assert ran == OWN


def test_no_browser_at_all_is_an_error(monkeypatch):
    browser_machine(monkeypatch, root=False)
    monkeypatch.setattr(setup_env.subprocess, "run", lambda command, **kw: subprocess.CompletedProcess(command, 1))
    with pytest.raises(setup_env.SetupError, match="no Chromium"):
        setup_env.ensure_chromium(Path("python"))


def test_a_chromium_that_does_not_start_is_not_one(monkeypatch, tmp_path):
    (tmp_path / "chromium-browser").write_text("#!/bin/sh\necho 'install the snap'; exit 1\n")
    (tmp_path / "google-chrome").write_text("#!/bin/sh\necho 'Google Chrome 150'\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: str(p) if (p := tmp_path / name).exists() else None)
    assert setup_env.find_chromium() == str(tmp_path / "google-chrome")


# --------------------------------------------------------------------------------------------------------------------
# A database


def database_machine(monkeypatch, tmp_path, *, root, apt_brings=False):
    """A pretended machine without PostgreSQL; returns the commands that were run on it."""
    ran = []
    monkeypatch.setattr(setup_env, "_DEBIANS_POSTGRESQL", tmp_path)
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 0 if root else 1000, raising=False)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "apt-get" else None)

    def run(command, **kw):
        ran.append(command[:2])
        if command[:2] == ["apt-get", "install"] and apt_brings:
            for version in ("9.6", "15"):
                (tmp_path / version / "bin").mkdir(parents=True)
                (tmp_path / version / "bin" / "initdb").write_text("")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(setup_env.subprocess, "run", run)
    return ran


def test_root_gets_debians_postgresql_once_and_the_newest_is_used(monkeypatch, tmp_path):
    ran = database_machine(monkeypatch, tmp_path, root=True, apt_brings=True)
    setup_env.ensure_postgresql()
    setup_env.ensure_postgresql()
    assert ran == APT
    assert setup_env.find_postgresql() == tmp_path / "15" / "bin"


@pytest.mark.parametrize("root", [True, False])
def test_no_database_at_all_is_an_error_that_says_what_to_install(monkeypatch, tmp_path, root):
    database_machine(monkeypatch, tmp_path, root=root)
    with pytest.raises(setup_env.SetupError, match="Install postgresql"):
        setup_env.ensure_postgresql()


# --------------------------------------------------------------------------------------------------------------------
# The files beside it


def lines(name: str) -> list[str]:
    return [
        line for line in (setup_env.ROOT / name).read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]


REQUIREMENTS = ("requirements.txt", "requirements-test.txt", "requirements-cluster.txt")


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_each_dependency_has_its_reason_on_the_line(name):
    bare = [line for line in lines(name) if not line.startswith("--") and not re.search(r"\s# .{10,}", line)]
    assert bare == []


def test_pins():
    text = "\n".join(lines("requirements.txt"))
    assert re.search(r"^torch==2\.13\.0\s", text, re.MULTILINE)
    assert re.search(r"^streamlit==1\.67\.\*\s", text, re.MULTILINE)
    assert re.search(rf"^--find-links {re.escape(PAGE)}$", text, re.MULTILINE)


def test_constraints_cover_what_is_required_and_say_no_build():
    constraints = dict(line.split("==") for line in lines("constraints.txt"))
    named = {re.split(r"[\[<>=!~\s]", line)[0].lower() for f in REQUIREMENTS for line in lines(f)}
    assert named - {"--find-links"} <= {name.lower() for name in constraints}
    assert not any("+" in version for version in constraints.values())


def test_an_old_python_can_read_the_program():
    """It has to say which Python is needed. The syntax of 3.8, as far as this Python can check it."""
    import ast

    ast.parse(Path(setup_env.__file__).read_text("utf-8"), feature_version=(3, 8))


def test_ci_runs_make_test_and_hides_nothing():
    script = (setup_env.ROOT / ".ci/run").read_text("utf-8")
    commands = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert commands[0] == "set -euo pipefail"
    assert commands[-1] == "make test"
    assert "||" not in script
    assert os.access(setup_env.ROOT / ".ci/run", os.X_OK)


def test_program_runs_without_the_project(tmp_path):
    """By itself, isolated from site-packages: standard library only."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", setup_env.__file__, "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--tests" in done.stdout
