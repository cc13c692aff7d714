"""sweep.py: when there is something to sweep."""

from streamlit.testing.v1 import AppTest


def _page(with_number: bool) -> None:
    from dataclasses import dataclass
    from types import SimpleNamespace

    from engine.base import BaseParams, choice, number
    from engine.runner import RunSpec
    from ui import sweep

    @dataclass(frozen=True)
    class OfChoices(BaseParams):
        mask: str = choice("causal", "no_mask")

    @dataclass(frozen=True)
    class OfNumbers(BaseParams):
        d_k: int = number(8, low=1, high=64, log2=True)

    params = OfNumbers if with_number else OfChoices
    experiment = SimpleNamespace(name="made_up", trains=False, Params=params, metric_names=("n_due", "minutes"))
    sweep.draw(experiment, RunSpec("made_up", params.defaults(), 0, "cpu", "float32"), "lab")


def test_what_has_no_number_is_not_swept():
    for with_number in (True, False):
        app = AppTest.from_function(_page, kwargs={"with_number": with_number}, default_timeout=30).run()
        assert not app.exception
        assert len(app.expander) == with_number
