"""mask_styles against weights written out in numpy from what each way does, and its exact limit cases."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "mask_styles"
WAYS = get(NAME).Params.specs()["applied"].values
SETTINGS = [
    {"applied": applied, "kv_len": 8, "hidden_len": 3, "q_len": 4, "hidden_mean": hidden_mean}
    for applied in WAYS
    for hidden_mean in (0.0, 10000.0)
    if (applied, hidden_mean) != ("renormalized", 10000.0)  # 0/0, tested below
] + [{"applied": "added", "kv_len": 8, "hidden_len": 3, "q_len": 4, "hidden_twice": 2}]


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def weights(applied: str, z: np.ndarray, hidden: np.ndarray, twice: np.ndarray) -> np.ndarray:
    """Float64, of one set of rows."""
    z = z.copy()
    if applied == "added":
        z += -1e4 * hidden - 1e4 * (hidden & twice)
    elif applied == "filled":
        z[hidden] = -1e4
    elif applied == "minus_inf":
        z[hidden] = -np.inf
    elif applied == "times_zero":
        z[hidden] = 0
    w = softmax(z)
    if applied in ("after_softmax", "renormalized"):
        w[hidden] = 0
    return w / w.sum(axis=-1, keepdims=True) if applied == "renormalized" else w


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, (drawn,) = recorded(experiment, seed=3, **p)
        # the drawn numbers are float32, as is the format; all steps of numpy are in float64
        z = drawn.astype(np.float32).astype(np.float64)
        hidden = np.zeros(z.shape, bool)
        hidden[:, -p["hidden_len"] :] = True
        z = (z + p.get("hidden_mean", 0.0) * hidden).astype(np.float32).astype(np.float64)
        everything = np.ones_like(hidden)
        twice = np.arange(8) >= 8 - p.get("hidden_twice", 0)
        w = weights(p["applied"], z[:-1], hidden[:-1], twice)
        reference = weights("minus_inf", z[:-1], hidden[:-1], twice)
        wanted = {
            "hidden_weight_max": (w * hidden[:-1]).sum(-1).max(),
            "row_sum_min": w.sum(-1).min(),
            "row_sum_max": w.sum(-1).max(),
            "undefined_rows": 0,
            "mask_error_max": np.abs(w - reference).sum(-1).max() / 2,
        }
        if p["applied"] in ("minus_inf", "renormalized"):  # 0/0
            wanted |= {"empty_row_undefined": 1, "empty_row_from_uniform": 1, "empty_row_from_unmasked": 1}
        else:
            empty = weights(p["applied"], z[-1], everything[-1], twice)
            wanted |= {
                "empty_row_undefined": 0,
                "empty_row_from_uniform": np.abs(empty - 1 / 8).sum() / 2,
                "empty_row_from_unmasked": np.abs(empty - softmax(z[-1])).sum() / 2,
            }
        measured = {name: result.metrics[name] for name in wanted}
        # near 1e4 neighbouring float32 numbers lie 1e-3 apart: a logit is off by half of it
        assert measured == pytest.approx(wanted, abs=1e-3), p
        if p.get("hidden_mean", 0) == 0 and p["applied"] not in ("added",):
            assert measured == pytest.approx(wanted, abs=1e-6), p  # float32, 8 keys


def test_law_holds():
    law(get(NAME))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("softmax(logits * keep)", "softmax(logits * ~keep)"),
        ("weights = softmax(logits) * keep", "weights = softmax(logits * keep)"),
        ("softmax(torch.where(keep, logits, constant))", "softmax(logits + torch.where(keep, 0, constant))"),
        ("torch.where(again & ~keep, constant, zero)", "torch.where(again & keep, constant, zero)"),
        ("keep[-1] = False", "keep[-1] = True"),
        ("(rows * ~visible.cpu())", "(rows * visible.cpu())"),
        ("(weights - wanted).abs().sum(dim=-1) / 2", "(weights - wanted).abs().sum(dim=-1)"),
    ],
)
def test_law_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_minus_infinity_hides_exactly_in_every_format(dtype):
    metrics = run(get(NAME), applied="minus_inf", low_dtype=dtype, hidden_mean=10000.0).metrics
    assert metrics["hidden_weight_max"] == 0 == metrics["undefined_rows"]
    # weights are rounded to the format, 16 of them in a row
    assert metrics["mask_error_max"] < 16 * {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}[dtype]


def test_renormalizing_divides_zero_by_zero_where_hidden_logits_dominate():
    assert run(get(NAME), applied="renormalized", hidden_mean=200.0).metrics["undefined_rows"] == 64
    assert run(get(NAME), applied="renormalized", hidden_mean=50.0).metrics["undefined_rows"] == 0


@pytest.mark.parametrize(
    ("dtype", "constant", "refused", "infinite"),
    [
        ("float16", "minus_1e4", 0, 0),
        ("float16", "minus_1e9", 1, 1),
        ("float16", "format_min", 0, 0),
        ("bfloat16", "minus_1e9", 0, 0),
        ("float32", "minus_1e9", 0, 0),
    ],
)
def test_what_a_constant_becomes_in_a_format(dtype, constant, refused, infinite):
    metrics = run(get(NAME), low_dtype=dtype, mask_constant=constant).metrics
    assert (metrics["fill_refused"], metrics["infinite_mask_share"]) == (refused, infinite)


def test_two_minima_added_are_minus_infinity_where_they_meet():
    metrics = run(get(NAME), mask_constant="format_min", hidden_twice=4).metrics
    assert metrics["infinite_mask_share"] == 0.5  # 4 of the 8 hidden keys
    assert metrics["empty_row_from_uniform"] == pytest.approx(4 / 16)  # 12 of 16 keys share the weight
    assert run(get(NAME), mask_constant="format_min", hidden_twice=16).metrics["empty_row_undefined"] == 1


def test_the_curve_finds_where_each_way_gives_in():
    table = run(get(NAME)).tables["leak"]
    rows = {
        (a, float(x)): w
        for x, a, w in zip(*(table[c] for c in ("hidden_lead", "applied", "hidden_weight")), strict=True)
    }
    assert rows["added", 8192.0] == 0
    assert 0 < rows["added", 10000.0] < 1
    assert rows["added", 16384.0] > 0.999
    assert {w for (a, _), w in rows.items() if a in ("minus_inf", "filled", "after_softmax")} == {0}
    assert len({w for (a, _), w in rows.items() if a == "times_zero"}) == 1  # it does not see the hidden logits
    assert ("renormalized", 64.0) in rows
    assert ("renormalized", 256.0) not in rows  # 0/0 beyond 103


def test_refuses_what_is_not_there():
    with pytest.raises(ParamsError, match="some_key_visible"):
        get(NAME).Params(kv_len=8, hidden_len=8)
    with pytest.raises(ParamsError, match="twice_within_keys"):
        get(NAME).Params(hidden_twice=17)
    with pytest.raises(ParamsError, match="too_many_logits"):
        get(NAME).Params(kv_len=4096, q_len=1024)
