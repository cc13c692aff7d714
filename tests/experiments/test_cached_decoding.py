"""cached_decoding against a decoder that is written from its definition, one token at a time, in numpy."""

import itertools
import math

import numpy as np
import pytest
import torch

from engine import decoding, language_model
from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "cached_decoding"
WAYS = get(NAME).Params.specs()["decoded"].values
D, HEADS, KV_HEADS, D_K, LAYERS = 16, 4, 2, 4, 2
PROMPT, NEW = 3, 4
LENGTH = PROMPT + NEW
SIZES = {
    "d_model": D,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "n_layers": LAYERS,
    "prompt_len": PROMPT,
    "new_tokens": NEW,
    "tokens_per_step": 2,
}


def norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5)


def turn(x: np.ndarray, t: int) -> np.ndarray:
    frequencies = np.array([np.float32(10_000.0 ** (-2 * j / D_K)) for j in range(D_K // 2)])
    z = (x[:, : D_K // 2] + 1j * x[:, D_K // 2 :]) * np.exp(1j * t * frequencies)
    return np.concatenate((z.real, z.imag), axis=1)


class Decoder:
    """Token by token through one layer at a time: what a token sees is a list of (key, value) for each head."""

    def __init__(self, draws: list[np.ndarray]) -> None:
        matrices = iter(draws[: 6 * LAYERS])
        self.layers = [[next(matrices) for _ in range(6)] for _ in range(LAYERS)]
        self.layers = [[W / math.sqrt(W.shape[1]) for W in layer] for layer in self.layers]
        self.tokens = draws[6 * LAYERS]
        noise = draws[6 * LAYERS + 1 :]
        self.noise = {kind: noise[i * LAYERS : (i + 1) * LAYERS] for i, kind in enumerate("qkv")}

    def step(self, x: list[np.ndarray], positions: list[int], cache: list, way: str) -> list[np.ndarray]:
        past = len(cache[0])
        for number, (W_q, W_k, W_v, W_o, W_up, W_down) in enumerate(self.layers):
            queries = []
            for row, t in zip(x, positions, strict=True):
                q, k, v = ((norm(row) @ W.T).reshape(-1, D_K) for W in (W_q, W_k, W_v))
                queries.append(turn(q, t))
                cache[number].append((turn(k, t), v))
            out = []
            for i, row in enumerate(x):
                read = np.concatenate(
                    [self.head(number, h, queries[i][h], i, len(x), past, cache, way) for h in range(HEADS)]
                )
                row = row + read @ W_o.T
                up = norm(row) @ W_up.T
                out.append(row + np.array([u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in up]) @ W_down.T)
            x = out
        return x

    def head(
        self, number: int, h: int, q: np.ndarray, i: int, new: int, past: int, cache: list, way: str
    ) -> np.ndarray:
        pairs = [(k[h * KV_HEADS // HEADS], v[h * KV_HEADS // HEADS]) for k, v in cache[number]]
        if way == "keys_replaced":
            pairs = [(self.noise["k"][number][h, s] if s < past else k, v) for s, (k, v) in enumerate(pairs)]
        if way == "values_replaced":
            pairs = [(k, self.noise["v"][number][h, s] if s < past else v) for s, (k, v) in enumerate(pairs)]
        seen = {"top_left_mask": i + 1, "no_mask": past + new}.get(way, past + i + 1)
        pairs = pairs[:seen]
        if way == "empty_slots_seen":
            pairs += [(np.zeros(D_K), np.zeros(D_K))] * (LENGTH - past - new)
        weights = np.exp([q @ k / math.sqrt(D_K) for k, _ in pairs])
        return sum(w * v for w, (_, v) in zip(weights / weights.sum(), pairs, strict=True))

    def whole(self, length: int) -> list[np.ndarray]:
        return self.step(list(self.tokens[:length]), list(range(length)), [[] for _ in range(LAYERS)], "correctly")


def whiteboard(way: str, draws: list[np.ndarray]) -> dict[str, float]:
    decoder = Decoder(draws)
    cache: list = [[] for _ in range(LAYERS)]
    decoder.step(list(decoder.tokens[:PROMPT]), list(range(PROMPT)), cache, "correctly")
    errors = []
    for start in range(PROMPT, LENGTH, 2):
        first = {"positions_restart": 0, "one_position_late": start + 1}.get(way, start)
        got = decoder.step(list(decoder.tokens[start : start + 2]), [first, first + 1], cache, way)
        wanted = decoder.whole(start + 2)[start:]
        errors += [np.sqrt(((g - w) ** 2).mean() / (w**2).mean()) for g, w in zip(got, wanted, strict=True)]
    full: list = [[] for _ in range(LAYERS)]
    decoder.step(list(decoder.tokens), list(range(LENGTH)), full, "correctly")
    stored = []
    for part in (0, 1):
        got, wanted = (np.array([pair[part] for pair in c[-1]]) for c in (cache, full))
        stored.append(np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()))
    return {"largest_error": max(errors), "last_step_error": errors[-1], "cache_error": max(stored)}


def law(experiment: Experiment) -> None:
    for way in WAYS:
        result, draws = recorded(experiment, seed=4, decoded=way, **SIZES)
        got = {name: value for name, value in result.metrics.items() if name != "bits_differ_share"}
        # float64, sums of at most 64 terms in two layers; angles are computed in float32 there, positions are below 8
        assert got == pytest.approx(whiteboard(way, draws), rel=1e-5, abs=1e-13), way


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"positions_restart": -start', '"positions_restart": 0'),
        ('"one_position_late": 1', '"one_position_late": 0'),
        ('"top_left" if way == "top_left_mask"', '"top_left" if way == "no_mask"'),
        ("causal.new_ones(q_len, room - kv_len)", "causal.new_zeros(q_len, room - kv_len)"),
        ("earlier = replaced[layer][:, :past]", "earlier = replaced[0][:, :past]"),
        ("return rows[:, past:]", "return rows[:, : q.shape[1]]"),
        ("torch.cat((earlier, values[:, past:]), dim=1)", "torch.cat((earlier, keys[:, past:]), dim=1)"),
        ("n_heads=params.n_heads)[start:])", "n_heads=params.n_heads)[start - 1 : end - 1])"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("room", [None, 20])
def test_the_trained_model_decoded_with_a_cache_is_the_model(room):
    weights = language_model.load_weights(dtype=torch.float64)
    tokens = torch.randint(0, language_model.N_TOKENS, (2, 20), generator=torch.Generator().manual_seed(1))
    names = {name.split(".")[1] for name in weights if "." in name}
    layers = [{name: weights[f"{n}.{name}"] for name in names} for n in range(language_model.N_LAYERS)]
    cache, outputs = decoding.KVCache(language_model.N_LAYERS, room), []
    for start, end in itertools.pairwise((0, 8, 9, 13, 20)):
        x = weights["embedding"][tokens[:, start:end]]
        outputs.append(decoding.extend(layers, x, cache, n_heads=language_model.N_HEADS))
    out = decoding.norm(torch.cat(outputs, dim=1), weights["norm"]) @ weights["embedding"].mT
    wanted = language_model.forward(weights, tokens)
    # float64, token logits of size 10 after three layers
    assert (out / language_model.D_MODEL**0.5 - wanted).abs().max() < 1e-11


@pytest.mark.parametrize("room", [None, 12])
def test_a_cache_forgets_what_is_rolled_back(room):
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sizes = decoding.StackSizes(2, 2, 1, 16)
    layers, tokens, draft = decoding.draw_layers(sizes, normal), normal(12, 16), normal(3, 16)
    cache = decoding.KVCache(2, room)
    decoding.extend(layers, tokens[:6], cache, n_heads=2)
    decoding.extend(layers, draft, cache, n_heads=2)
    assert len(cache) == 9
    cache.truncate(6)
    got = decoding.extend(layers, tokens[6:], cache, n_heads=2)
    wanted = decoding.extend(layers, tokens, decoding.KVCache(2), n_heads=2)[6:]
    assert (got - wanted).abs().max() < 1e-12  # float64, two layers


def test_a_full_cache_takes_no_more():
    cache = decoding.KVCache(1, room=3)
    cache.append(0, torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    with pytest.raises(IndexError, match="room for 3"):
        cache.append(0, torch.ones(2, 1, 4), torch.ones(2, 1, 4))


def test_one_step_for_everything_is_the_pass_itself():
    metrics = run(get(NAME), prompt_len=0, new_tokens=8, tokens_per_step=8, number_format="float32").metrics
    assert set(metrics.values()) == {0.0}


def test_tables_hold_the_chosen_way():
    result = run(get(NAME), seed=1, decoded="no_mask")
    ways = result.tables["by_way"]
    at = ways["decoded"] == "no_mask"
    assert ways["drawn_error"][at] == pytest.approx([result.metrics["largest_error"]])
    steps = result.tables["by_step"]
    assert steps["drawn_error"][steps["decoded"] == "no_mask"].max() == pytest.approx(result.metrics["largest_error"])
    operations = result.tables["by_operation"]
    rowwise = np.isin(operations["operation"], ("layer_norm", "softmax"))
    assert (operations["bits_differ_share"][rowwise] == 0).all()  # each row is reduced by itself


def test_refuses_a_step_of_more_tokens_than_there_are():
    with pytest.raises(ParamsError, match="step_within_new"):
        get(NAME).Params(new_tokens=2, tokens_per_step=3)
