"""attention_walkthrough against the same draws worked out in numpy, head by head, and against PyTorch's own layer."""

import math

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "attention_walkthrough"
SETTINGS = [
    {},
    {"causal": True, "batch": 1},
    {"keys_from": "other_sequence", "q_len": 5, "kv_len": 7, "d_v": 12},
    {"keys_from": "other_sequence", "q_len": 3, "kv_len": 1, "n_heads": 1},
    {"causal": True, "softmax_over": "queries"},
    {"causal": True, "mask_position": "after", "scale": "none"},
    {"causal": True, "mask_position": "after_renormalized"},
    {"keys_from": "other_sequence", "kv_len": 20, "softmax_over": "queries_then_keys", "sink": True},
    {"dropout": 0.3, "sink": True, "d_model": 24},
    {"causal": True, "rope": True, "d_k": 6, "d_v": 8},
    {"scale": "none", "d_k": 64, "n_heads": 8},
]


def turned(x: np.ndarray) -> np.ndarray:
    """RoPE as complex numbers: the pair (i, i + d/2) times exp(i t θ). Shapes: (seq_len, d)."""
    half = x.shape[-1] // 2
    # the engine's angles are float32: so are these, and the products differ in the last digit of a float32
    angles = np.arange(len(x), dtype=np.float32)[:, None] * np.float32(1e4) ** -(
        np.arange(half, dtype=np.float32) / np.float32(half)
    )
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles.astype(np.float64))
    return np.concatenate([z.real, z.imag], axis=-1)


def exponentials(z: np.ndarray, axis: int, sink: bool) -> np.ndarray:
    e = np.exp(z)
    return e / (e.sum(axis=axis, keepdims=True) + sink)  # exp(0) = 1


def by_hand(p: dict, x: np.ndarray, x_kv: np.ndarray, W: list[np.ndarray], kept: np.ndarray | None) -> dict:
    """One sequence and one head at a time, W_o applied head by head and summed. Shapes: x (batch, q_len, d_model)."""
    q_len, kv_len = x.shape[1], x_kv.shape[1]
    out, weights, contexts, values, mapped = np.zeros_like(x), {}, {}, {}, np.zeros((len(x), kv_len, x.shape[-1]))
    for b in range(len(x)):
        for h in range(p["n_heads"]):
            columns, rows = slice(h * p["d_k"], (h + 1) * p["d_k"]), slice(h * p["d_v"], (h + 1) * p["d_v"])
            q, k, v = x[b] @ W[0][:, columns], x_kv[b] @ W[1][:, columns], x_kv[b] @ W[2][:, rows]
            if p["rope"]:
                q, k = turned(q), turned(k)
            z = q @ k.T / (math.sqrt(p["d_k"]) if p["scale"] == "inv_sqrt_d_k" else 1)
            allowed = np.array([[not p["causal"] or j <= i for j in range(kv_len)] for i in range(q_len)])
            if p["mask_position"] == "before":
                z = np.where(allowed, z, -np.inf)
            w = exponentials(z, 1 if p["softmax_over"] == "keys" else 0, p["sink"])
            if p["softmax_over"] == "queries_then_keys":
                w = w / w.sum(axis=1, keepdims=True)
            w = w * allowed
            if p["mask_position"] == "after_renormalized":
                w = w / w.sum(axis=1, keepdims=True)
            if kept is not None:
                w = w * kept[b, h] / (1 - p["dropout"])
            weights[b, h], contexts[b, h], values[b, h] = w, w @ v, v
            out[b] += w @ v @ W[3][rows]
            mapped[b] += v @ W[3][rows]
    return {"out": out, "weights": weights, "contexts": contexts, "values": values, "mapped": mapped}


def outside(means: list[np.ndarray], points: list[np.ndarray]) -> float:
    """Share of coordinates beyond the smallest and largest of their points; 1e-9 for rounding."""
    return float(
        np.mean(
            [
                np.any([m > p.max(axis=0) + 1e-9, m < p.min(axis=0) - 1e-9], axis=0)
                for m, p in zip(means, points, strict=True)
            ]
        )
    )


