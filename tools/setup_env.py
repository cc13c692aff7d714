"""Make ``.venv`` as the app, and the tests, need it; do nothing when it is ready. ``make`` calls this.

    python tools/setup_env.py [--tests]        --tests adds what the tests need, Chromium and PostgreSQL among it

Standard library only. It decides which build of torch this machine gets, installs it, and leaves ``.venv/setup.json``
behind: what was installed, for which requirements. That file says "installing" until all is done, so whatever was
interrupted is made anew by the next call. A ``.venv`` that somebody else made is filled, never deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
_SUPPORTED = ((3, 11), (3, 12), (3, 13))  # an older one must still be able to read this file, to say so
_PAGE_SECONDS = 3.0
_DEBIANS_POSTGRESQL = Path("/usr/lib/postgresql")
_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Build(NamedTuple):
    """A build of torch: what to call it, the index that has it beside the usual one, its local version, its size."""

    words: str
    extra_index: str | None
    local: str
    needs_gb: float


# The usual index has the build for CUDA 13 (its driver is 580 or newer), the page in requirements.txt the CPU's.
BUILDS: dict[str, Build] = {
    "cpu": Build("the CPU", None, "", 2),
    "cuda": Build("CUDA 13", None, "", 8),
    "cuda12": Build("CUDA 12.6", "https://download.pytorch.org/whl/cu126", "+cu126", 8),
    "rocm": Build("ROCm 7.2", "https://download.pytorch.org/whl/rocm7.2", "+rocm7.2", 18),
}
_DRIVER_FOR_CUDA_13 = 580


class SetupError(Exception):
    """What went wrong and what to do about it, for the person at the keyboard."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


# --------------------------------------------------------------------------------------------------------------------
# Asking the machine


def output(command: Sequence[str], seconds: float = 20) -> str | None:
    """What a command prints, or None when it isn't there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def accelerator() -> str:
    """Key of BUILDS for the GPU that answers here, "cpu" when none does."""
    listing = output(["nvidia-smi", "-L"])
    if listing and "GPU" in listing:
        driver = output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
        major = re.match(r"\s*(\d+)", driver)
        return "cuda12" if major and int(major.group(1)) < _DRIVER_FOR_CUDA_13 else "cuda"
    if Path("/dev/kfd").exists() and "gfx" in (output(["rocminfo"]) or ""):  # its CPU agents have no gfx name
        return "rocm"
    return "cpu"


def reachable(url: str, seconds: float = _PAGE_SECONDS) -> bool:
    """Whether a page answers in time. In a thread, because no time limit of a socket covers the look-up of a name."""
    found = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        with contextlib.suppress(OSError, ValueError):
            urllib.request.urlopen(request, timeout=seconds).close()
            found.set()

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(seconds)
    return found.is_set()


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome of the system that starts (some are only a note where to get it), or None."""
    for name in _CHROMIUM_NAMES:
        path = shutil.which(name)
        if path and output([path, "--version"]) is not None:
            return path
    return None


def find_postgresql() -> Path | None:
    """The folder of PostgreSQL's own programs: the newest of Debian's, which are not on the PATH, else one that is."""
    folders = sorted(_DEBIANS_POSTGRESQL.glob("*/bin"), key=lambda path: int(path.parent.name.split(".")[0]))
    on_path = shutil.which("initdb")
    found = [
        path
        for path in (*reversed(folders), *([Path(on_path).parent] if on_path else []))
        if (path / "initdb").exists()
    ]
    return found[0] if found else None


# --------------------------------------------------------------------------------------------------------------------
# What is wanted, what is there


def digest(*names: str) -> str:
    """One hash over files of the repository: changed requirements change it."""
    return hashlib.sha256(b"\0".join((ROOT / name).read_bytes() for name in names)).hexdigest()


def wanted(tests: bool) -> dict[str, str]:
    """What ``setup.json`` must hold for there to be nothing to do."""
    needs = {"app": digest("requirements.txt", "constraints.txt")}
    if tests:
        needs["tests"] = digest("requirements-test.txt", "constraints.txt")
    return needs


