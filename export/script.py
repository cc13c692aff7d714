"""A run as a Python script that needs torch and numpy alone, and prints the numbers of the app."""

from __future__ import annotations

import importlib.metadata
import textwrap
import unicodedata
from pathlib import Path

from content.loader import load_deck
from engine import registry
from engine.base import BaseParams, ChoiceSpec, NumberSpec, TextSpec
from engine.runner import RunSpec
from export.flat import Flat, Section, flatten

WIDTH = 120
RULE = "# " + "=" * (WIDTH - 2)

# The names that it uses of the experiment are what flatten() keeps.
RUN = """\
torch.set_num_threads(1)  # as the app does: sums that are split among threads differ in their last digits
try:
    device = str(torch.zeros(1, device=DEVICE).device)
except (RuntimeError, AssertionError):  # the latter where torch was built without this kind of device
    device = "cpu"
print(f"# seed {SEED}, {device}, {DTYPE}, torch {torch.__version__}")

result = run(Params.from_mapping(PARAMETERS), make_run(SEED, device, DTYPE))
for metric in METRICS:
    if metric.name in result.metrics:  # some are measured under some parameters only
        unit = "" if metric.unit == "1" else f" {metric.unit}"
        print(f"{metric.name} = {result.metrics[metric.name]!r}{unit}")
"""
SETTINGS = """\
SEED = {seed}
DEVICE = {device}  # "cpu", "cuda", "mps", "xpu"; one that is not there becomes "cpu"
DTYPE = {dtype}  # "float32" or "float64"
"""


def script(spec: RunSpec, *, title: str, about: str, language: str) -> str:
    """A Python script that runs an experiment and prints each metric as ``name = value unit``.

    ``title`` and ``about`` are put at its top, ``language`` is that of the other words there.

    Raises: UnknownExperiment, ParamsError; ExportError where the code does not fit into one file.
    """
    flat = flat_run(spec)
    *engine, experiment = (section_text(section) for section in flat.sections)
    parts = [preamble(spec, flat), *engine, experiment, f"{RULE}\n# The run\n\n{RUN}"]
    return header(spec, flat, title, about, language) + "\n" + "\n\n".join(parts)


def flat_run(spec: RunSpec, after: str = "") -> Flat:
    """The code of a run's experiment with what it uses; ``after``: code that follows the run.

    Raises: UnknownExperiment, ExportError.
    """
    settings = _settings(RunSpec(spec.experiment, {}, 0))  # always the same: flatten() remembers by its arguments
    return flatten(spec.experiment, f"PARAMETERS = {{}}\n{settings}{RUN}{after}")


def _settings(spec: RunSpec) -> str:
    return SETTINGS.format(seed=spec.seed, device=_python(spec.device), dtype=_python(spec.dtype))


def preamble(spec: RunSpec, flat: Flat) -> str:
    """Imports, and what a reader may change: parameters with their bounds, seed, device, dtype.

    Raises: UnknownExperiment, ParamsError.
    """
    params = registry.get(spec.experiment).Params.from_mapping(spec.params)
    lines = [line for name, value in params.as_dict().items() for line in _entry(params, name, value)]
    changeable = "# What runs. Change it: a value that does not fit is refused, with what would.\n"
    settings = _settings(spec)
    parameters = "\n".join(["PARAMETERS = {", *lines, "}\n"])
    return f"from __future__ import annotations\n\n{flat.imports}\n\n{changeable}{parameters}{settings}"


def section_text(section: Section) -> str:
    """One module's part: a heading, the module's docstring, its code."""
    parts = [f"{RULE}\n# {section.file}, what is used of it\n", *([section.about + "\n\n"] if section.about else [])]
    return "\n".join([*parts, section.code + "\n"])


def versions() -> tuple[str, str]:
    """torch and numpy that are installed, without the name of their build; neither is imported."""
    torch, numpy = (importlib.metadata.version(name).partition("+")[0] for name in ("torch", "numpy"))
    return torch, numpy


def say(key: str, language: str, **values: object) -> str:
    """A sentence of strings.yaml for an export."""
    return load_deck().strings.ui[key].get(language).format(**values)


def header(spec: RunSpec, flat: Flat, title: str, about: str, language: str) -> str:
    """Comments at the top: what it is, what it needs."""
    torch, numpy = versions()
    paragraphs = [
        title,
        about,
        say("script_needs", language, experiment=spec.experiment, torch=torch, numpy=numpy),
        f"    pip install torch=={torch} numpy=={numpy}",
    ]
    paragraphs += [say("script_file", language, file=file, name=Path(file).name) for file in flat.files]
    return "\n#\n".join("\n".join(_comment(paragraph)) for paragraph in paragraphs) + "\n"


def _comment(text: str) -> list[str]:
    """Lines of at most WIDTH columns; a Chinese character takes two of them."""
    wide = any(unicodedata.east_asian_width(character) in "WF" for character in text)
    indent = text[: len(text) - len(text.lstrip(" "))]
    width = WIDTH // 2 - 1 if wide else WIDTH - 2
    return [f"# {line}" for line in textwrap.wrap(text, width, subsequent_indent=indent)]


def _entry(params: BaseParams, name: str, value: object) -> list[str]:
    """A parameter, and what it may be: behind it, or above it where that is too long for the line."""
    entry, bounds = f'    "{name}": {_python(value)},', _bounds(params, name)
    if len(f"{entry}  # {bounds}") <= WIDTH:
        return [f"{entry}  # {bounds}"]
    return [*(f"    # {line}" for line in textwrap.wrap(bounds, WIDTH - 6)), entry]


def _bounds(params: BaseParams, name: str) -> str:
    """What a parameter may be, and its default where that is another."""
    spec, default = params.specs()[name], params.defaults()[name]
    if isinstance(spec, ChoiceSpec):
        return ", ".join(map(_python, spec.values))  # the first is the default
    if isinstance(spec, TextSpec):
        return f"at most {spec.most} characters"  # its default is an example, too long to stand beside it
    changed = f"; default {_python(default)}" if getattr(params, name) != default else ""
    if isinstance(spec, NumberSpec):
        return f"{'whole, ' if isinstance(default, int) else ''}{_short(spec.low)} to {_short(spec.high)}{changed}"
    return f"True or False{changed}"


def _short(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else repr(value)


def _python(value: object) -> str:
    """A plain value as Python, strings in double quotes where that costs no backslash."""
    text = repr(value)
    return f'"{text[1:-1]}"' if text.startswith("'") and '"' not in text else text
