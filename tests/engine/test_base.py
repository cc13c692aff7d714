"""engine/base.py: what Params refuses and how it says so, and what a Run gives to an experiment."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base import (
    BaseParams,
    ChoiceSpec,
    FlagSpec,
    NumberSpec,
    ParamsError,
    Problem,
    Result,
    Stopped,
    choice,
    flag,
    make_run,
    number,
)


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=1, high=4096, log2=True)
    tau: float = number(1.0, low=0.01, high=100, step=0.5, unit="s")
    scale: str = choice("inv_sqrt_d_k", "none")
    causal: bool = flag(False)

    def rules(self) -> Iterator[Problem]:
        if self.causal and self.d_k < 2:
            yield Problem("rule", "d_k", self.d_k, rule="causal_needs_two", values={"low": 2})


def problems(**values: object) -> list[Problem]:
    with pytest.raises(ParamsError) as caught:
        Params(**values)
    return caught.value.problems


def test_declarations_are_data():
    assert Params.specs() == {
        "d_k": NumberSpec(1, 4096, None, True, "1"),
        "tau": NumberSpec(0.01, 100, 0.5, False, "s"),
        "scale": ChoiceSpec(("inv_sqrt_d_k", "none")),
        "causal": FlagSpec(),
    }
    assert Params.defaults() == Params().as_dict() == {"d_k": 64, "tau": 1.0, "scale": "inv_sqrt_d_k", "causal": False}
    with pytest.raises(dataclasses.FrozenInstanceError):
        Params().d_k = 8


@pytest.mark.parametrize("values", [{"d_k": 1}, {"d_k": 4096}, {"tau": 0.01}, {"tau": 100.0}, {"scale": "none"}])
def test_bounds_and_choices_are_allowed(values):
    assert Params(**values).as_dict() == Params.defaults() | values


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("d_k", 0, "range"),
        ("d_k", 4097, "range"),
        ("d_k", 10**400, "range"),  # too large for a float
        ("d_k", 1.5, "whole"),
        ("d_k", "64", "finite"),
        ("d_k", True, "finite"),
        ("d_k", None, "finite"),
        ("tau", math.nan, "finite"),
        ("tau", math.inf, "finite"),
        ("tau", -math.inf, "finite"),
        ("tau", 0, "range"),
        ("tau", [1], "finite"),
        ("scale", "nonne", "choice"),
        ("scale", 1, "choice"),
        ("scale", ["none"], "choice"),
        ("causal", 1, "flag"),
        ("causal", "true", "flag"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_what_is_wanted(name, value, kind):
    (problem,) = problems(**{name: value})
    assert (problem.kind, problem.name, problem.got) == (kind, name, value)
    assert name in str(problem)
    assert repr(value) in str(problem)


def test_the_message_says_what_is_allowed():
    assert "from 1 to 4096" in str(problems(d_k=0)[0])
    assert "inv_sqrt_d_k, none (did you mean none?)" in str(problems(scale="nonne")[0])
    assert "whole number" in str(problems(d_k=2.5)[0])
    assert "true or false" in str(problems(causal=0)[0])


def test_all_problems_come_at_once():
    found = problems(d_k=0, tau=math.nan, scale="x", causal=None)
    assert [p.name for p in found] == ["d_k", "tau", "scale", "causal"]


def test_rules_are_asked_only_about_values_in_range():
    assert [p.kind for p in problems(d_k=0, causal=True)] == ["range"]
    (problem,) = problems(d_k=1, causal=True)
    assert (problem.kind, problem.rule, problem.values) == ("rule", "causal_needs_two", {"low": 2})
    assert "causal_needs_two" in str(problem)


def test_one_value_has_one_form():
    whole, real = Params(d_k=64.0, tau=2), Params(d_k=64, tau=2.0)
    assert whole == real
    assert [type(v) for v in (whole.d_k, whole.tau)] == [int, float]
    assert hash(whole) == hash(real)


def test_unknown_names_are_reported_with_the_nearest_and_beside_bad_values():
    with pytest.raises(ParamsError) as caught:
        Params.from_mapping({"dk": 64, "zzz": 1, "tau": -1})
    found = caught.value.problems
    assert [(p.kind, p.name) for p in found] == [("unknown", "dk"), ("unknown", "zzz"), ("range", "tau")]
    assert "did you mean d_k?" in str(found[0])
    assert "did you mean" not in str(found[1])
    assert Params.from_mapping({"d_k": 8}) == Params(d_k=8)


def built(**values):
    """The parameters with no problems, or None with those that they were refused for."""
    try:
        return Params(**values), []
    except ParamsError as error:
        return None, error.problems


anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()))


@settings(deadline=None, derandomize=True)  # the machine may be busy, and a seed is explicit
@given(d_k=anything, tau=anything, scale=anything, causal=anything)
def test_nothing_but_params_error_and_nothing_out_of_bounds(d_k, tau, scale, causal):
    params, problems = built(d_k=d_k, tau=tau, scale=scale, causal=causal)
    if params is None:
        assert problems
        return
    assert type(params.d_k) is int
    assert 1 <= params.d_k <= 4096
    assert 0.01 <= params.tau <= 100
    assert params.scale in ("inv_sqrt_d_k", "none")
    assert isinstance(params.causal, bool)


# --------------------------------------------------------------------------------------------------------------------
# Run


def test_a_seed_means_the_same_numbers_in_every_dtype():
    reference = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        drawn = make_run(3, dtype=dtype).randn(5, 7)
        assert drawn.dtype is getattr(torch, dtype)
        assert torch.equal(drawn, reference.to(drawn.dtype))  # only the rounding of the dtype lies between them
    assert not torch.equal(make_run(4).randn(5, 7), reference)


def test_numbers_are_drawn_on_the_cpu_and_then_moved():
    run = make_run(0, device="meta")  # a device that can hold shapes but draw nothing
    assert run.randn(2, 3).device.type == "meta"
    assert run.generator.device.type == "cpu"
    on_cpu = make_run(0)
    on_cpu.randn(2, 3)
    assert run.rand(4).device.type == "meta"
    on_cpu.rand(4)
    assert torch.equal(run.generator.get_state(), on_cpu.generator.get_state())  # as many were drawn on either


def test_draws_are_what_they_say():
    run = make_run(1)
    n = 100_000
    normal, uniform = run.randn(n).double(), run.rand(n).double()
    assert abs(normal.mean()) < 5 / math.sqrt(n)
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert uniform.min() >= 0
    assert uniform.max() < 1


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    run = make_run(0)
    run.randn(10)
    run.rand(10)
    assert torch.equal(torch.get_rng_state(), before)


def test_progress_reports_and_then_stops():
    seen = []

    def check_stop() -> None:
        if len(seen) == 2:
            raise Stopped("deadline")

    run = make_run(0, on_progress=lambda fraction, partial: seen.append((fraction, partial)), check_stop=check_stop)
    partial = Result({"x": 1.0}, done=0.25)
    run.progress(0.25, partial)
    with pytest.raises(Stopped) as caught:
        run.progress(0.5)
    assert caught.value.reason == "deadline"
    assert seen == [(0.25, partial), (0.5, None)]  # what is known is handed over before the stop takes effect


def test_progress_without_hooks_does_nothing():
    make_run(0).progress(0.5, None)