def venv_python(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def works(venv: Path) -> bool:
    """Whether the environment has a Python of a supported version, and pip."""
    version = output([str(venv_python(venv)), "-c", "import sys, pip; print(*sys.version_info[:2])"])
    return version is not None and tuple(map(int, version.split())) in _SUPPORTED


def read_stamp(venv: Path) -> dict[str, Any] | None:
    """Content of ``setup.json``; None when this program did not make the environment."""
    try:
        stamp = json.loads((venv / "setup.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {"state": "installing", "ours": True}  # written halfway
    return stamp if isinstance(stamp, dict) else {"state": "installing", "ours": True}


def write_stamp(venv: Path, stamp: dict[str, Any]) -> None:
    draft = venv / "setup.json.new"
    draft.write_text(json.dumps(stamp, indent=1, sort_keys=True), "utf-8")
    draft.replace(venv / "setup.json")


def decide(venv: Path, build: str, needs: dict[str, str]) -> tuple[str, str]:
    """What to do with the environment ("nothing", "create", "fill", "remake") and why, in words.

    Raises: SetupError when it is somebody else's and can't be used.
    """
    if not venv.exists() and not venv.is_symlink():
        return "create", "there is no .venv yet"
    stamp = read_stamp(venv)
    if stamp is None:
        if not works(venv):
            raise SetupError(
                f"{venv} was not made here and has no working Python 3.11 to 3.13.\nRemove it, then call again."
            )
        return "fill", "the .venv found here is used as it is"
    ours = bool(stamp.get("ours")) and not venv.is_symlink()
    if stamp.get("state") != "ready":
        return ("remake" if ours else "fill"), "the last set-up was not finished"
    if not works(venv):
        if not ours:
            raise SetupError(f"the Python of {venv} no longer works.\nRemove the folder, then call again.")
        return "remake", "its Python is gone or of another version"
    if ours and build not in ("cpu", stamp.get("build")):
        return "remake", "a GPU answers that torch was not installed for"
    if any(stamp.get(part) != value for part, value in needs.items()):
        changed = stamp.get("app", needs["app"]) != needs["app"]
        return "fill", "the requirements changed" if changed else "more is needed"
    return "nothing", ""


# --------------------------------------------------------------------------------------------------------------------
# Doing it


def pip_arguments(build: str, tests: bool, scratch: Path) -> list[str]:
    """What pip is told: requirements without the line of the wheel page where it would be wrong or only cost time."""
    text = (ROOT / "requirements.txt").read_text("utf-8")
    page = re.search(r"^--find-links\s+(\S+)", text, re.MULTILINE)
    torch = re.search(r"^torch==([\w.]+)", text, re.MULTILINE)
    if not page or not torch:
        raise SetupError(
            "requirements.txt has lost its --find-links line or its pin of torch.\n"
            "Restore it: git checkout requirements.txt"
        )
    chosen = BUILDS[build]
    if build == "cpu":
        if reachable(page.group(1)):
            say("no GPU answers: torch for the CPU")
        else:
            say(f"no GPU answers, and {page.group(1)} does not answer within {_PAGE_SECONDS:g} s:")
            say("torch comes from the usual index (on Linux that is the CUDA build, 2.6 GB more)")
            text = text.replace(page.group(0), "")
    else:
        say(f"a GPU answers: torch for {chosen.words}")
        text = text.replace(page.group(0), "")
    scratch.write_text(text, "utf-8")
    arguments = ["-r", str(scratch), "-c", str(ROOT / "constraints.txt")]
    if tests:
        arguments += ["-r", str(ROOT / "requirements-test.txt")]
    if chosen.extra_index:
        arguments += ["--extra-index-url", chosen.extra_index, f"torch=={torch.group(1)}{chosen.local}"]
    return arguments


_CAUSES = (
    (r"No space left on device|Errno 28", "the disk is full. Free some space, then call again."),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "a certificate is not trusted: behind a company's proxy, name its file in PIP_CERT. Then call again.",
    ),
    (
        r"ProxyError|NewConnectionError|NameResolutionError|name resolution|Max retries|Read timed out"
        r"|ConnectionResetError|Network is unreachable",
        "the package index can't be reached. Look at the network (behind a proxy: HTTPS_PROXY), then call again.",
    ),
    (
        r"No matching distribution|Could not find a version|requires a different Python|ResolutionImpossible",
        "a package has no version for this Python and system, or the index can't be reached.\n"
        "Tested: Python 3.11 on Linux x86_64.",
    ),
    (r"Permission denied|Errno 13", "a file can't be written. Look who owns this folder, then call again."),
)


def explain(errors: str) -> str:
    """The likely cause of a failed pip, and what to do."""
    for pattern, advice in _CAUSES:
        if re.search(pattern, errors):
            return advice
    return "see pip's message above. `make clean` removes .venv for a fresh start."


def pip_install(python: Path, arguments: Sequence[str]) -> None:
    """Run pip, its words passed on as they come. Raises: SetupError with the likely cause."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    last: deque[str] = deque(maxlen=60)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", env={**os.environ, "PIP_USER": "0"}
    ) as pip:
        assert pip.stderr is not None
        for line in pip.stderr:
            last.append(line)
            sys.stderr.write(line)
    if pip.returncode != 0:
        raise SetupError(f"pip failed: {explain(''.join(last))}")


def create(venv: Path, build: str) -> None:
    """A new, empty environment; its stamp is there before anything else. Raises: SetupError."""
    free_gb = shutil.disk_usage(venv.parent).free / 1e9
    if free_gb < BUILDS[build].needs_gb:
        raise SetupError(
            f"the disk has {free_gb:.1f} GB free; with torch for {BUILDS[build].words} the app needs about "
            f"{BUILDS[build].needs_gb:g} GB.\nFree some space, then call again."
        )
    venv.mkdir()
    write_stamp(venv, {"state": "installing", "ours": True, "build": build})
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False)
    if done.returncode != 0:
        version = "{}.{}".format(*sys.version_info)
        raise SetupError(
            f"Python {version} can't make environments here. On Debian and Ubuntu that is a package of its own:\n"
            f"  sudo apt install python{version}-venv\nThen call again."
        )


def set_up(venv: Path, tests: bool) -> None:
    """Bring the environment to what is wanted. Raises: SetupError."""
    build, needs = accelerator(), wanted(tests)
    action, why = decide(venv, build, needs)
    if action == "nothing":
        return
    began = time.monotonic()
    say(f"{why}; Python {platform.python_version()}")
    if action == "remake":
        say("making .venv anew")
        shutil.rmtree(venv)
    if action in ("create", "remake"):
        say(f"this takes a few minutes and {BUILDS[build].needs_gb:g} GB the first time")
        create(venv, build)
    before = read_stamp(venv) or {"ours": False, "build": build}
    if action == "fill" and before.get("ours"):
        build = before.get("build", build)  # a GPU that is silent for once does not change what was installed
    stamp = {**before, "build": build, "state": "installing"}
    write_stamp(venv, stamp)
    pip_install(venv_python(venv), pip_arguments(build, tests, venv / "requirements.txt"))
    write_stamp(venv, {**stamp, **needs, "state": "ready"})
    say(f"ready after {time.monotonic() - began:.0f} s")


def ensure_chromium(python: Path) -> None:
    """See to a Chromium for the browser tests: the system's, else Debian's when root, else Playwright's own download.

    Raises: SetupError when none can be had; the browser tests are never left out.
    """
    if find_chromium():
        return
    why = "no Chromium here: installing Debian's package, with Chinese fonts"
    if _debian(why, "chromium", "fonts-noto-cjk") and find_chromium():
        return
    say("no Chromium here: Playwright's own download")
    done = subprocess.run([str(python), "-m", "playwright", "install", "chromium"], check=False)
    if done.returncode != 0:
        raise SetupError(
            "no Chromium for the browser tests.\n"
            "Install chromium or google-chrome by your system's package manager, then call again."
        )


def ensure_postgresql() -> None:
    """See to a PostgreSQL server for the tests, which start one of their own: the system's, else Debian's when root.

    Raises: SetupError when none can be had; the tests of the database are never left out.
    """
    if find_postgresql():
        return
    if _debian("no PostgreSQL here: installing Debian's package", "postgresql") and find_postgresql():
        return
    raise SetupError(
        "no PostgreSQL server for the tests (they start one of their own; initdb was not found).\n"
        "Install postgresql by your system's package manager, then call again."
    )


def _debian(why: str, *packages: str) -> bool:
    """Install packages where that is possible; whether it was tried."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if not (is_root and shutil.which("apt-get")):
        return False
    say(why)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(command, env=environment, check=False)  # judged by what is there afterwards
    return True


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One set-up at a time in this folder: a second one waits instead of taking the first one's work for a ruin."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work here; waiting for it")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def supported_python() -> str | None:
    """Another Python of this machine that will do, or None."""
    for major, minor in _SUPPORTED:
        path = shutil.which(f"python{major}.{minor}")
        if path and output([path, "-c", "import sys; print(*sys.version_info[:2])"]) == f"{major} {minor}\n":
            return path
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 ready, 1 not (said why), 130 interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="also what the tests need, a Chromium among it")
    options = parser.parse_args(arguments)
    if sys.version_info[:2] not in _SUPPORTED:
        better = supported_python()
        if better is None:
            say(f"this is Python {platform.python_version()}; 3.11, 3.12 or 3.13 is needed and none is on the PATH.")
            say("Install one, or name it: make app PYTHON=/path/to/python3.12")
            return 1
        return subprocess.run(
            [better, os.path.abspath(__file__)] + (["--tests"] if options.tests else []), check=False
        ).returncode
    venv = ROOT / ".venv"
    try:
        with alone():
            set_up(venv, options.tests)
            if options.tests:
                ensure_chromium(venv_python(venv))
                ensure_postgresql()
    except SetupError as error:
        for line in str(error).splitlines():
            say(line)
        return 1
    except OSError as error:
        say(f"{error}. Mend that (disk full? whose folder?), then call again.")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next call starts over")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