def other_factors(W: list[np.ndarray], p: dict, mirrors: list[np.ndarray]) -> list[np.ndarray]:
    """The matrices of each head times the reflections I - 2uuᵀ."""
    found = [w.copy() for w in W]
    for h in range(p["n_heads"]):
        R, S = (np.eye(len(u)) - 2 * np.outer(u, u) / (u @ u) for u in (mirrors[0][h], mirrors[1][h]))
        k, v = slice(h * p["d_k"], (h + 1) * p["d_k"]), slice(h * p["d_v"], (h + 1) * p["d_v"])
        found[0][:, k], found[1][:, k] = W[0][:, k] @ R, W[1][:, k] @ R
        found[2][:, v], found[3][v] = W[2][:, v] @ S, S @ W[3][v]
        np.testing.assert_allclose(found[0][:, k] @ found[1][:, k].T, W[0][:, k] @ W[1][:, k].T, atol=1e-12)
        np.testing.assert_allclose(found[2][:, v] @ found[3][v], W[2][:, v] @ W[3][v], atol=1e-12)
    return found


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params(**given).as_dict()
        result, draws = recorded(experiment, seed=5, **given)
        x = draws.pop(0)
        same = p["keys_from"] == "same_sequence"
        x_kv = x if same else draws.pop(0)
        W = [w / math.sqrt(len(w)) for w in draws[:4]]
        other, mirrors = draws[4], draws[5:7]
        kept = draws[7] >= p["dropout"] if p["dropout"] else None
        assert x_kv.shape[1] == (p["q_len"] if same else p["kv_len"])

        call = by_hand(p, x, x_kv, W, kept)
        replaced = np.concatenate([x[:, :-1], other], axis=1)
        moved = by_hand(p, replaced, replaced if same else x_kv, W, kept)["out"] - call["out"]
        back = by_hand(p, x[:, ::-1] if same else x, x_kv[:, ::-1], W, kept)["out"]
        remade = by_hand(p, x, x_kv, other_factors(W, p, mirrors), kept)["out"]
        plain = p | {"mask_position": "before", "softmax_over": "keys", "sink": False}
        reference = by_hand(plain, x, x_kv, W, None)
        size = math.sqrt((call["out"] ** 2).mean())
        heads = list(call["weights"])
        rows = np.array([call["weights"][head].sum(axis=1) for head in heads])
        columns = np.array([call["weights"][head].sum(axis=0) for head in heads])
        bytes_a_number = 2
        want = {
            "row_sum_min": rows.min(),
            "row_sum_max": rows.max(),
            "column_sum_min": columns.min(),
            "column_sum_max": columns.max(),
            "first_column_sum": columns[:, 0].mean(),
            "sdpa_difference": max(np.abs(call["contexts"][h] - reference["contexts"][h]).max() for h in heads),
            "earlier_output_change": np.abs(moved[:, :-1]).max() / size,
            "order_difference": np.abs((back[:, ::-1] if same else back) - call["out"]).max() / size,
            "refactored_difference": np.abs(remade - call["out"]).max() / size,
            "context_outside_share": outside([call["contexts"][h] for h in heads], [call["values"][h] for h in heads]),
            "out_outside_share": outside(list(call["out"]), list(call["mapped"])),
            "weights_bytes": p["batch"] * p["n_heads"] * p["q_len"] * x_kv.shape[1] * bytes_a_number,
            "context_bytes": p["batch"] * p["n_heads"] * p["q_len"] * p["d_v"] * bytes_a_number,
            "out_bytes": p["batch"] * p["q_len"] * p["d_model"] * bytes_a_number,
        }
        # float64 on both sides, some hundred terms a sum; with RoPE the angles are float32 on both, and pow may differ
        # in its last bit: 6e-8 of an angle of at most 16
        exact = {"rel": 1e-9, "abs": 1e-11} if not p["rope"] else {"rel": 2e-5, "abs": 2e-5}
        assert result.metrics == pytest.approx(want, **exact), given

        table = result.tables["weights"]
        shown = call["weights"][0, 0][table["query_position"], table["key_position"]]
        np.testing.assert_allclose(table["attention_weight"], shown, rtol=1e-4, atol=1e-6)  # drawn in float32
        assert len(shown) == call["weights"][0, 0].size
        sums = result.tables["sums"]
        np.testing.assert_allclose(sums["weight_sum"][sums["summed_over"] == "rows"], rows[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            sums["weight_sum"][sums["summed_over"] == "columns"], columns[0], rtol=1e-4, atol=1e-5
        )
        for name, vector, points in (
            ("context", call["contexts"][0, 0][-1], call["values"][0, 0]),
            ("out", call["out"][0, -1], call["mapped"][0]),
        ):
            table, low = result.tables[name], "value" if name == "context" else "mapped"
            for column, wanted in (
                (name, vector),
                (f"{low}_min", points.min(axis=0)),
                (f"{low}_max", points.max(axis=0)),
            ):
                np.testing.assert_allclose(table[column], wanted[:64], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('if params.softmax_over == "keys":', 'if params.softmax_over == "queries":'),  # the other axis
        ("x.transpose(1, 2).flatten(-2)", "x.reshape(len(x), x.shape[2], -1)"),  # heads and positions mixed up
        ("x.unflatten(-1, (n_heads, -1)).transpose(1, 2)", "x.unflatten(-1, (-1, n_heads)).movedim(-1, 1)"),
        ("(x_kv, matrices.W_v)", "(x_kv, matrices.W_v.flip(0))"),
        ("attention_logits(q, k, params.scale)", "attention_logits(q, k)"),  # always scaled
        ("dtype=torch.bool, device=logits.device).tril()", "dtype=torch.bool, device=logits.device).tril(1)"),
        ("return weights if kept is None else weights * kept / (1 - params.dropout)", "return weights"),
        ("torch.zeros_like(logits[..., :1])", "torch.ones_like(logits[..., :1])"),  # another sink
        ("_mirrored(matrices.W_o.T", "_mirrored(matrices.W_o.T.neg()"),
        ("after_reversing = after_reversing.flip(1)", "pass"),
        ("(after_replacing - call.out)[:, :-1]", "(after_replacing - call.out)"),  # the replaced token itself
        ("call.weights.sum(dim=-1), call.weights.sum(dim=-2)", "call.weights.sum(dim=-2), call.weights.sum(dim=-1)"),
        ("_join(call.v) @ matrices.W_o", "_join(call.v)[..., :1] @ matrices.W_o[:1]"),
        ("_outside_share(call.context, call.v)", "_outside_share(call.context, -call.v)"),
        ("is_causal=params.causal, scale=scale", "scale=scale"),
        ("rotate(k, angles[: x_kv.shape[1]])", "k"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(
    "settings", [{}, {"causal": True}, {"keys_from": "other_sequence", "kv_len": 9}, {"sink": True}]
)
def test_the_last_output_is_that_of_pytorchs_layer(settings):
    """The same matrices in torch.nn.MultiheadAttention, which splits, scales, masks and joins by itself.

    Its ``add_zero_attn`` appends a key and a value of zeros: the logit of the sink.
    """
    given = {"batch": 1, "q_len": 6, "n_heads": 4, "d_model": 32, "d_k": 8, "d_v": 8} | settings
    result, draws = recorded(get(NAME), seed=9, **given)
    drawn = [torch.from_numpy(d) for d in draws]
    x = drawn.pop(0)
    x_kv = x if "keys_from" not in settings else drawn.pop(0)
    sink = "sink" in settings
    layer = torch.nn.MultiheadAttention(32, 4, bias=False, batch_first=True, add_zero_attn=sink, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([W.T for W in drawn[:3]]) / math.sqrt(32))
        layer.out_proj.weight.copy_(drawn[3].T / math.sqrt(32))
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1) if "causal" in settings else None  # True is hidden here
        out, weights = layer(x, x_kv, x_kv, attn_mask=mask, average_attn_weights=False)
    np.testing.assert_allclose(result.tables["out"]["out"], out[0, -1].numpy(), rtol=1e-12, atol=1e-12)  # float64
    weights = weights[0, 0, :, : x_kv.shape[1]]
    shown = result.tables["weights"]["attention_weight"].reshape(weights.shape)
    np.testing.assert_allclose(shown, weights.numpy(), atol=1e-7)  # drawn in float32


def metrics(seed: int = 1, **params: object) -> dict[str, float]:
    return run(get(NAME), seed=seed, **params).metrics


def test_equal_widths_are_compared_with_a_fused_kernel_and_unequal_ones_with_its_parts():
    def operations(**params: object) -> set[str]:
        with profile(activities=[ProfilerActivity.CPU]) as recorded_operations:
            run(get(NAME), **params)
        return {event.key for event in recorded_operations.key_averages()}

    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert fused in operations(d_k=16, d_v=16)
    assert fused not in operations(d_k=16, d_v=12)


def test_one_key_takes_everything():
    got = metrics(keys_from="other_sequence", kv_len=1, q_len=8)
    assert got["row_sum_min"] == got["row_sum_max"] == 1
    assert got["column_sum_min"] == got["column_sum_max"] == 8
    assert got["context_outside_share"] == got["out_outside_share"] == 0


def test_a_causal_call_keeps_the_future_out_exactly_and_every_slip_lets_it_in():
    assert metrics(causal=True)["earlier_output_change"] == 0
    for slip in ({"mask_position": "after"}, {"softmax_over": "queries"}, {"softmax_over": "queries_then_keys"}):
        assert metrics(causal=True, **slip)["earlier_output_change"] > 1e-3, slip
    assert metrics(causal=True, mask_position="after_renormalized")["earlier_output_change"] < 1e-5  # float32


def test_a_query_does_not_touch_the_others_unless_the_softmax_runs_over_queries():
    cross = {"keys_from": "other_sequence", "kv_len": 9}
    assert metrics(**cross)["earlier_output_change"] == 0
    assert metrics(**cross, softmax_over="queries")["earlier_output_change"] > 1e-3


@pytest.mark.parametrize("scale", ["inv_sqrt_d_k", "none"])
def test_one_head_stays_in_the_range_of_the_mapped_values_and_several_may_leave_it(scale):
    one = metrics(n_heads=1, d_k=64, scale=scale)
    assert one["context_outside_share"] == one["out_outside_share"] == 0
    several = metrics(n_heads=8, d_k=64, scale="none")
    assert several["context_outside_share"] == 0
    assert several["out_outside_share"] > 0


def test_when_everything_is_dropped_nothing_is_undefined():
    got = [metrics(s, keys_from="other_sequence", q_len=2, kv_len=1, n_heads=1, batch=1, dropout=0.9) for s in range(9)]
    assert any(m["row_sum_max"] == 0 for m in got)
    assert all(math.isfinite(v) for m in got for v in m.values())


def test_refuses_what_makes_no_sense_and_what_would_not_answer_a_stop_in_time():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="causal_needs_one_sequence"):
        params(causal=True, keys_from="other_sequence")
    with pytest.raises(ParamsError, match="rope_needs_pairs"):
        params(rope=True, d_k=15)
    with pytest.raises(ParamsError, match="too_many_weights_of_a_call"):
        params(q_len=1024)
    with pytest.raises(ParamsError, match="too_many_products"):
        params(d_model=1024, d_k=256, d_v=256, q_len=256, batch=1)
    params(q_len=1024, batch=1, n_heads=1)  # the most weights that are allowed
