"""empty_row_gradients against the backward pass of softmax attention written out in numpy, step by step."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "empty_row_gradients"
GUARDS = get(NAME).Params.specs()["guard"].values
BY_HAND = [guard for guard in GUARDS if not guard.startswith("sdpa")]
N, P = 6, 2


def backward(guard: str, written: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    """Gradients of q, k and v in float64, by the rules of each step and with no case for NaN."""
    keep = np.tril(np.ones((N, N), bool))
    keep[:, :P] = False
    seen = keep.any(axis=1, keepdims=True)
    visible = keep | ~seen if guard == "open" else keep
    z = q @ k.T / np.sqrt(q.shape[1])
    fill = np.finfo(np.float32).min if guard == "finite" else -np.inf
    z = np.where(visible, z, fill if written == "masked_fill" else z + fill)
    with np.errstate(invalid="ignore"):
        e = np.exp(z - z.max(axis=1, keepdims=True))
    w = e / e.sum(axis=1, keepdims=True)
    g = g * seen
    used = np.where(seen, w, 0) if guard == "where_weights" else w
    grad_v, grad_w = used.T @ g, g @ v.T
    grad_w = np.where(seen, grad_w, 0) if guard == "where_weights" else grad_w
    grad_z = w * (grad_w - (w * grad_w).sum(axis=1, keepdims=True))
    if written == "masked_fill":
        grad_z = np.where(visible, grad_z, 0)
    grad_z = grad_z / np.sqrt(q.shape[1])
    return [grad_z @ k, grad_z.T @ q, grad_v]


def law(experiment: Experiment) -> None:
    for guard in BY_HAND:
        for written in ("masked_fill", "additive_mask"):
            p = {"guard": guard, "mask_written": written, "seq_len": N, "left_padding": P, "d_k": 4}
            result, draws = recorded(experiment, seed=5, **p)
            grads = backward(guard, written, *draws)
            names = ("nan_grad_q_rows", "nan_grad_k_rows", "nan_grad_v_rows")
            wanted = {name: np.isnan(x).any(axis=1).sum() for name, x in zip(names, grads, strict=True)}
            wanted["nan_outputs"] = P if guard == "bare" else 0
            wanted["zero_outputs"] = P if guard in ("where_out", "where_weights", "open") else 0
            wanted["mean_outputs"] = P if guard == "finite" else 0
            assert {name: result.metrics[name] for name in wanted} == wanted, p
            assert result.metrics["grad_error_max"] < 1e-5, p  # float32, sums of a few numbers near 1


def test_law_holds():
    law(get(NAME))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weights = torch.where(seen, weights, 0.0)", "weights = torch.where(seen, 0.0, weights)"),
        ("out = torch.where(seen, out, 0.0)", "out = out"),
        ("visible = keep | ~seen if", "visible = keep if"),
        ("fill = torch.finfo(q.dtype).min if guard ==", "fill = torch.finfo(q.dtype).min if guard !="),
        ('if mask_written == "additive_mask":', 'if mask_written == "masked_fill":'),
    ],
)
def test_law_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("guard", GUARDS)
def test_nothing_happens_where_no_row_is_empty(guard):
    metrics = run(get(NAME), guard=guard, left_padding=0).metrics
    assert metrics["grad_error_max"] < 1e-5  # float32
    assert {value for name, value in metrics.items() if name != "grad_error_max"} == {0}


@pytest.mark.parametrize("guard", GUARDS[-3:])
def test_the_other_queries_of_the_fused_function_have_the_right_gradient(guard):
    assert run(get(NAME), guard=guard, seq_len=16, left_padding=3).metrics["grad_error_max"] < 1e-5  # float32


def test_the_tables_and_the_metrics_count_the_same():
    table = run(get(NAME), guard="where_weights", mask_written="additive_mask").tables["nan_rows"]
    columns = ("mask_written", "guard", "tensor", "nan_row_count")
    rows = {tuple(key): n for *key, n in zip(*(table[c] for c in columns), strict=True)}
    counts = [rows["additive_mask", "where_weights", f"of_{x}"] for x in "qkv"]
    assert counts == [2, 8, 0]
    assert {n for (_, guard, _), n in rows.items() if guard in ("open", "finite")} == {0}


def test_what_the_card_says_of_pytorch_and_no_run_measures():
    import torch

    keep = torch.ones(8, 8, dtype=torch.bool).tril()
    keep[:, :2] = False
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    attend = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    nan_rows = [attend(x, x, x, attn_mask=~keep, need_weights=w)[0].isnan().any(-1).sum() for w in (True, False)]
    assert nan_rows == [2, 0]

    k = x.clone()
    k[:, 0] = torch.nan  # a key that every query hides
    keep = keep | torch.eye(8, dtype=torch.bool)
    keep[0] = keep[1]
    assert torch.nn.functional.scaled_dot_product_attention(x, k, x, attn_mask=keep).isnan().any(-1).all()

    with pytest.raises(RuntimeError, match="value cannot be converted to type c10::Half without overflow"):
        torch.zeros(8, 8, dtype=torch.float16).masked_fill(~keep, -1e9)
    assert torch.tensor(torch.finfo(torch.float32).min).to(torch.bfloat16).isneginf()


def test_refuses_a_sequence_of_padding():
    with pytest.raises(ParamsError, match="some_token_is_real"):
        get(NAME).Params(seq_len=4, left_padding=4)
