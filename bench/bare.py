"""The tensor operations that an experiment can't do without, one function each, named after it.

Written as one would in a notebook: PyTorch's own softmax and autograd, everything at once, and what the metrics and
tables are made of; nothing is checked, cut into chunks, kept exact on saturated rows, or put into tables. Default
choices of the parameters only, whatever their sizes. ``bench/experiments.py`` compares.
"""

from __future__ import annotations

from typing import Any

from engine.base import Run

THREE_RULES = {"none": 0.0, "inv_sqrt_d_k": -0.5, "inv_d_k": -1.0}  # the power of d_k


def _jacobian_norm(weights: Any) -> Any:
    """Frobenius norm of diag(w) - wwᵀ, row by row."""
    s2, s3 = (weights**2).sum(-1), (weights**3).sum(-1)
    return (s2 - 2 * s3 + s2**2).clamp_min(0).sqrt()


def attention_walkthrough(p: Any, run: Run) -> Any:
    """One call four times, with another last token, another order and other matrices; sums, ranges and differences."""
    import torch

    x, other = run.randn(p.batch, p.q_len, p.d_model), run.randn(p.batch, 1, p.d_model)
    W_q, W_k = (run.randn(p.d_model, p.n_heads, p.d_k) / p.d_model**0.5 for _ in range(2))
    W_v, W_o = run.randn(p.d_model, p.n_heads, p.d_v) / p.d_model**0.5, run.randn(p.n_heads, p.d_v, p.d_model)
    R, S = run.randn(p.n_heads, p.d_k), run.randn(p.n_heads, p.d_v)
    mirrored = [W - 2 * (W * u).sum(-1, keepdim=True) * u for W, u in ((W_q, R), (W_k, R), (W_v, S))]
    found = []
    for tokens, matrices in (
        (x, (W_q, W_k, W_v)),
        (torch.cat((x[:, :-1], other), 1), (W_q, W_k, W_v)),
        (x.flip(1), (W_q, W_k, W_v)),
        (x, mirrored),
    ):
        q, k, v = ((tokens @ W.flatten(1)).unflatten(-1, (p.n_heads, -1)).transpose(1, 2) for W in matrices)
        weights = torch.softmax(q @ k.mT * p.d_k**-0.5, -1)
        context = weights @ v
        found.append(context.transpose(1, 2).flatten(2) @ W_o.flatten(0, 1))
    reference = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    found += [weights.sum(-1), weights.sum(-2), (context - reference).abs().max(), v.amin(-2), v.amax(-2)]
    return found


def qk_variance(p: Any, run: Run) -> Any:
    """Draw q and k, multiply, sum: one logit a pair; its moments and histogram."""
    q, k = run.randn(p.n_pairs, p.d_k), run.randn(p.n_pairs, p.d_k)
    qk = (q * k).sum(-1) * p.d_k**-0.5
    return qk.mean(), qk.var(), qk.abs().max(), qk.histc(41)


def softmax_saturation(p: Any, run: Run) -> Any:
    """One product, three softmaxes, the norms of their Jacobians, the weights in order."""
    import torch

    q, k = run.randn(p.batch, p.q_len, p.d_k), run.randn(p.batch, p.kv_len, p.d_k)
    qk = q @ k.mT
    found = []
    for power in THREE_RULES.values():
        weights = torch.softmax(qk * p.d_k**power, -1)
        found += [_jacobian_norm(weights), weights.sort(-1).values.mean((0, 1))]
    return found, -torch.special.xlogy(weights, weights).sum(-1), weights.amax(-1), qk.std()


def attention_gradients(p: Any, run: Run) -> Any:
    """A head forward and back under three rules: gradients by autograd to the logits, q, k, v and the matrices."""
    import torch

    W_q, W_k, W_v = (run.randn(p.d_model, width) / p.d_model**0.5 for width in (p.d_k, p.d_k, p.d_v))
    x_q, x_k, x_v = (run.randn(p.batch, length, p.d_model) for length in (p.q_len, p.kv_len, p.kv_len))
    g = run.randn(p.batch, p.q_len, p.d_v)
    leaves = [W.requires_grad_() for W in (W_q, W_k, W_v)]
    found = []
    for power in THREE_RULES.values():
        q, k, v = x_q @ W_q, x_k @ W_k, x_v @ W_v
        logits = q @ k.mT * p.d_k**power
        weights = torch.softmax(logits, -1)
        gradients = torch.autograd.grad((weights @ v * g).sum(), [logits, q, k, v, *leaves])
        found += [gradient.norm(dim=-1) for gradient in gradients]
    return found


def softmax_temperature_curve(p: Any, run: Run) -> Any:
    """Softmax of [a, a, 2a] on the grids of the plots in each format, and on the search's grid."""
    import torch

    shape = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)
    grids = [torch.linspace(0, 100, 25601), *(torch.linspace(0, 100, 101) for _ in range(7))]
    dtypes = [torch.float64, torch.float64, torch.float64, torch.float64, torch.float32, torch.float16, torch.bfloat16]
    return [torch.softmax((a[:, None] * shape).to(d), -1) for a, d in zip(grids, [torch.float64, *dtypes], strict=True)]


def jacobian_spectrum(p: Any, run: Run) -> Any:
    """Jacobians of 64 rows by autograd, their eigenvalues, those of 16 rows at eleven spreads, and norms."""
    import torch

    scores = run.randn(p.n_rows, p.kv_len).double()
    logits = (p.logits_std * scores[:64]).requires_grad_()
    weights = torch.softmax(logits, -1)
    rows = [torch.autograd.grad(w.sum(), logits, retain_graph=True)[0] for w in weights.unbind(-1)]
    found = [torch.linalg.eigvalsh(torch.stack(rows, 1)), _jacobian_norm(torch.softmax(p.logits_std * scores, -1))]
    for n in (4, 16, 64):
        spread = 2.0 ** torch.arange(-4, 7).double()[:, None, None]
        found.append(_jacobian_norm(torch.softmax(spread * run.randn(16, n).double(), -1)))
    for power in range(-4, 7):
        weights = torch.softmax(2.0**power * scores[:16], -1)
        found.append(torch.linalg.eigvalsh(weights.diag_embed() - weights[:, :, None] * weights[:, None, :]))
    return found


def softmax_loss_gradient(p: Any, run: Run) -> Any:
    """Three losses on a row by autograd over the curve's gaps, attention on drawn values, two formats' searches."""
    import torch
    from torch.nn.functional import cross_entropy

    def logits(gaps: Any, dtype: Any) -> Any:
        z = torch.zeros(len(gaps), p.kv_len, dtype=dtype)
        z[:, 0] = gaps
        return z.requires_grad_()

    z = logits(torch.linspace(0, 40, 81), torch.float64)
    weights, label = torch.softmax(z, -1), torch.ones(81, dtype=torch.long)
    y = torch.eye(p.kv_len, dtype=torch.float64)[1]
    losses = [cross_entropy(z, label), ((weights - y) ** 2).sum(), cross_entropy(weights, label)]
    found = [torch.autograd.grad(loss, z, retain_graph=True)[0].norm(dim=-1) for loss in losses]
    found.append(torch.autograd.grad((weights[:, None] * run.randn(64, p.kv_len)).sum(), z)[0])
    v, g = run.randn(p.n_rows, p.kv_len, 8).double().requires_grad_(), run.randn(p.n_rows, 8).double()
    row = torch.softmax(logits(torch.tensor([p.gap]), torch.float64), -1)
    found += torch.autograd.grad(((row[..., None] * v).sum(1) * g).sum(), [v])
    for gaps in (torch.linspace(0, 768, 6145), torch.linspace(0, 128, 257)):
        z = logits(gaps, torch.float32)
        label = torch.ones(len(gaps), dtype=torch.long)
        found += torch.autograd.grad(cross_entropy(z, label), z)
        found += torch.autograd.grad(-torch.softmax(z, -1)[:, 1].log().sum(), z)
    return found


def precision(p: Any, run: Run) -> Any:
    """Weights in three formats and in float64, and their differences."""
    import torch

    q, k = run.randn(p.q_len, p.d_k), run.randn(p.kv_len, p.d_k)
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low_q, low_k = q.to(dtype), k.to(dtype)
        logits = low_q @ low_k.mT * p.d_k**-0.5
        exact = low_q.double() @ low_k.double().mT * p.d_k**-0.5
        difference = (torch.softmax(logits, -1).double() - torch.softmax(exact, -1)).abs()
        found += [difference.sum(-1), (logits.double() - exact).abs().amax(-1), exact.abs().amax(-1)]
    return found


def aligned_keys(p: Any, run: Run) -> Any:
    """Products with one aligned and many other keys; the aligned one's weight under four rules at 21 alignments."""
    import torch

    q, noise = run.randn(p.batch, p.q_len, p.d_k), run.randn(p.batch, p.q_len, p.d_k)
    others = q @ run.randn(p.batch, p.kv_len - 1, p.d_k).mT
    target = (q * (p.alignment * q + (1 - p.alignment**2) ** 0.5 * noise)).sum(-1, keepdim=True)
    weights = torch.softmax(torch.cat([target, others], -1) * p.d_k**-0.5, -1)
    at = torch.linspace(0, 1, 21)[:, None, None]
    logits = at * (q * q).sum(-1) + (1 - at * at).sqrt() * (q * noise).sum(-1)
    curves = [torch.sigmoid(c * logits - (c * others).logsumexp(-1)).mean((1, 2)) for c in (0.125, 1 / p.d_k, 0.1, 0.5)]
    return weights, -torch.special.xlogy(weights, weights).sum(-1), curves


def additive_attention(p: Any, run: Run) -> Any:
    """The default form's logits and weights, and one small product of all three forms at four widths."""
    import torch

    q, k = run.randn(p.batch, 64, p.d_k), run.randn(p.batch, p.kv_len, p.d_k)
    for _ in range(2):
        run.randn(p.batch, p.d_k, p.d_k)  # W_q and W_k are drawn under every form
    logits = q @ k.mT if p.kind == "dot" else q @ k.mT * p.d_k**-0.5
    weights = torch.softmax(logits, -1)
    found = [weights.amax(-1), -torch.special.xlogy(weights, weights).sum(-1), logits.std()]
    for d_k in (4, 16, 64, 256):
        q, k = run.randn(2, 24, d_k), run.randn(2, 24, d_k)
        W_q, W_k, v = run.randn(2, d_k, d_k), run.randn(2, d_k, d_k), run.randn(2, d_k, 1)
        hidden = torch.tanh((q @ W_q)[:, :, None, :] + (k @ W_k)[:, None, :, :])
        found += [(hidden @ v[:, None]).std(), (q @ k.mT).std()]
    return found


def normalized_logits(p: Any, run: Run) -> Any:
    """The chosen norm on all rows; five norms on 128 rows at eleven spreads."""
    import torch
    from torch.nn.functional import layer_norm

    found = []
    for _ in range(p.batch):
        qk = run.randn(64, p.d_k) @ run.randn(p.kv_len, p.d_k).mT
        weights = torch.softmax(layer_norm(qk, (p.kv_len,)), -1)
        found += [qk.argsort(-1), weights.amax(-1), torch.special.xlogy(weights, weights).sum(-1)]
    q, k = run.randn(2, 64, p.d_k), run.randn(2, p.kv_len, p.d_k)
    for _ in range(5):
        for spread in range(11):
            found.append(torch.softmax(2.0 ** (spread - 5) * q @ k.mT * p.d_k**-0.5, -1).amax(-1).mean())
    return found


def permutation(p: Any, run: Run) -> Any:
    """A sequence and the same tokens moved through all layers, ten times, one mask in two and one bias in five."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    d = p.d_model
    x = run.randn(p.n_distinct, d)[torch.arange(p.seq_len) % p.n_distinct]
    shapes = [(d, d)] * 4 + [(d, 4 * d), (4 * d, d)]
    layers = [[run.randn(*shape) / shape[0] ** 0.5 for shape in shapes] for _ in range(max(2, p.n_layers))]

    def outputs(x: Any, causal: bool = False, biased: bool = False) -> Any:
        n = x.shape[-2]
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        for W_q, W_k, W_v, W_o, W_up, W_down in layers:
            normed = layer_norm(x, (d,))
            q, k, v = ((normed @ W).unflatten(-1, (p.n_heads, -1)).transpose(-3, -2) for W in (W_q, W_k, W_v))
            logits = q @ k.mT * q.shape[-1] ** -0.5
            logits = logits + torch.arange(n) if biased else logits
            weights = torch.softmax(logits.masked_fill(later, -torch.inf) if causal else logits, -1)
            x = x + (weights @ v).transpose(-3, -2).flatten(-2) @ W_o
            x = x + gelu(layer_norm(x, (d,)) @ W_up) @ W_down
        return x

    order = run.rand(p.seq_len).argsort()
    found = [outputs(torch.stack((x, x[order])), causal, code == 4) for code in range(5) for causal in (False, True)]
    changes = [(moved - still[order]).abs().amax(-1) for still, moved in found]
    return changes, outputs(torch.cat((x, x))[None]), outputs(torch.cat((x[:1], x))[None])


def prefix_average(p: Any, run: Run) -> Any:
    """Weights of causal rows with one logit a key, the averages under them, and their spread."""
    import torch

    logits, v = p.logits_std * run.randn(p.n_heads, 1, p.seq_len), run.randn(p.n_heads, p.seq_len, p.d_v)
    later = torch.ones(p.seq_len, p.seq_len, dtype=torch.bool).triu(1)
    weights = torch.softmax(logits.expand(-1, p.seq_len, -1).masked_fill(later, -torch.inf), -1)
    return weights[..., 0].quantile(torch.tensor([0.1, 0.5, 0.9]), dim=0), (weights @ v).square().mean((0, 2)).sqrt()


def fold_scale(p: Any, run: Run) -> Any:
    """Two copies of one head trained by Adam for the steps asked for."""
    import torch

    x, target = run.randn(p.seq_len, p.d_model).double(), run.randn(p.seq_len, 8).double()
    leaves = [run.randn(2, rows, p.d_model).double().div(p.d_model**0.5) for rows in (p.d_k, p.d_k, 8)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    adam = torch.optim.Adam(leaves, lr=p.learning_rate)
    for _ in range(p.steps + 1):
        W_q, W_k, W_v = leaves
        weights = torch.softmax((x @ W_q.mT) @ (x @ W_k.mT).mT * p.d_k**-0.5, -1)
        loss = ((weights @ (x @ W_v.mT) - target) ** 2).mean((1, 2)).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return loss


def multi_query(p: Any, run: Run) -> Any:
    """The spread of q·k on 32 positions for every number of key heads that divides the heads."""
    found = []
    for n_kv_heads in (n for n in range(1, p.n_heads + 1) if p.n_heads % n == 0):
        q, k = run.randn(p.n_heads, 32, p.d_k), run.randn(n_kv_heads, 32, p.d_k)
        found.append((q @ k.repeat_interleave(p.n_heads // n_kv_heads, 0).mT).var())
    return found


def init_variance(p: Any, run: Run) -> Any:
    """Inputs through a uniform and a normal pair of matrices, and the spread of the products."""
    import torch

    found = []
    for _ in range(p.n_draws):
        x = torch.nn.functional.layer_norm(run.randn(p.seq_len, p.d_model), (p.d_model,))
        for draw in (run.rand, run.randn):
            q, k = x @ draw(p.d_k, p.d_model).mT, x @ draw(p.d_k, p.d_model).mT
            logits = q @ k.mT
            found += [q.square().mean(), logits.square().mean()]
        found.append(torch.softmax(logits, -1).amax(-1).mean())
    return found


def gradient_signal(p: Any, run: Run) -> Any:
    """Gradients of two matrices on every mini-batch by themselves, and their inner products."""
    import torch

    from engine.training import BATCH, D_MODEL

    W_q, W_k, W_v = run.randn(p.d_k, D_MODEL), run.randn(p.d_k, D_MODEL), run.randn(D_MODEL, D_MODEL)
    q_in = run.randn(p.n_batches, BATCH, 1, D_MODEL)
    slots, g = run.randn(p.n_batches, BATCH, p.kv_len, D_MODEL), run.randn(p.n_batches, BATCH, 1, D_MODEL)
    W_q, W_v = (W.repeat(p.n_batches, 1, 1, 1).requires_grad_() for W in (W_q, W_v))
    weights = torch.softmax((q_in @ W_q.mT) @ (slots @ W_k.mT).mT, -1)
    gradients = torch.autograd.grad((weights @ (slots @ W_v.mT) * g).sum(), [W_q, W_v])
    return [gradient.flatten(1) @ gradient.flatten(1).mT for gradient in gradients]


def roofline(p: Any, run: Run) -> Any:
    """Both phases of MHA, GQA and MQA, each four times in two ways; before a decode 32 MiB are written."""
    import torch

    displaced, found = torch.empty(2**23), []
    for q_len in (1, p.kv_len):
        for n_kv_heads in sorted({1, p.n_kv_heads, p.n_heads}):
            q = torch.arange(p.batch * p.n_heads * q_len * p.d_k).sin().view(p.batch, n_kv_heads, -1, p.d_k)
            kv = torch.arange(2 * p.batch * n_kv_heads * p.kv_len * p.d_k).sin()
            k, v = kv.view(2, p.batch, n_kv_heads, p.kv_len, p.d_k)
            for _ in range(4):
                if q_len == 1:
                    displaced.fill_(0)
                found.append(torch.softmax(q @ k.mT * p.d_k**-0.5, -1) @ v)
                if q_len == 1:
                    displaced.fill_(0)
                found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v))


def trained_logits(p: Any, run: Run) -> Any:
    """The language model's loss at ten factors, its steps at the eleventh, and the rows of two sets of vectors."""
    import torch

    from engine import language_model as model

    weights = model.load_weights(run.device, run.dtype)
    tokens = torch.randint(model.N_TOKENS, (p.n_texts, p.seq_len), generator=run.generator)
    causal = torch.full((p.seq_len, p.seq_len), -torch.inf).triu(1)
    found = []
    with torch.inference_mode():
        for step in range(10):
            logits = model.forward_fast(weights, tokens, factor=2 ** (step / 2 - 2.5))
            found.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        trace = model.Trace()
        model.forward(weights, tokens, trace=trace)
        for q, k in zip(trace.q, trace.k, strict=True):
            for qk in (q @ k.mT, run.randn(*q.shape) @ run.randn(*k.shape).mT):
                rows = torch.softmax(qk * model.D_K**-0.5 + causal, -1)
                found += [qk.tril().var(-1), -torch.special.xlogy(rows, rows).sum(-1), rows.amax(-1)]
    return found


def attention_maps(p: Any, run: Run) -> Any:
    """The language model as it is and with each head cut out, on two kinds of texts."""
    import torch

    from engine import language_model as model

    weights = model.load_weights(run.device, run.dtype)
    found = []
    with torch.inference_mode():
        for _ in range(2):
            tokens = torch.randint(model.N_TOKENS, (p.n_texts, 128), generator=run.generator)
            for cut in range(13):

                def edit(layer: int, context: torch.Tensor, cut: int = cut) -> torch.Tensor:
                    if layer == cut // 4:
                        context[:, cut % 4] = context[:, cut % 4].mean((0, 1))
                    return context

                logits = model.forward(weights, tokens, edit_context=edit)
                found.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    return found


def attention_is_not_explanation(p: Any, run: Run) -> Any:
    """The language model forward and back, then with each head's rows replaced, three times; the search by QR."""
    import torch

    from engine import language_model as model

    weights = model.load_weights(run.device, run.dtype)
    tokens = torch.randint(model.N_TOKENS, (1, p.seq_len), generator=run.generator)
    kept: list[Any] = []

    def keep(_: int, rows: Any) -> Any:
        kept.append(rows.requires_grad_())
        return rows

    before = model.forward(weights, tokens, edit_weights=keep).log_softmax(-1)
    found = [torch.autograd.grad(before.amax(-1).sum(), kept)]
    trace = model.Trace()
    model.forward({name: weight.double() for name, weight in weights.items()}, tokens, trace=trace)
    rows, v = torch.cat(trace.weights, 1)[0].detach(), torch.cat(trace.v, 1)[0].detach()
    for kv_len in (n for n in (8, 16, 24, 32, 36, 48, 64, 96) if n <= p.seq_len):
        row = rows[:, kv_len - 1, :kv_len].repeat(3, 1)[:32]  # two starts, and random values beside them
        seen = torch.cat((v[:, :kv_len], torch.ones_like(v[:, :kv_len, :1])), -1).repeat(3, 1, 1)[:32]
        for _ in range(18):
            basis = torch.linalg.qr(seen * row[..., None])[0]
            found.append(basis @ (basis.mT @ row[..., None]))
    with torch.inference_mode():
        for _ in range(3):

            def edit(layer: int, weights: Any) -> Any:
                weights[:] = weights.roll(1, 0)
                return weights

            after = model.forward(weights, tokens.expand(12, -1), edit_weights=edit).log_softmax(-1)
            found += [(before.exp() - after.exp()).abs().sum(-1), torch.logaddexp(before, after).exp().sum(-1)]
    return found


def causal_leak(p: Any, run: Run) -> Any:
    """One causal layer on a copy for each position, forward and back; the same overwritten; and each prefix."""
    import torch
    from torch.nn.functional import layer_norm

    n, d = p.seq_len, p.d_model
    W_q, W_k, W_v, W_o, _ = run.randn(5, d, d) / d**0.5
    run.randn(d)
    x, other, g = run.randn(n, d), run.randn(n, d), run.randn(d)
    each = torch.arange(n)

    def layer(x: Any) -> Any:
        h, length = layer_norm(x, (d,)), x.shape[1]
        logits = (h @ W_q @ (h @ W_k).mT * d**-0.5).masked_fill(
            torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
        )
        return x + torch.softmax(logits, -1) @ (h @ W_v) @ W_o

    copies = x.repeat(n, 1, 1).requires_grad_()
    out = layer(copies)
    found = [torch.autograd.grad((out[each, each] @ g).sum(), copies)[0].norm(dim=-1)]
    with torch.no_grad():
        overwritten = x.repeat(n, 1, 1)
        overwritten[each, each] = other
        found.append((layer(overwritten) - out).abs().amax(-1))
        found += [layer(x[None, : t + 1])[0, -1] for t in range(n)]
        x[-1] = torch.nan
        found.append(layer(x[None]).isnan().sum())
    return found


def mask_tiles(p: Any, run: Run) -> Any:
    """Causal attention over all keys, then a row of tiles at a time over those up to the diagonal; masks counted."""
    import torch

    q, k, v = run.randn(p.q_len, p.d_k), run.randn(p.kv_len, p.d_k), run.randn(p.kv_len, p.d_k)
    future = torch.ones(p.q_len, p.kv_len, dtype=torch.bool).triu(1)
    scale = p.d_k**-0.5
    qk = q @ k.mT * scale
    found = [torch.softmax(qk.masked_fill(future, -torch.inf), -1) @ v, (torch.softmax(qk, -1) * future).sum(-1)]
    for start in range(0, p.q_len, p.tile):
        rows, end = slice(start, start + p.tile), start + p.tile
        logits = (q[rows] @ k[:end].mT * scale).masked_fill(future[rows, :end], -torch.inf)
        found.append(torch.softmax(logits, -1) @ v[:end])
    for n in (p.q_len, 16, 32, 64, 128, 256, 512):
        tile = min(p.tile, n)
        kept = torch.ones(n, n, dtype=torch.bool).tril().view(n // tile, tile, n // tile, tile).sum((1, 3))
        found += [kept.sum(), (kept > 0).sum()]
    return found


def mask_alignment(p: Any, run: Run) -> Any:
    """Causal attention of all tokens, the fused call on unit vectors, and three calls at nine chunk lengths."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v = (run.randn(p.batch, 1, p.kv_len, 64) for _ in range(3))
    future = torch.ones(p.kv_len, p.kv_len, dtype=torch.bool).triu(1)
    logits = q @ k.mT / 8
    full = torch.softmax(logits.masked_fill(future, -torch.inf), -1) @ v
    found = [sdpa(q[:, :, -p.q_len :], k, torch.eye(p.kv_len, 64).expand_as(v), is_causal=True)]
    found += [torch.softmax(logits[:, :, -p.q_len :], -1) for _ in range(2)]
    for q_len in range(1, p.kv_len + 1):
        chunk, wanted = q[:, :, -q_len:], full[:, :, -q_len:]
        for call in ({"is_causal": True}, {"attn_mask": ~future[-q_len:]}, {}):
            found.append((sdpa(chunk, k, v, **call) - wanted).abs().max())
    return found


def attention_bugs(p: Any, run: Run) -> Any:
    """PyTorch's layer on four inputs, and eight layers by hand on six, one of them forth and back."""
    import torch

    linear = torch.nn.functional.linear
    x, d = run.randn(p.batch, p.seq_len, p.d_model).double(), p.d_model
    W = [run.rand(d, d).double() / d**0.5 for _ in range(4)]
    b = torch.zeros(d, dtype=torch.float64)

    def attend(x: Any, n_heads: int, cache: Any = None) -> Any:
        q, k, v = (linear(x, w, b).unflatten(-1, (n_heads, -1)).transpose(1, 2) for w in W[:3])
        if cache is not None:
            if cache:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = k, v
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        weights = (q @ k.mT * (n_heads / d) ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return linear((weights @ v).transpose(1, 2).flatten(2), W[3], b)

    found = []
    hidden = torch.ones(p.seq_len, p.seq_len, dtype=torch.bool).triu(1)
    for n_heads in (p.n_heads, 1):
        layer = torch.nn.MultiheadAttention(d, n_heads, batch_first=True, dtype=torch.float64)
        found += [layer(x, x, x, attn_mask=hidden, need_weights=False)[0] for _ in range(2)]
    for _ in range(8):
        with torch.no_grad():
            cache: list[Any] = []
            found += [attend(x, 1), attend(x[:, :1], p.n_heads)]
            found += [attend(chunk, p.n_heads, cache) for chunk in x.split(p.chunk_len, 1)]
            found.append(attend(torch.cat((x, x, x)), p.n_heads))
        copies = x[0].repeat(p.seq_len, 1, 1).requires_grad_()
        found.append(torch.autograd.grad(attend(copies, p.n_heads).diagonal().sum(), copies)[0].norm(dim=-1))
    return found


def rope_logits(p: Any, run: Run) -> Any:
    """One q at all distances in float64, the matrix of positions, the drawn pairs twice, four curves, partial sums."""
    import torch

    q, k = run.randn(p.n_pairs, p.d_k).double(), run.randn(p.n_pairs, p.d_k).double()
    theta = p.base ** (-torch.arange(0, p.d_k, 2, dtype=torch.float64) / p.d_k)

    def turned(x: Any, at: Any) -> Any:
        cos, sin = (at[:, None] * theta).cos(), (at[:, None] * theta).sin()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    at, all_distances, shown = torch.arange(p.seq_len), torch.arange(p.far_distance + 1), torch.arange(65)
    found = [turned(q[0], at) @ turned(k[0], at).mT, turned(q[0], all_distances) @ k[0]]
    found += [(turned(q, torch.tensor([r])) * k).sum(-1) for r in (0, p.far_distance)]
    found += [turned(q[0], shown) @ x for x in (q[0], k[0], k[1], k[0])]
    angles = shown[:, None] * theta
    return found, torch.polar(torch.ones_like(angles), angles).cumsum(-1).abs().sum(-1)


def rope_shift(p: Any, run: Run) -> Any:
    """The head at two shifts, and ten encodings at seven; two eigendecompositions for the free rotations."""
    import torch

    d_k = p.d_k
    x = run.randn(p.seq_len, d_k).double()
    W = run.randn(3, d_k, d_k).double() / d_k**0.5
    square = run.randn(2, d_k, d_k).double()
    run.randn(2, d_k // 2)
    theta = p.base ** (-torch.arange(0, d_k, 2, dtype=torch.float64) / d_k)
    found = []
    vectors = torch.linalg.eigh(1j * (square - square.mT))[1]
    for number, shifts in enumerate([2, *[7] * 10]):
        angles = (500.0 * torch.arange(shifts)[:, None] + torch.arange(p.seq_len))[..., None] * theta
        q, k, v = (x.expand(shifts, -1, -1) @ w for w in W)
        if number in (1, 2):
            q, k = ((z.to(vectors.dtype) @ vectors[0] @ vectors[0].mH).real for z in (q, k))
        else:
            cos, sin = angles.cos(), angles.sin()
            halves = [z.chunk(2, -1) for z in (q, k)]
            q, k = (torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in halves)
        logits = q @ k.mT * d_k**-0.5
        read = torch.softmax(logits, -1) @ v
        found += [(logits - logits[0]).square().mean((1, 2)), (read - read[0]).square().mean((1, 2))]
    return found


def rope_precision(p: Any, run: Run) -> Any:
    """q and k rotated twice at the position; 16 of them at seventeen positions in three formats; all positions cast."""
    import torch

    q, k = run.randn(p.n_pairs, p.d_k).double(), run.randn(p.n_pairs, p.d_k).double()
    theta = p.base ** (-torch.arange(0, p.d_k, 2, dtype=torch.float64) / p.d_k)
    found = []
    for n, at, dtype in [(p.n_pairs, p.position, torch.bfloat16)] + [
        (16, 2 * i + 9, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32) for i in range(17)
    ]:
        for low in (True, False):
            angles = (torch.tensor(at).to(dtype) * theta.to(dtype)).double() if low else at * theta
            cos, sin = angles.cos(), angles.sin()
            turned = [
                torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in (z[:n].chunk(2, -1) for z in (q, k))
            ]
            found.append((turned[0] * turned[1]).sum(-1).square().mean())
    return found, torch.arange(p.position + 1).to(torch.bfloat16).diff().count_nonzero()


def sinusoidal_encoding(p: Any, run: Run) -> Any:
    """Six tables, their products and distances, 32 small least squares, one spectrum, and the logits."""
    import torch

    at = torch.arange(p.seq_len, dtype=torch.float64)
    angles = at[:, None] * p.base ** (-torch.arange(0, p.d_model, 2, dtype=torch.float64) / p.d_model)
    table = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
    drawn = run.randn(p.seq_len, p.d_model).double()
    run.randn(p.seq_len, p.d_model), run.randn(p.d_model, p.d_model), run.randn(p.d_model, p.d_model)
    bits = ((torch.arange(p.seq_len)[:, None] >> torch.arange((p.seq_len - 1).bit_length())) & 1).double()
    codes = (table, table[:, :2], at[:, None], bits, drawn)
    found: list[Any] = [torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").min() for x in codes]
    lines = (torch.arange(p.seq_len)[:, None] - torch.arange(p.seq_len) + p.seq_len - 1).flatten()
    for matrix in (table @ table.T, table @ table.T):
        for how in ("amin", "mean", "amax"):
            found.append(torch.zeros(2 * p.seq_len - 1).double().scatter_reduce(0, lines, matrix.flatten(), how))
    for pair in table.split(2, 1):
        x, y = pair[: -p.offset], pair[p.offset :]
        M = torch.linalg.lstsq(x[: p.n_fit], y[: p.n_fit], driver="gelsd").solution
        found.append((x @ M - y).square().sum(1))
    found.append(torch.linalg.eigvalsh((table - table.mean(0)).T @ (table - table.mean(0))))
    return found


def embedding_scale(p: Any, run: Run) -> Any:
    """Tokens of four initializations, as drawn and scaled: norms, and two cosines of the chosen ones with positions."""
    import torch
    from torch.nn.functional import cosine_similarity

    normal, uniform = run.randn(p.n_drawn, p.d_model), run.rand(p.n_drawn, p.d_model)
    angles = torch.arange(p.n_drawn)[:, None] * 1e4 ** (-torch.arange(0, p.d_model, 2) / p.d_model)
    position = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
    found = [position.norm(dim=1).mean()]
    for drawn in (normal, normal, uniform, normal):
        found += [(drawn * size).norm(dim=1).mean() for size in (0.02, 0.5)]
        for other in ((drawn, position.roll(64, 0)), (drawn.roll(64, 0), position)):
            found.append(cosine_similarity(drawn + position, other[0] + other[1], dim=1).mean())


def rope_bugs(p: Any, run: Run) -> Any:
    """Three texts in one pass, then two of them in three calls with a cache; that sixteen times, and a reference."""
    import torch

    texts = [run.randn(2, h, p.seq_len, p.d_k).double() for h in (p.n_heads, p.n_kv_heads, p.n_kv_heads)]
    theta = p.base ** (-torch.arange(0, p.rotary_dims, 2, dtype=torch.float64) / p.rotary_dims)
    group, prompt = p.n_heads // p.n_kv_heads, p.seq_len - p.decoded_tokens

    def turn(x: Any, cos: Any, sin: Any) -> Any:
        part, rest = x[..., : p.rotary_dims], x[..., p.rotary_dims :]
        first, second = part.chunk(2, -1)
        return torch.cat((part * cos + torch.cat((-second, first), -1) * sin, rest), -1)

    def attend(q: Any, k: Any, v: Any, cache: Any) -> Any:
        start = cache[0].shape[2] if cache else 0
        angles = (start + torch.arange(q.shape[2])).expand(len(q), 1, -1)[..., None].double() * theta
        cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        if cache:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        cache[:] = k, v
        logits = q @ k.repeat_interleave(group, 1).mT * p.d_k**-0.5
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1 + start)
        return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1), q, k

    found = []
    with torch.inference_mode():
        wanted = attend(*(x[:1] for x in texts), [])[0]
        for _ in range(16):
            alone, q, k = attend(*(x[[0, 0, 1]] for x in texts), [])
            cache: list[Any] = []
            steps = [attend(*part, cache)[0] for part in zip(*(x.split([prompt, 1, 1], 2) for x in texts), strict=True)]
            out = torch.cat(steps, 2)
            for got, want in ((q, texts[0]), (k, texts[1])):
                found.append((got[:2].norm(dim=-1) / want[:1].norm(dim=-1) - 1).abs().max())
                found.append((got[0, :, 0] - want[0, :, 0]).norm())
            for got, want in ((alone[1], alone[0]), (out, alone[::2]), (alone[:2], wanted)):
                found.append((got - want).square().sum((-3, -2, -1)).sqrt() / want.norm())
    return [float(each.max()) for each in found]


def rope_conversion(p: Any, run: Run) -> Any:
    """The layer before its weights are moved, and seven times after that."""
    import torch

    def draw(n_heads: int) -> list[Any]:
        rows, d = n_heads * p.d_k, p.d_model
        return [run.randn(*shape).double() / 8 for shape in ((rows, d), (rows, 4), (4, d), (rows,), (p.d_k,))]

    x = run.randn(p.seq_len, p.d_model).double()
    parts = [draw(p.n_heads), draw(p.n_kv_heads)]
    W_v = run.randn(p.n_kv_heads * p.d_k, p.d_model).double()
    theta = p.base ** (-torch.arange(0, p.rotary_dims, 2, dtype=torch.float64) / p.rotary_dims)
    angles = torch.arange(p.seq_len)[:, None] * theta
    cos, sin = angles.cos(), angles.sin()
    order = torch.arange(p.rotary_dims).view(-1, 2).T.flatten()
    hidden = torch.ones(p.seq_len, p.seq_len, dtype=torch.bool).triu(1)
    found = []
    for _ in range(8):
        turned = []
        for W, B, A, b, g in parts:
            W, B, b = (each.unflatten(0, (-1, p.d_k)) for each in (W, B, b))
            W, B, b = (torch.cat((each[:, order], each[:, p.rotary_dims :]), 1).flatten(0, 1) for each in (W, B, b))
            z = (x @ (W + B @ A).T + b).unflatten(-1, (-1, p.d_k)).transpose(0, 1)
            z = z * z.square().mean(-1, keepdim=True).rsqrt() * g
            first, second = z[..., : p.rotary_dims].chunk(2, -1)
            halves = first * cos - second * sin, first * sin + second * cos
            turned.append(torch.cat((*halves, z[..., p.rotary_dims :]), -1))
        v = (x @ W_v.T).unflatten(-1, (-1, p.d_k)).transpose(0, 1)
        k, v = (each.repeat_interleave(p.n_heads // p.n_kv_heads, 0) for each in (turned[1], v))
        logits = turned[0] @ k.mT * p.d_k**-0.5
        found += [logits.square().mean(), (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).norm()]
    return found


def slot_retrieval(p: Any, run: Run) -> Any:
    """Twelve steps of softmax rows, their second moments, an inverse, a gradient; drawn tokens through the layers."""
    import torch

    contents = sorted({p.d_model * n // 8 for n in (2, 4, 5, 6, 8)} | {p.content})
    counts = {1, p.n_heads}
    W_v = run.randn(len(counts) * len(contents), 1, p.d_model, p.d_model).double()
    free = run.randn(len(W_v), 4, p.n_heads, p.kv_len).double()
    for _ in range(12):
        rows = torch.softmax(p.logit_range * free.sigmoid(), -1).repeat_interleave(p.d_model // p.n_heads, 2)
        inverse = torch.linalg.inv(rows @ rows.mT * (W_v @ W_v.mT) + torch.eye(p.d_model))
        moved = inverse @ (rows @ rows.mT) @ inverse @ rows - inverse @ rows
        free = free - moved.unflatten(2, (p.n_heads, -1)).sum(3).sign()
    found = []
    for _ in counts:
        tokens = run.randn(1024, p.kv_len, p.content)
        v = (tokens @ run.randn(p.content, p.d_model)).unflatten(-1, (p.n_heads, -1)).transpose(1, 2)
        heads = torch.softmax(run.randn(p.n_heads, 1, p.kv_len), -1) @ v
        found.append((heads.flatten(1) @ run.randn(p.d_model, p.n_targets * p.content)).square().sum())
    return found


def averaged_pair(p: Any, run: Run) -> Any:
    """At eleven weights, and once more at the chosen one: averages, a linear map by least squares, all distances."""
    import torch

    values = torch.nn.functional.normalize(run.randn(p.n_tokens, p.d_v), dim=-1)
    fitted = values[(run.rand(8, 32 * p.d_v) * p.n_tokens).long()]
    v = values[(run.rand(8, p.n_averages) * p.n_tokens).long()]
    found = []
    for weight, n in [(0.5 + i / 20, 32) for i in range(11)] + [(p.first_weight, p.n_averages)]:
        row = torch.tensor([[weight, 1 - weight, *[0.0] * 6]])
        read, contexts = ((row @ x.flatten(1)).view_as(x[0]) for x in (fitted, v))
        slots = torch.linalg.solve(read.T @ read + torch.eye(p.d_v), read.T @ torch.cat((fitted[0], fitted[1]), -1))
        near = contexts[:n] @ values.mT
        distance = values @ values.mT - near[:, :, None] - near[:, None]
        found += [distance.flatten(1).argmin(-1), (contexts @ slots - torch.cat((v[0], v[1]), -1)).square().sum()]
    return found


def head_costs(p: Any, run: Run) -> Any:
    """One layer without storage for every number of heads, with its operations counted."""
    import torch

    from engine.operations import count_operations

    x, W = (torch.empty(*shape, device="meta") for shape in ((p.seq_len, p.d_model), (p.d_model, p.d_model)))
    found = []
    for n_heads in (1, 2, 4, 8, 16, 32, 64):
        with count_operations() as counted:
            q, k, v = ((x @ W).unflatten(-1, (n_heads, -1)).transpose(0, 1) for _ in range(3))
            found.append((q @ k.mT @ v).transpose(0, 1).flatten(1) @ W)
        found.append(counted)


def head_rank(p: Any, run: Run) -> Any:
    """One layer in float64, and the singular values of seven of its matrices."""
    import torch

    x = run.randn(p.seq_len, p.d_model).double()
    W_q, W_k, W_v = (run.randn(p.n_heads, d, p.d_model).double() / p.d_model**0.5 for d in (p.d_k, p.d_k, p.d_v))
    W_o = run.randn(p.n_heads, p.d_model, p.d_v).double()
    logits = (x @ W_q.mT) @ (x @ W_k.mT).mT * p.d_k**-0.5
    weights = torch.softmax(logits, -1)
    heads = weights @ (x @ W_v.mT)
    matrices = (logits[0], weights[0], logits.flatten(0, 1), W_o[0] @ W_v[0], heads[0], (heads @ W_o.mT).sum(0), x)
    return [torch.linalg.svdvals(matrix) for matrix in matrices]


def key_separation(p: Any, run: Run) -> Any:
    """Cosines of 64 queries with random keys, also rounded; both kinds of keys at seven widths; bisection."""
    import torch

    def keys(d_k: int, n_queries: int) -> Any:
        wanted = run.rand(n_queries, p.kv_len).argsort(-1)[:, : p.n_wanted]
        k = torch.nn.functional.normalize(run.randn(p.kv_len, d_k).double(), dim=-1)
        angles = 6.2832 * torch.arange(p.kv_len)[:, None] / p.kv_len * torch.arange(1, d_k // 2 + 1)
        curve = torch.cat((angles.cos(), angles.sin()), -1).double() * (2 / d_k) ** 0.5
        return wanted, k, curve

    def needed(cosines: Any, wanted: Any) -> Any:
        low, high = torch.full((len(cosines), 1), -4.0), torch.full((len(cosines), 1), 24.0)
        for _ in range(21):
            middle = (low + high) / 2
            reached = torch.softmax(2**middle * cosines, -1).gather(-1, wanted).sum(-1, keepdim=True) >= 0.9
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        return high.median()

    wanted, k, _ = keys(p.d_k, 64)
    q = k[wanted].mean(1)
    cosines, rounded = q @ k.mT, q.bfloat16().double() @ k.bfloat16().double().mT
    gaps = [c.gather(-1, wanted).amin(-1) - c.scatter(-1, wanted, -1).amax(-1) for c in (cosines, rounded)]
    of_table, own = [], []
    for d_k in (2, 4, 8, 16, 32, 64, 128):
        few, random, curve = keys(d_k, 5)
        for k in (random, curve):
            of_table.append(k[few].mean(1) @ k.mT)
            own.append(few)
    weights = torch.softmax(p.d_k**0.5 * cosines, -1).gather(-1, wanted)
    return gaps, weights, needed(cosines, wanted), needed(torch.cat(of_table), torch.cat(own))


def mask_styles(p: Any, run: Run) -> Any:
    """A constant added before the softmax, measured against -inf; six ways over the leads and for the empty row."""
    import torch

    drawn = run.randn(p.q_len + 1, p.kv_len)
    hidden = torch.arange(p.kv_len) >= p.kv_len - p.hidden_len

    def ways(z: Any, hidden: Any) -> Any:
        after = torch.softmax(z, -1) * ~hidden
        logits = (z + hidden * -1e4, z.masked_fill(hidden, -1e4), z.masked_fill(hidden, -torch.inf), z * ~hidden)
        return [*(torch.softmax(x, -1) for x in logits), after, after / after.sum(-1, keepdim=True)]

    weights = torch.softmax(drawn + hidden * -1e4, -1).double()
    wanted = torch.softmax(drawn.double().masked_fill(hidden, -torch.inf), -1)
    found = [(weights - wanted).abs().sum(-1).max(), (weights * hidden).sum(-1).max(), weights.isnan().any(-1).sum()]
    found += [weights.sum(-1).min(), weights.sum(-1).max()]
    for other in (torch.full_like(weights[-1], 1 / p.kv_len), torch.softmax(drawn[-1].double(), -1)):
        found.append((weights[-1] - other).abs().sum())
    leads = ways(drawn[0] + hidden * (2.0 ** torch.linspace(-2, 14, 24))[:, None], hidden)
    found += [(w.double() * hidden).sum(-1).numpy() for w in leads]
    return found + [w.numpy() for w in ways(drawn[-1:], torch.ones_like(hidden))]


def empty_row_gradients(p: Any, run: Run) -> Any:
    """Attention of the other queries, forward and back: once by itself, and under eight guards with two masks."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v, g = (run.randn(p.seq_len, p.d_k).requires_grad_() for _ in range(4))
    keep = torch.ones(p.seq_len, p.seq_len, dtype=torch.bool).tril()
    keep[:, : p.left_padding] = False
    found = []
    for guard in range(18):
        if guard % 3 == 0:
            out = sdpa(q[None, None], k[None, None], v[None, None], attn_mask=keep)[0, 0]
        else:
            logits = (q @ k.mT * p.d_k**-0.5).masked_fill(~keep, -torch.inf)
            out = torch.softmax(logits, -1) @ v
        found += torch.autograd.grad((out[p.left_padding :] * g[p.left_padding :]).sum(), (q, k, v))
    return found


def shifted_stack(p: Any, run: Run) -> Any:
    """All layers three times, for six encodings at once: seven shifts, one text behind others, one token twice."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    d, n = p.d_model, p.seq_len
    tokens, before = run.randn(n, d).double(), run.randn(p.n_before, d).double()
    shapes = [(d, d)] * 4 + [(d, 4 * d), (4 * d, d)]
    layers = [[run.randn(*shape).double() / shape[0] ** 0.5 for shape in shapes] for _ in range(p.n_layers)]
    run.randn(32, p.n_heads)
    table = run.randn(p.position_shift + p.n_before + n, d).double()

    def outputs(x: Any, copies: int, past: Any = None) -> Any:
        n = x.shape[0]
        x = x + table[:n].expand(6, copies, n, d)
        angles = torch.arange(n)[:, None] * 10_000.0 ** -torch.linspace(0, 1, d // p.n_heads // 2).double()
        cos, sin = angles.cos(), angles.sin()
        bias = torch.zeros(6, copies, p.n_heads, n, past[0][0].shape[-2] + 1 if past else n)
        later, cache = torch.ones(n, bias.shape[-1], dtype=torch.bool).triu(bias.shape[-1] - n + 1), []
        for number, (W_q, W_k, W_v, W_o, W_up, W_down) in enumerate(layers):
            normed = layer_norm(x, (d,))
            q, k, v = ((normed @ W).unflatten(-1, (p.n_heads, -1)).transpose(-3, -2) for W in (W_q, W_k, W_v))
            halves = [z.chunk(2, -1) for z in (q, k)]
            q, k = (torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in halves)
            if past:
                k, v = (torch.cat((old, new), -2) for old, new in zip(past[number], (k, v), strict=True))
            logits = q @ k.mT * q.shape[-1] ** -0.5 + bias
            x = x + (torch.softmax(logits.masked_fill(later, -torch.inf), -1) @ v).transpose(-3, -2).flatten(-2) @ W_o
            x = x + gelu(layer_norm(x, (d,)) @ W_up) @ W_down
            cache.append((k, v, logits))
        return x, cache

    found, cache = outputs(tokens, 7)
    past = [tuple(z[:, 1:3, :, :-1] for z in pair[:2]) for pair in cache]
    moved = [outputs(torch.cat((before, tokens)), 1)[0][..., -n:, :], outputs(tokens[-1:], 2, past)[0]]
    spread = [z.std((-2, -1)) for _, _, z in cache] + [(z - z[:, :1]).square().mean((-2, -1)) for _, _, z in cache]
    return [(x - y[..., -x.shape[-2] :, :]).norm(dim=(-2, -1)) for x in moved for y in (found[:, :1],)], spread


def logit_terms(p: Any, run: Run) -> Any:
    """Four products before and after the move and at six sizes, two softmaxes, and the averages under them."""
    import torch

    d = p.d_model
    x, W_q, W_k, W_v = (run.randn(p.batch, rows, d).double() for rows in (p.seq_len, d, d, d))
    angles = (torch.arange(p.position_shift + p.seq_len)[:, None] * 10_000.0 ** -torch.linspace(0, 1, d // 2)).double()
    table = torch.cat((angles.sin(), angles.cos()), -1)
    still, moved = table[: p.seq_len], table[-p.seq_len :]

    def terms(place: Any) -> Any:
        q, k, place_q, place_k = x @ W_q, x @ W_k, place @ W_q, place @ W_k
        found = torch.stack([a @ b.mT for a, b in ((q, k), (q, place_k), (place_q, k), (place_q, place_k))])
        return found, (found - found.mean(-1, keepdim=True)).square().mean((1, 2, 3))

    before, after = terms(still)[0], terms(moved)[0]
    weights, new = torch.softmax(before.sum(0), -1), torch.softmax(after.sum(0), -1)
    v, place_v, new_place_v = x @ W_v, still @ W_v, moved @ W_v
    averages = (weights @ v, weights @ place_v, (new - weights) @ (v + place_v), weights @ (new_place_v - place_v))
    return [terms(still * rms)[1] for rms in range(6)], [z.square().mean() for z in (v, place_v, *averages)]


def position_costs(p: Any, run: Run) -> Any:
    """A layer counted without storage, a step at three lengths, and the rotation of one vector."""
    import torch

    from engine.operations import count_operations

    a, b, cos = torch.randn(3, p.d_k // 2)
    with count_operations() as turned:
        found = [torch.cat((a * cos - b * cos, a * cos + b * cos))]
    for n, q_len in ((p.kv_len, p.q_len), (1024, 1), (16384, 1), (131072, 1)):
        x, W = torch.empty(q_len, p.d_model, device="meta"), torch.empty(p.d_model, p.d_model, device="meta")
        q, k = (torch.empty(p.n_heads, m, p.d_k, device="meta") for m in (q_len, n))
        with count_operations() as counted:
            found += [x @ W for _ in range(4)] + [q @ k.mT @ k, counted]
    return found, turned


def table_gradients(p: Any, run: Run) -> Any:
    """Two passes through all layers, forward and back to the table."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    d, n = p.d_model, p.longest
    tokens, targets = run.randn(p.batch, n, d), run.randn(p.batch, n, d)
    table = run.randn(p.table_rows, d).requires_grad_()
    layers = [run.randn(6, d, d) / d**0.5 for _ in range(p.n_layers)]
    later, found = torch.ones(n, n, dtype=torch.bool).triu(1), []
    for real in (torch.rand(p.batch, n) < 0.5, torch.ones(p.batch, n, dtype=torch.bool)):
        x = tokens + table[:n]
        for W_q, W_k, W_v, W_o, W_up, W_down in layers:
            normed = layer_norm(x, (d,))
            logits = (normed @ W_q) @ (normed @ W_k).mT * d**-0.5
            x = x + torch.softmax(logits.masked_fill(later, -torch.inf), -1) @ (normed @ W_v) @ W_o
            x = x + gelu(layer_norm(x, (d,)) @ W_up) @ W_down
        found.append(torch.autograd.grad((x - targets).square().mean(-1)[real].mean(), table)[0].norm(dim=-1))
    return found


def tied_projections(p: Any, run: Run) -> Any:
    """Queries once, three kinds of keys: logits, weights, their mirror images, a spectrum each."""
    import torch

    W_q, W_k = (p.weight_std * run.randn(p.d_model, p.d_k) for _ in range(2))
    x = run.randn(p.batch, p.seq_len, p.d_model)
    q = x @ W_q
    logits = q @ q.mT * p.d_k**-0.5
    weights = torch.softmax(logits, -1)
    found = [weights.diagonal(dim1=-2, dim2=-1).mean(), weights.diagonal(-1, -2, -1).mean(), weights.amax(-1)]
    found += [(logits - logits.mT).abs().max(), (weights - weights.mT).abs().max()]
    signs = torch.ones(p.d_k, device=q.device)
    signs[p.d_k // 2 :] = -1
    for k in (q[:4], q[:4] * signs, x[:4] @ W_k):
        logits = q[:4] @ k.mT * p.d_k**-0.5
        half = (logits[0] + logits[0].mT).cpu().double() / 2
        found.append(torch.linalg.eigvalsh(half))
        for power in range(-4, 4):
            found.append(torch.softmax(logits * 2.0**power, -1).diagonal(dim1=-2, dim2=-1).mean())
    return found


def directed_lookup(p: Any, run: Run) -> Any:
    """Vectors by Adam, 50 steps, for 4 limits, 3 kinds and 2 starts at once; the weights that they end with."""
    import torch

    vectors = run.randn(2, 3, 4, 2, p.seq_len, p.d_k).cpu().double()
    targets = torch.eye(p.seq_len, dtype=torch.float64).roll(1, 1)
    first, second = torch.zeros_like(vectors), torch.zeros_like(vectors)
    for _ in range(50):
        q, k = vectors
        by_logits = targets - torch.softmax(q @ k.mT, -1)
        gradient = torch.stack((by_logits @ k, by_logits.mT @ q))
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.1)
        vectors = vectors + 0.1 * first / (second.sqrt() + 1e-9)
        vectors = vectors * (4 / (vectors.square().sum(-1, keepdim=True).sqrt() + 1e-9)).clamp_max(1)
    return torch.softmax(vectors[0] @ vectors[1].mT, -1)


def context_scaling(p: Any, run: Run) -> Any:
    """Frequencies of five methods, one vector and 64 keys rotated twice, five curves at 65 distances."""
    import torch

    q, k = run.randn(p.d_k).double(), run.randn(64, p.d_k).double()
    exponents = -torch.arange(0, p.d_k, 2, dtype=torch.float64) / p.d_k
    theta = p.base**exponents
    turns = theta * p.trained_len / (2 * torch.pi)
    kept = ((turns - p.slow_turns) / (p.fast_turns - p.slow_turns)).clamp(0, 1)
    changed = p.base * p.context_factor ** (p.d_k / (p.d_k - 2))
    five = torch.stack((theta, theta / p.context_factor, changed**exponents, theta * kept, p.larger_base**exponents))

    def turned(x: Any, angles: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)

    positions = torch.arange(64, dtype=torch.float64)[:, None]
    changing = (p.base * (1 + positions) ** (p.d_k / (p.d_k - 2))) ** exponents
    q = turned(q, theta * p.trained_len)
    found = [turned(k, positions * theta) @ q, turned(k, positions * changing) @ q, (2 * (five / 2).sin()).norm(dim=-1)]
    distances = torch.logspace(0, 15, 65, base=2, dtype=torch.float64)
    return found, (distances[:, None, None] * five).cos().mean(-1), (five / theta).numpy()


def cache_size(p: Any, run: Run) -> Any:
    """k and v of a layer without storage, for all sizes, lengths and models drawn; one tensor of each weight."""
    import torch

    from engine.model_shapes import SHAPES, weights

    def kept(shape: Any, batch: int, seq_len: int, width: int) -> int:
        x = torch.empty(batch, seq_len, shape.d_model, dtype=torch.bfloat16, device="meta")
        W = torch.empty(shape.d_model, width, dtype=torch.bfloat16, device="meta")
        return sum((x @ W).clone().nbytes for _ in range(2))

    shape = SHAPES[p.model]
    found = [kept(shape, 2**n, p.seq_len, shape.n_kv_heads * shape.d_k) for n in range(11)]
    found += [kept(shape, p.batch, p.seq_len, width) for width in (1024, 1024, 1024, 4096, 4096, 1024, 1024)]
    for name in ("llama_2_7b", "llama_3_8b", "llama_3_70b", "mistral_7b", "gemma_3_27b", "gemma_3_27b", "deepseek_v3"):
        found += [kept(SHAPES[name], 1, 4**n, 1024) for n in range(5, 10)]
    return found, [count * tensor.nbytes for _, count, tensor in weights(shape, torch.bfloat16)]


def cache_growth(p: Any, run: Run) -> Any:
    """The tensors of a growing cache without storage, one for each step and layer."""
    import torch

    lengths = (1 + run.rand(p.batch) * p.prompt_len).long().tolist()
    held = []
    for step in range(p.n_steps):
        for _ in range(p.n_layers):
            held.append(torch.empty(2, p.batch, 8, max(lengths) + step, 128, device="meta").nbytes)
        for length in lengths:
            if (length + step) % p.block_size == 0:
                held.append(torch.empty(p.n_layers, 2, 8, p.block_size, 128, device="meta").nbytes)
    return held


def _tiles(logits: Any, v: Any, tile_len: int) -> Any:
    """The recurrence of an online softmax, tile by tile."""
    m = logits.new_full(logits.shape[:1], -float("inf"))
    total, out = logits.new_zeros(len(m)), logits.new_zeros(len(m), v.shape[1])
    for start in range(0, logits.shape[1], tile_len):
        z = logits[:, start : start + tile_len]
        new = m.maximum(z.amax(-1))
        factor, powers = (m - new).exp(), (z - new[:, None]).exp()
        total, out = total * factor + powers.sum(-1), out * factor[:, None] + powers @ v[start : start + tile_len]
        m = new
    return m, total, out


def online_softmax(p: Any, run: Run) -> Any:
    """Rows in tiles seven times, as for seven ways to write the recurrence, and whole rows in float64."""
    import torch

    logits, v = (p.logits_std * run.randn(p.n_rows, p.kv_len)).double(), run.randn(p.kv_len, p.d_v).double()
    wanted = torch.softmax(logits, -1) @ v
    found = [_tiles(logits, v, p.tile_len) for _ in range(7)]
    return [(out / total[:, None] - wanted).norm(dim=-1) for _, total, out in found]


def running_max_changes(p: Any, run: Run) -> Any:
    """Maxima of the tiles, the largest so far, and where it changes."""
    rows = p.rows_together * p.n_groups
    tops = run.randn(rows, p.kv_len // p.tile_len, p.tile_len).amax(-1)
    best = tops.cummax(-1).values
    moved = best[:, 1:] != best[:, :-1]
    return moved.sum(-1), moved.view(p.n_groups, p.rows_together, -1).any(1)


def state_merge(p: Any, run: Run) -> Any:
    """A softmax a worker, merged by log-sum-exp, and four merges of states."""
    import torch

    logits, v = (p.logits_std * run.randn(p.n_rows, p.kv_len)).double(), run.randn(p.kv_len, p.d_v).double()
    parts = [_tiles(z, w, p.kv_len) for z, w in zip(logits.chunk(p.n_workers, 1), v.chunk(p.n_workers), strict=True)]
    lse = torch.stack([m + total.log() for m, total, _ in parts])
    found = (torch.softmax(lse, 0)[..., None] * torch.stack([out / total[:, None] for _, total, out in parts])).sum(0)
    for _ in range(4):
        m, total, out = parts[0]
        for m2, total2, out2 in parts[1:]:
            new = m.maximum(m2)
            a, b = (m - new).exp(), (m2 - new).exp()
            m, total, out = new, total * a + total2 * b, out * a[:, None] + out2 * b[:, None]
    return found, out, torch.softmax(logits, -1) @ v


def softmax_passes(p: Any, run: Run) -> Any:
    """Seven rows of different length, each by three ways in passes over its pieces, and by the recurrence."""
    import torch

    found = []
    for n in (p.kv_len, 128, 256, 512, 1024, 2048, 4096):
        logits, v = p.logits_std * run.randn(1, n), run.randn(n, 8)
        pieces, values = logits.split(p.tile_len, 1), v.split(p.tile_len)
        highest = torch.stack([z.amax() for z in pieces]).amax()
        m, total, out = _tiles(logits, v, p.tile_len)
        for top in (0.0, highest, m):
            below = total if top is m else sum((z - top).exp().sum() for z in pieces)
            weights = [(z - top).exp() / below for z in pieces]
            found.append(sum(w @ x for w, x in zip(weights, values, strict=True)))
        found.append(out / total)
    return found


def accumulator_precision(p: Any, run: Run) -> Any:
    """The recurrence in three formats, and at each power of two whole rows in float64 and stored once."""
    import torch

    logits, v = p.logits_std * run.randn(p.n_rows, p.kv_len), run.randn(p.kv_len, p.d_v)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        m = logits.new_full((p.n_rows,), -float("inf"))
        total, out, seen = torch.zeros_like(m), logits.new_zeros(p.n_rows, p.d_v), 0
        for z, x in zip(logits.split(p.tile_len, 1), v.split(p.tile_len), strict=True):
            new = m.maximum(z.amax(-1))
            factor, powers = (m - new).exp(), (z - new[:, None]).exp()
            m, total = new.to(dtype).float(), (total * factor + powers.sum(-1)).to(dtype).float()
            out = (out * factor[:, None] + powers @ x).to(dtype).float()
            seen += p.tile_len
            if seen & (seen - 1) == 0:
                exact = logits[:, :seen].double()
                once = _tiles(logits[:, :seen], v[:seen], seen)
                found += [torch.softmax(exact, -1) @ v[:seen].double(), exact.logsumexp(-1), once, out / total[:, None]]
    return found


def _decoder(p: Any, run: Run, n_kv_heads: int, dtype: Any) -> Any:
    """Random layers, and a pass of them over x behind the keys and values that are there."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    from engine.positions import rotary_angles, rotate

    d, d_k = p.d_model, p.d_model // p.n_heads
    widths = ((d, d), (n_kv_heads * d_k, d), (n_kv_heads * d_k, d), (d, d), (4 * d, d), (d, 4 * d))
    layers = [[run.randn(*w).to(dtype) / w[1] ** 0.5 for w in widths] for _ in range(p.n_layers)]

    def read(x: Any, past: Any = None) -> Any:
        n, new = past[0][0].shape[-2] if past else 0, x.shape[-2]
        angles = rotary_angles(torch.arange(n, n + new), d_k)
        later, kept = torch.ones(new, n + new, dtype=torch.bool).triu(n + 1), []
        for number, (W_q, W_k, W_v, W_o, W_up, W_down) in enumerate(layers):
            normed = layer_norm(x, (d,))
            q, k, v = ((normed @ W.mT).unflatten(-1, (-1, d_k)).transpose(-3, -2) for W in (W_q, W_k, W_v))
            q, k = rotate(q, angles), rotate(k, angles)
            if past:
                k, v = (torch.cat(pair, -2) for pair in zip(past[number], (k, v), strict=True))
            kept.append((k, v))
            k, v = (y.repeat_interleave(p.n_heads // n_kv_heads, -3) for y in (k, v))
            weights = torch.softmax((q @ k.mT * d_k**-0.5).masked_fill(later, -torch.inf), -1)
            x = x + (weights @ v).transpose(-3, -2).flatten(-2) @ W_o.mT
            x = x + gelu(layer_norm(x, (d,)) @ W_up.mT) @ W_down.mT
        return x, kept

    return read


def cached_decoding(p: Any, run: Run) -> Any:
    """A prompt and its steps in nine ways, noise for three of them, and a pass over everything at each step."""
    import torch

    read = _decoder(p, run, p.n_kv_heads, torch.float64)
    length = p.prompt_len + p.new_tokens
    tokens = run.randn(length, p.d_model).double()
    noise = [run.randn(p.n_heads, length, p.d_model // p.n_heads) for _ in range(3 * p.n_layers)]
    ends = range(p.prompt_len + p.tokens_per_step, length + 1, p.tokens_per_step)
    found = [read(tokens[:end])[0] for end in ends]
    _, prompt = read(tokens[: p.prompt_len])
    for _ in range(9):
        cache = prompt
        for end in ends:
            out, cache = read(tokens[end - p.tokens_per_step : end], cache)
            found.append(out)
    return found, noise


def cache_validity(p: Any, run: Run) -> Any:
    """A pass before, one for each of four events, and the next token behind a cache."""
    import torch

    read = _decoder(p, run, p.n_heads, torch.float64)
    text = run.randn(p.seq_len + 2, p.d_model).double()
    passes = [read(text[:length]) for length in (p.seq_len, p.seq_len + 1, p.seq_len + 1, p.seq_len + 2, p.seq_len)]
    return passes, read(text[-2:-1], passes[0][1])


def decoding_costs(p: Any, run: Run) -> Any:
    """The products of a layer for each pass, counted without storage; those with a cache are all but the scores."""
    import torch

    from engine.operations import count_operations

    d, d_k = p.d_model, p.d_model // p.n_heads
    matrices = [torch.empty(d, d, device="meta") for _ in range(12)]  # the two of the FFN are four squares each
    found = []
    for t in range(p.prompt_len, p.prompt_len + p.new_tokens):
        x, k = torch.empty(t, d, device="meta"), torch.empty(p.n_heads, d_k, t, device="meta")
        q, all_q = (torch.empty(p.n_heads, rows, d_k, device="meta") for rows in (1, t))
        with count_operations() as counted:
            for W in matrices:
                torch.mm(x, W)
            for queries in (q, all_q):
                torch.bmm(torch.bmm(queries, k), k.mT)
        found.append(counted.products)
    return found


def decoding_times(p: Any, run: Run) -> Any:
    """At each length the caches' pass, the step and the pass over everything, four times each."""
    import torch

    read = _decoder(p, run, p.n_heads, torch.float32)
    tokens = run.randn(p.batch, p.seq_len, p.d_model)
    found = []
    for length in (2**n for n in range(3, 10) if 2**n <= p.seq_len):
        _, cache = read(tokens[:, : length - 1])
        for _ in range(4):
            found += [read(tokens[:, length - 1 : length], cache), read(tokens[:, :length])]
    return found, [read(tokens) for _ in range(4)]


def forward_flops(p: Any, run: Run) -> Any:
    """The products of one block and the unembedding without storage, then attention at nine lengths, counted."""
    import torch

    from engine.operations import count_operations

    def empty(*shape: int) -> Any:
        return torch.empty(shape, device="meta")

    d, n = p.d_model, p.seq_len
    x, W, up, table = empty(n, d), empty(d, d), empty(d, p.d_ff), empty(d, p.vocabulary)
    found = []
    with count_operations() as counted:
        found += [x @ W for _ in range(4)] + [x @ up for _ in range(3)] + [x @ table]
    for length in [n] + [2**i for i in range(9, 18)]:
        q = empty(p.n_heads, length, p.d_k)
        with count_operations() as counted:
            found.append(q @ q.mT @ q)
    return found, counted


def training_flops(p: Any, run: Run) -> Any:
    """Five decoders without storage, forward and backward, counted."""
    import torch

    from engine.operations import count_operations

    def empty(*shape: int) -> Any:
        return torch.empty(shape, device="meta", requires_grad=True)

    d, n, found = p.d_model, p.seq_len, []
    for _ in range(5):
        layers = [
            (empty(d, d), empty(d, d), empty(d, d), empty(d, d), empty(d, p.ffn_ratio * d), empty(p.ffn_ratio * d, d))
            for _ in range(p.n_layers)
        ]
        table, head = empty(p.vocabulary, d), empty(d, p.vocabulary)
        with count_operations() as counted:
            x = table[:n] * 1
            for q, k, v, o, up, down in layers:
                x = x + (x @ q) @ (x @ k).mT @ (x @ v) @ o
                x = x + (x @ up) @ down
            logits = x @ head
        grad = torch.empty_like(logits)
        with count_operations() as counted:
            found.append(torch.autograd.grad(logits, [table, head, *(w for layer in layers for w in layer)], grad))
        found.append(counted)
    return found


def _judged(p: Any, q: Any, u: Any) -> Any:
    """Drafts from q, how many are kept, and the token that follows. Shapes: p (rounds, gamma + 1, n)."""
    import torch

    drafted = (q.cumsum(-1) <= u[:, : q.shape[1], None]).sum(-1).clamp(max=q.shape[-1] - 1)
    p_of, q_of = (law[:, : q.shape[1]].gather(-1, drafted[..., None])[..., 0] for law in (p, q))
    n_kept = (u[:, q.shape[1] : 2 * q.shape[1]] < p_of / q_of).long().cumprod(-1).sum(-1)
    residual = torch.cat((p[:, :-1] - q, p[:, -1:]), 1).clamp(min=0)[torch.arange(len(p)), n_kept]
    return drafted, n_kept, (residual.cumsum(-1) <= u[:, -1:] * residual.sum(-1, keepdim=True)).sum(-1)


def speculative_sampling(p: Any, run: Run) -> Any:
    """The law of all sequences of target and draft; three rounds of every stream, about as many as it takes."""
    target, draft = ((1.5 * run.randn(p.n_tokens, p.n_tokens)).softmax(-1) for _ in range(2))
    laws = []
    for matrix in (target.cpu().double(), draft.cpu().double()):
        law = matrix
        for _ in range(p.gamma):
            law = law[..., None] * matrix
        laws.append(law.sum())
    found = []
    for _ in range(3):
        before = run.rand(p.n_streams, p.gamma + 1).mul(p.n_tokens).long()
        found.append(_judged(target[before], draft[before[:, :-1]], run.rand(p.n_streams, 2 * p.gamma + 1)))
    return laws, found


def speculative_speedup(p: Any, run: Run) -> Any:
    """Flips, how many of each round come up before the first that does not, and their means for 16 γ."""
    kept = (run.rand(p.n_rounds, 16) < p.alpha).long().cumprod(-1).sum(-1)
    return [kept.clamp(max=gamma).float().mean() for gamma in range(1, 17)]


def verification_cost(p: Any, run: Run) -> Any:
    """Nothing but shapes: eight products a layer, for two caches and two numbers of new tokens, without storage."""
    import torch

    def empty(*shape: int) -> Any:
        return torch.empty(*shape, device="meta", dtype=torch.float16)

    found = []
    for kv_len in (1024, 131072):
        for n_new in (1, p.gamma + 1):
            for width_in, width_out in (
                ((4096, 4096),) * 2 + ((4096, 1024),) * 2 + ((4096, 14336),) * 2 + ((14336, 4096),)
            ):
                found.append(empty(n_new, width_in) @ empty(width_in, width_out))
            found.append(empty(8, 4 * n_new, 128) @ empty(8, 128, kv_len) @ empty(8, kv_len, 128))
    return found


def draft_acceptance(p: Any, run: Run) -> Any:
    """The prompts, and for each round five tokens a text, through the model; each judged against a fixed draft."""
    import torch

    from engine import inputs, language_model

    weights = language_model.load_weights(run.device, run.dtype)
    tokens = inputs.draw_texts(run, "stories", p.n_texts, 32).tokens
    draft = torch.full((p.n_texts, p.gamma, 96), 1 / 96, device=run.device)
    found = []
    with torch.inference_mode():
        language_model.forward_fast(weights, tokens)
        for _ in range(p.n_rounds):
            law = language_model.forward_fast(weights, tokens[:, : p.gamma + 1]).softmax(-1)
            found.append(_judged(law, draft, run.rand(p.n_texts, 2 * p.gamma + 1)))
    return found


def tiled_attention(p: Any, run: Run) -> Any:
    """A head with whole rows twice, once in float64, and in tiles; gradients of all; whole rows of shorter lengths."""
    import torch

    q, k, v, do = (run.randn(p.seq_len, p.d_k).double() for _ in range(4))
    found, scale = [], p.d_k**-0.5
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = torch.softmax(leaves[0] @ leaves[1].mT * scale, -1) @ leaves[2]
        found.append((out, torch.autograd.grad(out, leaves, do)))
    lse = []
    for x in q.split(p.q_tile):
        m, total, out = _tiles(x @ k.mT * scale, v, p.kv_tile)
        lse.append(m + total.log())
        found.append(out / total[:, None])
    terms = (found[0][0] * do).sum(-1).detach().split(p.q_tile)
    for y, z in zip(k.split(p.kv_tile), v.split(p.kv_tile), strict=True):
        for x, d, top, term in zip(q.split(p.q_tile), do.split(p.q_tile), lse, terms, strict=True):
            w = (x @ y.mT * scale - top[:, None]).exp()
            ds = w * (d @ z.mT - term[:, None]) * scale
            found.append((w.mT @ d, ds @ y, ds.mT @ x))
    for n in (16, 32, 64, 128, 256):
        x = q.new_zeros(n, p.d_k).requires_grad_()
        found.append(torch.softmax(x @ x.mT, -1) @ x)
    return found


def attention_traffic(p: Any, run: Run) -> Any:
    """Slices of arrays without storage, as many as the loops of both orders touch at six lengths and five widths."""
    import math

    import numpy as np

    total = 0
    sizes = [(n, p.d_k) for n in (64, 128, 256, 512, 1024, 2048, p.seq_len)] + [
        (p.seq_len, d) for d in (16, 32, 128, 256)
    ]
    for n, d in sizes:
        x = np.broadcast_to(np.empty((), f"V{p.number_bytes}"), (n, d))
        rows = np.broadcast_to(np.empty((), "V4"), (n,))
        wide = max(1, math.ceil(p.sram_kib * 1024 / p.number_bytes / (4 * d)))
        narrow = min(wide, d)
        for outer in range(0, n, wide):
            for inner in range(0, n, narrow):
                total += 2 * x[inner : inner + narrow].nbytes  # queries outside: keys and values
                piece, statistic = x[inner : inner + narrow], rows[inner : inner + narrow]
                total += 3 * piece.nbytes + 4 * statistic.nbytes  # keys outside: queries, outputs and statistics
            total += 4 * x[outer : outer + wide].nbytes
    return total


def attention_backends(p: Any, run: Run) -> Any:
    """The call, and the same in whole rows, at three lengths, five times each: once watched, once warm, three timed."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    found = []
    for n in (p.seq_len // 4, p.seq_len // 2, p.seq_len):
        q, k, v = (torch.ones(1, p.n_heads, n, p.d_k, device=run.device) for _ in range(3))
        for _ in range(5):
            found.append(scaled_dot_product_attention(q, k, v))
            found.append(torch.softmax(q @ k.mT * p.d_k**-0.5, -1) @ v)
    return found


def latent_attention(p: Any, run: Run) -> Any:
    """Both forms in three number formats, a matrix for each distance, GQA twice, five sets of singular values."""
    import torch

    shapes = {"W_q": (p.n_heads, p.d_k, p.d_model), "W_o": (p.n_heads, p.d_model, p.d_k)}
    shapes |= {"W_down": (p.kv_rank, p.d_model), "W_uk": (p.n_heads, p.d_k, p.kv_rank)}
    shapes |= {"W_uv": (p.n_heads, p.d_k, p.kv_rank), "W_k": (p.n_heads, p.d_k, p.d_model)}
    shapes |= {"W_v": (p.n_heads, p.d_k, p.d_model), "W_qr": (p.n_heads, p.d_rope, p.d_model)}
    drawn = {name: run.randn(*s).double() / s[-1] ** 0.5 for name, s in shapes.items()}
    drawn |= {"x": run.randn(p.seq_len, p.d_model).double(), "W_kr": run.randn(p.d_rope, p.d_model).double()}
    hidden = torch.ones(p.seq_len, p.seq_len, dtype=torch.bool).triu(1)
    positions = torch.arange(p.seq_len)[:, None].double()
    angles = positions * 10_000.0 ** (-torch.arange(0, p.d_rope, 2) / p.d_rope)

    def turned(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def weights(logits: Any) -> Any:
        return torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)

    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float64):
        m = {name: t.to(dtype) for name, t in drawn.items()}
        latent = m["x"] @ m["W_down"].mT
        latent = latent / latent.square().mean(-1, keepdim=True).sqrt()
        q, scale = m["x"] @ m["W_q"].mT, (p.d_k + p.d_rope) ** -0.5
        rotary = turned(m["x"] @ m["W_qr"].mT) @ turned(m["x"] @ m["W_kr"].mT).mT
        k, v = latent @ m["W_uk"].mT, latent @ m["W_uv"].mT
        expanded = (weights((q @ k.mT + rotary) * scale) @ v @ m["W_o"].mT).sum(0)
        absorbed = weights((q @ m["W_uk"] @ latent.mT + rotary) * scale) @ latent
        absorbed = (absorbed @ m["W_uv"].mT @ m["W_o"].mT).sum(0)
        found.append((expanded - absorbed).abs().max())
    between = m["W_q"][0].mT.expand(p.seq_len, -1, -1) @ m["W_uk"][0]
    found.append((between - between.mean(0)).norm())
    grouped = [m["x"] @ m[name][: p.n_kv_heads].mT for name in ("W_k", "W_v")]
    for _ in range(2):
        found.append(weights(q @ grouped[0].mT) @ grouped[1])
    mha = torch.cat(tuple(m["x"] @ m["W_k"].mT), -1)
    keys, values = torch.cat(tuple(k), -1), torch.cat(tuple(v), -1)
    logits = (q @ k.mT + rotary).flatten(0, 1)
    singular = [torch.linalg.svdvals(t) for t in (keys, torch.cat((keys, values), -1), logits, mha, grouped[0][0])]
    return found, singular


def latent_costs(p: Any, run: Run) -> Any:
    """Thirteen steps in two ways, twelve more for the chart of GPUs, and two products of weights."""
    import torch

    from engine.operations import count_operations

    def empty(*shape: int) -> Any:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    found = []
    for q_len in (1, 8, 64, 512, 4096) * 2 + (1,) * 15:
        heads, W = 128 // p.n_gpus, empty(128 // p.n_gpus, 128, 512)
        latent, rotary = empty(p.kv_len, 512), empty(p.kv_len, 64)
        q, q_rope = empty(heads, q_len, 128), empty(heads, q_len, 64)
        with count_operations() as counted:
            out = ((q @ W) @ latent.mT + q_rope @ rotary.mT) @ latent @ W.mT
        found.append((counted, out))
    return found, empty(128, 512, 128) @ empty(128, 128, 1536), empty(128, 7168, 128) @ empty(128, 128, 512)


def kv_sharing(p: Any, run: Run) -> Any:
    """One layer without storage for every number of KV heads: its products in both phases, and its cache."""
    import torch

    from engine.model_shapes import SHAPES

    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    shape, found = SHAPES[p.model], []
    h, d, d_k = shape.n_heads, shape.d_model, shape.d_k
    for n_kv_heads in (n for n in range(1, h + 1) if h % n == 0):
        for batch, tokens in ((1, p.seq_len), (p.batch, 1)):
            x = empty(batch * tokens, d)
            widths = (h * d_k, n_kv_heads * d_k, n_kv_heads * d_k, shape.d_ff, shape.d_ff, shape.vocabulary)
            found += [x @ empty(d, width) for width in widths]
            found += [
                empty(batch * tokens, shape.d_ff) @ empty(shape.d_ff, d),
                empty(batch * tokens, h * d_k) @ empty(h * d_k, d),
            ]
            q, k = empty(batch, n_kv_heads, h // n_kv_heads * tokens, d_k), empty(batch, n_kv_heads, p.seq_len, d_k)
            found.append(q @ k.mT @ k)
        found.append(sum((empty(p.batch, p.seq_len, d) @ empty(d, n_kv_heads * d_k)).clone().nbytes for _ in range(2)))
    for n_kv_heads in (h, p.n_kv_heads, 1):
        for n_gpus in (1, 2, 4, 8, 16, 32):
            width = max(1, n_kv_heads // n_gpus) * d_k
            found.append(sum((empty(p.batch, p.seq_len, d) @ empty(d, width)).clone().nbytes for _ in range(2)))
    return found


def kv_head_mapping(p: Any, run: Run) -> Any:
    """A layer that shares k and v in two layouts and with reordered heads, twice MHA, and five ways of reading."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    d_model = p.n_heads * p.d_k
    x = run.randn(2, p.seq_len, d_model).double()
    W_q, W_k, W_v, W_o = (run.randn(n * p.d_k, d_model).double() for n in (p.n_heads, *[p.n_kv_heads] * 2, p.n_heads))
    group, found = p.n_heads // p.n_kv_heads, []
    for _ in range(10):
        q, k, v = ((x @ W.mT).unflatten(-1, (-1, p.d_k)).transpose(1, 2) for W in (W_q, W_k, W_v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        found.append(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ W_o)
    return found, torch.stack(found).std(0)


def head_merging(p: Any, run: Run) -> Any:
    """A layer, the same in another basis, and merged in three ways for every number of KV heads."""
    import torch

    h, d_model, found = p.n_heads, p.n_heads * p.d_k, []
    x = run.randn(p.seq_len, d_model).double()
    W_q, W_k, W_v, W_o, new_k, new_v = (run.randn(h, p.d_k, d_model).double() / d_model**0.5 for _ in range(6))
    turns = [torch.linalg.qr(run.randn(h, p.d_k, p.d_k).double())[0] for _ in range(2)]
    hidden = torch.ones(p.seq_len, p.seq_len, dtype=torch.bool).triu(1)

    def layer(W_q: Any, W_k: Any, W_v: Any, W_o: Any) -> Any:
        logits = ((x @ W_q.mT) @ (x @ W_k.mT).mT / p.d_k**0.5).masked_fill(hidden, -torch.inf)
        return (torch.softmax(logits, -1) @ (x @ W_v.mT) @ W_o).sum(0)

    found = [layer(W_q, W_k, W_v, W_o), layer(turns[0] @ W_q, turns[0] @ W_k, turns[1] @ W_v, turns[1] @ W_o)]
    for n in (n for n in range(1, h + 1) if h % n == 0):
        for pool in (lambda W, _: W.mean(1), lambda W, _: W[:, 0], lambda W, new: new[: len(W)]):
            pooled = [
                pool(W.unflatten(0, (n, -1)), new).repeat_interleave(h // n, 0)
                for W, new in ((W_k, new_k), (W_v, new_v))
            ]
            found.append(layer(W_q, *pooled, W_o))
    return found


def phase_bounds(p: Any, run: Run) -> Any:
    """The products of a layer and the head for every number of tokens that is drawn, counted without storage."""
    import torch

    from engine.model_shapes import SHAPES, weights
    from engine.operations import count_operations

    found = []
    for rows in (1, 4, 8, 16, 64, 128, 256, 512, 1024, 4096, 16384, 131072, *(2**n for n in range(19, 8, -1))):
        for name, _, weight in weights(SHAPES[p.model], torch.bfloat16):
            if weight.ndim > 1 and name not in ("embedding", "norm"):
                matrix = weight.flatten(0, -2)
                x = torch.empty(rows, matrix.shape[-1], dtype=torch.bfloat16, device="meta")
                with count_operations() as counted:
                    torch.mm(x, matrix.mT)
                found.append(counted.products)
    return found


def phase_times(p: Any, run: Run) -> Any:
    """Two prompts and three batches of steps, six times each; before each pass 32 MiB are written."""
    from types import SimpleNamespace

    import torch

    n_heads = p.d_model // 64
    sizes = SimpleNamespace(d_model=p.d_model, n_heads=n_heads, n_layers=p.n_layers)
    read = _decoder(sizes, run, n_heads, torch.float32)
    displaced, found = torch.empty(2**23), []
    for length in (16, p.prompt_len):
        for _ in range(6):
            displaced.fill_(0)
            found.append(read(run.randn(1, length, p.d_model)))
    for batch in (1, 4, p.batch):
        _, cache = read(run.randn(batch, p.prompt_len, p.d_model))
        for _ in range(6):
            displaced.fill_(0)
            found.append(read(run.randn(batch, 1, p.d_model), cache))
    return found


def expert_reads(p: Any, run: Run) -> Any:
    """Noise, the largest scores of each token, and the distinct experts, in each layer."""
    import torch

    found = []
    for _ in range(8):
        scores = -torch.log(-torch.log(run.rand(max(512, p.batch), p.n_experts)))
        found.append(torch.unique(scores.topk(p.experts_per_token, dim=-1).indices))
    return found


def _decoder_on_meta(n_kv_heads: int, d_model: int, d_ff: int, vocabulary: int, d_attention: int) -> int:
    """Parameters of one block and of both tables."""
    import torch
    from torch import nn

    block = nn.ModuleList(
        [nn.Linear(d_model, width, bias=False, device="meta") for width in (d_attention, n_kv_heads * 128)]
        + [nn.Linear(d_model, n_kv_heads * 128, bias=False, device="meta")]
        + [nn.Linear(d_attention, d_model, bias=False, device="meta")]
        + [nn.Linear(d_model, d_ff, bias=False, device="meta") for _ in range(2)]
        + [nn.Linear(d_ff, d_model, bias=False, device="meta")]
        + [nn.RMSNorm(d_model, device="meta") for _ in range(3)]
    )
    table = nn.Embedding.from_pretrained(torch.empty(vocabulary, d_model, device="meta"), freeze=False)
    head = nn.Linear(d_model, vocabulary, bias=False, device="meta")
    return sum(p.numel() for module in (block, table, head) for p in module.parameters())


def parameter_count(p: Any, run: Run) -> Any:
    """The chosen model and seven of other widths."""
    widths = (p.d_model, *(2**n for n in range(8, 15)))
    return [_decoder_on_meta(p.n_kv_heads, width, 2 * width, p.vocabulary, width) for width in widths]


def published_counts(p: Any, run: Run) -> Any:
    """Six models, of which two have blocks of two kinds."""
    return [_decoder_on_meta(8, 4096, 11008, 32000, 4096) for _ in range(7)]


def training_state(p: Any, run: Run) -> Any:
    """Two passes forward and backward, and eighteen steps of Adam on one buffer."""
    import torch

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        weights = (0.02 * run.randn(32960)).to(dtype).requires_grad_()
        table, rest = weights[:4096].view(64, 64), weights[4096:8192].view(64, 64)
        x = table[(run.rand(8) * 64).long()]
        for _ in range(9):
            x = x + torch.nn.functional.silu(x @ rest.mT)
        loss = torch.nn.functional.cross_entropy((x @ table.mT).float(), (run.rand(8) * 64).long())
        (gradient,) = torch.autograd.grad(loss, weights)
        for _ in range(9):
            master, g = weights.detach().float(), gradient.float()
            first, second = 0.1 * g, 0.001 * g * g
            found.append(master.addcdiv(first, second.sqrt().add(1e-8), value=-1e-3).nbytes)
    return found


def product_intensity(p: Any, run: Run) -> Any:
    """The product for every number of rows that is drawn or searched, counted without storage."""
    import torch

    from engine.operations import count_operations

    found = []
    sizes = [(p.matrix_out, 2**n) for n in range(31)]
    sizes += [(width, 4**n) for width in (16, p.matrix_out // 4, p.matrix_out) for n in range(10)]
    for width, rows in sizes:
        x = torch.empty(1, rows, p.matrix_in, dtype=torch.bfloat16, device="meta")
        with count_operations() as counted:
            torch.bmm(x, torch.empty(1, p.matrix_in, width, dtype=torch.bfloat16, device="meta"))
        found.append(counted.products)
    return found


def layer_roofline(p: Any, run: Run) -> Any:
    """The products, norms and other steps of a layer for every batch that is drawn, counted without storage."""
    import torch

    from engine.model_shapes import SHAPES, weights
    from engine.operations import count_operations

    found = []
    for rows in (1, 4, 16, p.batch, 64, 256, 1024):
        for name, _, weight in weights(SHAPES[p.model], torch.bfloat16):
            if weight.ndim > 1 and name not in ("embedding", "norm"):
                matrix = weight.flatten(0, -2)
                x = torch.empty(rows, matrix.shape[-1], dtype=torch.bfloat16, device="meta")
                for work in (lambda: x @ matrix.mT, lambda: x * (x * x).sum(-1, keepdim=True).rsqrt(), lambda: x + x):  # noqa: B023
                    with count_operations() as counted:
                        work()
                    found.append(counted.total)
    return found


def shared_matrix_times(p: Any, run: Run) -> Any:
    """Three batches of rows through one matrix and through one each, six times; before each 32 MiB are written."""
    import torch

    matrices, rows = run.randn(p.batch, p.matrix_side, p.matrix_side), run.randn(p.batch, p.matrix_side)
    displaced, found = torch.empty(2**23), []
    for batch in (1, 4, p.batch):
        for _ in range(6):
            displaced.fill_(0)
            found.append(rows[:batch] @ matrices[0].mT)
            displaced.fill_(0)
            found.append(torch.bmm(matrices[:batch], rows[:batch, :, None]))
    return found


def cross_attention(p: Any, run: Run) -> Any:
    """An encoder layer on two orders with and without positions, fourteen calls that read it, and one with padding."""
    import torch

    S, X, other = run.randn(p.kv_len, p.d_source), run.randn(p.q_len, p.d_model), run.randn(1, p.d_model)
    pad_s, _ = run.randn(1, p.d_source), run.randn(1, p.d_model)
    E = [run.randn(p.d_source, p.d_source) * p.d_source**-0.5 for _ in range(4)]
    W_q, W_k, W_v, W_o = (run.randn(n, p.d_model) * n**-0.5 for n in (p.d_model, p.d_source, p.d_source, p.d_model))

    def encode(x: Any, mask: Any = 0.0) -> Any:
        q, k, v = (x @ W for W in E[:3])
        return x + torch.softmax(q @ k.mT * p.d_source**-0.5 + mask, -1) @ v @ E[3]

    def positions(length: int, width: int) -> Any:
        angles = torch.arange(length)[:, None] * 10_000.0 ** -(torch.arange(0, width, 2) / width)
        return angles.sin(), angles.cos()

    def turn(x: Any) -> Any:
        sin, cos = positions(x.shape[-2], x.shape[-1])
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def call(memory: Any, target: Any, mask: Any = 0.0, turned: str = "") -> Any:
        q, k, v = (
            (x @ W).unflatten(-1, (p.n_heads, -1)).transpose(0, 1)
            for x, W in ((target, W_q), (memory, W_k), (memory, W_v))
        )
        q, k = turn(q) if "q" in turned else q, turn(k) if "k" in turned else k
        weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + mask, -1)
        return weights, (weights @ v).transpose(0, 1).flatten(-2) @ W_o

    added = torch.stack(positions(p.kv_len, p.d_source + p.d_source % 2), -1).flatten(-2)[:, : p.d_source]
    M, flipped, M_added, flipped_added = (encode(s) for s in (S, S.flip(0), S + added, S.flip(0) + added))
    plain = call(M, X)[1]
    cases = ((M, flipped, ""), (M, flipped, "q"), (M, flipped, "qk"), (M_added, flipped_added, ""))
    sources = [call(m, X, turned=which)[1] for one, two, which in cases for m in (one.flip(0), two)]
    still = [call(one, X, turned=which)[1] for one, _, which in cases[1:]]
    targets = [call(M, x)[1] for x in (X.flip(0), torch.cat((X[:-1], other)))]
    padded = torch.cat((S, pad_s.expand(p.padding_len, -1)))
    mask = torch.zeros(len(padded), device=S.device)
    mask[p.kv_len :] = -torch.inf
    weights, out = call(encode(padded, mask), X, mask)
    found = [(x - plain).abs().max() for x in (*sources, *still, targets[0].flip(0), out)]
    return found, (targets[1] - plain)[:-1].abs().max(), weights[..., p.kv_len :].sum(-1).mean(), (weights > 0).sum(-1)


def source_conditioning(p: Any, run: Run) -> Any:
    """A layer with a prefix of each length, and with gated cross-attention at ten gates, forward and back."""
    import torch

    X, S, R = (run.randn(n, p.d_model) for n in (p.text_len, p.source_len, p.text_len))
    own, other = ([run.randn(p.d_model, p.d_model) * p.d_model**-0.5 for _ in range(4)] for _ in range(2))
    ln = torch.nn.functional.layer_norm

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (p.n_heads, -1)).transpose(0, 1)

    def attend(x: Any, x_kv: Any, W: Any, mask: Any = 0.0) -> Any:
        q, k, v = heads(x @ W[0]), heads(x_kv @ W[1]), heads(x_kv @ W[2])
        weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + mask, -1)
        return weights, (weights @ v).transpose(0, 1).flatten(-2) @ W[3]

    normed = ln(X, X.shape[-1:])
    mask = torch.full((p.text_len, p.text_len), -torch.inf, device=X.device).triu(1)
    plain = X + attend(normed, normed, own, mask)[1]
    found = []
    for n in [2**i for i in range(p.source_len.bit_length())] + [p.source_len]:
        both = torch.cat((S[:n], normed))
        weights, out = attend(normed, both, own, torch.cat((torch.zeros_like(mask[:, :1]).expand(-1, n), mask), 1))
        found.append(weights[:, -1, n:].sum(-1).mean())
    for gate in [i / 4 for i in range(9)] + [p.cross_gate]:
        g = torch.tensor(gate, device=X.device, dtype=X.dtype, requires_grad=True)
        W = [w.detach().requires_grad_() for w in other]
        gated = plain + g.tanh() * attend(ln(plain, plain.shape[-1:]), S, W)[1]
        gradients = torch.autograd.grad((gated * R).mean(), (g, *W))
        found += [(gated - plain).abs().max(), gradients[0].abs(), sum(x.square().sum() for x in gradients[1:])]
    return found, (X + out - plain).abs().max()


def cross_cache(p: Any, run: Run) -> Any:
    """Two passes of a small decoder behind a source, and one token by token behind both caches."""
    import torch

    d, h = p.d_model, p.n_heads
    crosses = [[run.randn(d, d) / d**0.5 for _ in range(4)] for _ in range(p.n_layers)]
    owns = [
        [run.randn(d, d) / d**0.5 for _ in range(4)]
        + [run.randn(4 * d, d) / d**0.5, run.randn(d, 4 * d) / (4 * d) ** 0.5]
        for _ in range(p.n_layers)
    ]
    n = p.prompt_len + p.new_tokens - 1
    X = run.randn(n, d)
    S, S2 = (run.randn(p.source_len, d) for _ in range(2))
    rates = 10_000.0 ** -(torch.arange(0, d // h, 2, device=X.device) / (d // h))
    ln, attend = torch.nn.functional.layer_norm, torch.nn.functional.scaled_dot_product_attention

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (h, -1)).transpose(0, 1)

    def turn(x: Any, first: int) -> Any:
        angles = torch.arange(first, first + x.shape[-2], device=x.device)[:, None] * rates
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).to(x.dtype)

    def extend(x: Any, cache: Any, source: Any) -> Any:
        for i, (W, C) in enumerate(zip(owns, crosses, strict=True)):
            y, first = ln(x, (d,)), 0 if cache[i] is None else cache[i][0].shape[-2]
            q, k, v = turn(heads(y @ W[0].mT), first), turn(heads(y @ W[1].mT), first), heads(y @ W[2].mT)
            if cache[i] is not None:
                k, v = torch.cat((cache[i][0], k), -2), torch.cat((cache[i][1], v), -2)
            cache[i] = k, v
            x = x + attend(q[None], k[None], v[None], is_causal=len(x) > 1)[0].transpose(0, 1).flatten(-2) @ W[3].mT
            q = heads(ln(x, (d,)) @ C[0].mT)
            x = x + attend(q[None], source[i][0][None], source[i][1][None])[0].transpose(0, 1).flatten(-2) @ C[3].mT
            x = x + torch.nn.functional.gelu(ln(x, (d,)) @ W[4].mT) @ W[5].mT
        return x

    def keys(source: Any) -> Any:
        return [(heads(source @ C[1].mT), heads(source @ C[2].mT)) for C in crosses]

    caches = [[None] * p.n_layers for _ in range(3)]
    held = keys(S)
    whole = extend(X, caches[0], held)
    extend(X, caches[1], keys(S2))
    extend(X[: p.prompt_len], caches[2], held)
    steps = [extend(X[i : i + 1], caches[2], held) for i in range(p.prompt_len, n)]
    changed = [(a[0] - b[0]).abs().max() for a, b in zip(caches[0], caches[1], strict=True)]
    return (torch.cat(steps) - whole[p.prompt_len :]).abs().max(), changed


def cross_attention_costs(p: Any, run: Run) -> Any:
    """The products of each step's scores, and of first passes at nine lengths, counted without storage."""
    import torch

    from engine.operations import count_operations

    d, d_k = p.d_model, p.d_model // p.n_heads
    steps = range(p.prompt_len + 1, p.prompt_len + p.new_tokens)
    pairs = [(1, length + source) for length in steps for source in (0, p.source_len)]
    lengths = [p.source_len >> i for i in range(9)]
    pairs += [(n + p.prompt_len, n + p.prompt_len) for n in lengths] + [(p.prompt_len, n) for n in lengths]
    scores = [
        [torch.empty(p.n_heads, *shape, device="meta") for shape in ((rows, d_k), (d_k, keys), (keys, d_k))]
        for rows, keys in pairs
    ]
    matrix = torch.empty(d, d, device="meta")
    tokens = [torch.empty(n + more, d, device="meta") for n in lengths for more in (0, p.prompt_len)]
    with count_operations() as counted:
        for q, k, v in scores:
            torch.bmm(torch.bmm(q, k), v)
        for x in tokens:
            for _ in range(12):
                torch.mm(x, matrix)
    return counted


def _standardized(x: Any, axes: tuple[int, ...]) -> Any:
    """Less the mean, over the standard deviation."""
    mean = x.mean(axes, keepdim=True)
    return (x - mean) * ((x - mean).square().mean(axes, keepdim=True) + 1e-5).rsqrt()


def norm_dependence(p: Any, run: Run) -> Any:
    """BatchNorm of a copy of the batch for each overwritten token, backward of a copy for each output, two more."""
    import torch

    x, other = run.randn(2, p.batch, p.seq_len, p.d_model)
    run.randn(p.d_model)
    g, n = run.randn(p.d_model), p.batch * p.seq_len
    each = torch.arange(n)
    copies = x.repeat(n, 1, 1, 1)
    copies.flatten(1, 2)[each, each] = other.flatten(0, 1)
    plain = _standardized(x, (-3, -2))
    found = [(_standardized(copies, (-3, -2)) - plain).abs().amax(-1)]
    copies = x.repeat(n, 1, 1, 1).requires_grad_()
    out = _standardized(copies, (-3, -2)).flatten(1, 2)[each, each] @ g
    found.append(torch.autograd.grad(out.sum(), copies)[0].norm(dim=-1))
    found.append(_standardized(torch.cat((x[:1], other[1:])), (-3, -2))[:1] - plain[:1])
    first, one, two = (run.randn(b, p.seq_len, p.d_model) for b in (1, 32, 32))
    for axes in ((-1,), (-2, -1), (-3,), (-3, -2)):
        for b in (2, 4, 8, 16, 32):
            outs = [_standardized(torch.cat((first, mates[: b - 1])), axes)[0] for mates in (one, two)]
            found.append((outs[0] - outs[1]).square().mean().sqrt())
    return found


def norm_invariance(p: Any, run: Run) -> Any:
    """Eight changes under four norms and once more, two gradients, a midpoint, and statistics of twenty batches."""
    import torch

    shape = (p.batch, p.seq_len, p.d_model)
    W = run.randn(p.d_model, p.d_model) / p.d_model**0.5
    x, upstream = run.randn(*shape), run.randn(*shape)
    changed = [x @ W.mT] + [run.randn(*shape) @ W.mT for _ in range(8)]
    earlier = torch.stack([run.randn(*shape) @ W.mT for _ in range(20)])
    mean, variance = earlier.mean((0, 1, 2)), earlier.var((1, 2)).mean(0)
    norms = [lambda a, axes=axes: _standardized(a, axes) for axes in ((-1,), (-1,), (-1,), (0, 1))]
    norms.append(lambda a: (a - mean) * (variance + 1e-5).rsqrt())
    found = []
    for norm in norms:
        outs = [norm(a) for a in changed]
        found += [(out - outs[0]).square().mean().sqrt() for out in outs[1:]]
    for factor in (1.0, p.scaled_by):
        scaled = (factor * W).requires_grad_()
        found.append(torch.autograd.grad((norms[0](x @ scaled.mT) * upstream).sum(), scaled)[0].norm())
    a, b = changed[:2]
    found.append(norms[0]((a + b) / 2) - (norms[0](a) + norms[0](b)) / 2)
    found.append(torch.nn.functional.linear(x, W * (variance + 1e-5).rsqrt()[:, None], mean))
    return found


def running_statistics(p: Any, run: Run) -> Any:
    """Mean and variance of every batch, running ones behind it, and 24 batches through both modes."""
    import torch

    mean, variance = torch.zeros(p.d_model), torch.ones(p.d_model)

    def batch() -> Any:
        common, own = run.randn(p.batch, 1, p.d_model), run.randn(p.batch, p.seq_len, p.d_model)
        return 2 + 3 * (p.text_share**0.5 * common + (1 - p.text_share) ** 0.5 * own)

    found, means = [], []
    for _ in range(p.norm_updates):
        x = batch()
        new, spread = x.mean((0, 1)), x.var((0, 1))
        mean, variance = mean.lerp(new, p.norm_momentum), variance.lerp(spread, p.norm_momentum)
        means += [new, mean]
    for _ in range(24):
        x = batch()
        outs = _standardized(x, (0, 1)), (x - mean) * (variance + 1e-5).rsqrt(), (x - 2) / 3
        found += [(outs[i] - outs[j]).square().mean().sqrt() for i, j in ((0, 1), (0, 2), (1, 2))]
    return torch.stack(means), found


def future_readout(p: Any, run: Run) -> Any:
    """Products of tokens in float64, raw and normalized, and the best prediction of the last; five more sizes."""
    import torch

    x = run.randn(p.n_batches, p.batch, p.seq_len, p.d_model)
    tried = [x, _standardized(x, (1, 2))]
    for b in (1, 2, 4, 8, 16):
        tried.append(_standardized(run.randn(max(4, 32 // b), b, p.seq_len, p.d_model), (1, 2)))
    found = []
    for numbers in tried:
        for half in numbers.chunk(2):
            tokens = half.double().transpose(0, 2).flatten(1)
            products = tokens @ tokens.mT
            found.append(torch.linalg.pinv(products[:-1, :-1], hermitian=True) @ products[:-1, -1])
    return found


def text_resemblance(p: Any, run: Run) -> Any:
    """The language model on the texts, its stream built up again, and variances between and within texts."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    from engine import language_model as model

    weights = model.load_weights(run.device, run.dtype)
    tokens = torch.randint(model.N_TOKENS, (p.n_texts, p.seq_len), generator=run.generator)
    found = []
    with torch.inference_mode():
        trace = model.Trace()
        model.forward(weights, tokens, trace=trace)
        x = weights["embedding"][tokens]
        stream = [x]
        for layer, mixed in enumerate(trace.context):
            x = x + mixed.transpose(1, 2).flatten(2) @ weights[f"{layer}.W_o"].mT
            stream.append(x)
            normed = layer_norm(x, (x.shape[-1],), weights[f"{layer}.norm_2"])
            x = x + gelu(normed @ weights[f"{layer}.W_up"].mT) @ weights[f"{layer}.W_down"].mT
            stream.append(x)
        for x in stream:
            x = x.double()
            found += [x.mean(1).var(0), x.var(1).mean(0), x.flatten(0, 1).var(0)]
        found.append(x.norm(dim=-1))
    return found


def window_reach(p: Any, run: Run) -> Any:
    """Gradients of the last token behind each layer of random blocks, and behind two stacks of moving means."""
    import torch

    width, n = 12, p.seq_len
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    layers = [[run.randn(*shape).double() / shape[1] ** 0.5 for shape in shapes] for _ in range(p.n_layers)]
    at = torch.arange(n)
    back = at[:, None] - at
    hidden = (back < 0) | (back >= p.window)
    angles = at[:, None] * 10000.0 ** (-torch.arange(3) / 3)
    cos, sin = angles.cos().double(), angles.sin().double()

    def turn(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    x = text = run.randn(n, width).double().repeat(width, 1, 1).requires_grad_()
    found = []
    for depth, (W_q, W_k, W_v, W_o, W_up, W_down) in enumerate(layers):
        normed = torch.nn.functional.layer_norm(x, (width,))
        q, k, v = ((normed @ W.mT).unflatten(-1, (2, -1)).transpose(-3, -2) for W in (W_q, W_k, W_v))
        rows = torch.softmax((turn(q) @ turn(k).mT / 6**0.5).masked_fill(hidden, -torch.inf), -1)
        x = x + (rows @ v).transpose(-3, -2).flatten(-2) @ W_o.mT
        x = x + torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (width,)) @ W_up.mT) @ W_down.mT
        last = depth + 1 == p.n_layers
        found += torch.autograd.grad(x[:, -1].diagonal().sum(), text, retain_graph=not last)
    for skip in (0, 1):
        x = ones = torch.ones(n, 1, dtype=torch.float64, requires_grad=True)
        for _ in range(p.n_layers):
            x = skip * x + torch.softmax(torch.zeros(n, n).double().masked_fill(hidden, -torch.inf), -1) @ x
        found += torch.autograd.grad(x[-1].sum(), ones)
    return [x.norm(dim=-1) for x in found]


def ring_cache(p: Any, run: Run) -> Any:
    """One windowed pass over everything, then a token at a time against the slots."""
    import torch

    width, d_k, n, slots = 32, 16, p.seq_len, p.window + p.extra_slots
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    layers = [[run.randn(*shape).double() / shape[1] ** 0.5 for shape in shapes] for _ in range(p.n_layers)]
    text, _ = run.randn(n, width).double(), run.randn(n, width)

    def read(x: Any, start: int, rings: Any) -> Any:
        at = torch.arange(start, start + len(x))
        angles = at[:, None] * 10000.0 ** (-torch.arange(8).double() / 8)
        cos, sin = angles.cos(), angles.sin()

        def turn(x: Any) -> Any:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

        for (W_q, W_k, W_v, W_o, W_up, W_down), ring in zip(layers, rings, strict=True):
            normed = torch.nn.functional.layer_norm(x, (width,))
            q, k, v = ((normed @ W.mT).unflatten(-1, (2, d_k)).transpose(-3, -2) for W in (W_q, W_k, W_v))
            q, k, places = turn(q), turn(k), at
            if ring:
                keys, values, places = ring
                keys[:, at % slots], values[:, at % slots], places[at % slots] = k, v, at
                k, v = keys, values
            back = at[:, None] - places
            logits = (q @ k.mT / d_k**0.5).masked_fill((back < 0) | (back >= p.window) | (places < 0), -torch.inf)
            x = x + (torch.softmax(logits, -1) @ v).transpose(-3, -2).flatten(-2) @ W_o.mT
            x = x + torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (width,)) @ W_up.mT) @ W_down.mT
        return x

    def empty() -> Any:
        return torch.zeros(2, slots, d_k).double(), torch.zeros(2, slots, d_k).double(), torch.full((slots,), -1)

    rings = [empty() for _ in layers]
    wanted = read(text, 0, [None] * p.n_layers)
    return [(read(text[t : t + 1], t, rings) - wanted[t]).norm() for t in range(n)]


def window_costs(p: Any, run: Run) -> Any:
    """k and v of a layer without storage for both kinds of layer, at six lengths and in three stacks."""
    import torch

    from engine.model_shapes import SHAPES, weights

    shape = SHAPES[p.model]
    found = []
    for n in (p.seq_len, p.seq_len, *(2**m for m in range(10, 20, 2) for _ in range(3))):
        for window in (0, shape.window):
            x = torch.empty(1, n, shape.d_model, dtype=torch.bfloat16, device="meta")
            W = torch.empty(shape.d_model, shape.n_kv_heads * shape.d_k, dtype=torch.bfloat16, device="meta")
            found.append(sum((x @ W)[:, -window:].clone().nbytes for _ in range(2)))
    return found, [count * tensor.numel() for _, count, tensor in weights(shape, torch.bfloat16)]


def windowed_reading(p: Any, run: Run) -> Any:
    """Two passes of the language model over the same texts, with two masks."""
    import torch

    from engine import inputs, language_model

    weights = language_model.load_weights(run.device, run.dtype)
    tokens = inputs.draw_texts(run, "stories", p.n_texts, language_model.SEQ_LEN).tokens
    back = torch.arange(128)[:, None] - torch.arange(128)
    found = []
    for hidden in (back < 0, (back < 0) | (back >= p.window)):
        seen = []

        def edit(_: int, row: Any, hidden: Any = hidden, seen: Any = seen) -> Any:
            kept = row.masked_fill(hidden, 0)
            seen.append(kept.mean((0, 1)))
            return kept / kept.sum(-1, keepdim=True)

        with torch.inference_mode():
            token_logits = language_model.forward(weights, tokens, edit_weights=edit)
            found.append((language_model.token_losses(token_logits, tokens).mean(0), seen))
    return found


def cache_allocation(p: Any, run: Run) -> Any:
    """Lengths, and for each of four policies a number of tokens for each request and step.

    Who gets which slots is decided request by request, which tensor operations can't do.
    """
    import torch

    lengths = -torch.log1p(-run.rand(256, 2)) * torch.tensor([p.mean_prompt_tokens, p.mean_output_tokens]) + 0.5
    steps = torch.arange(p.serving_steps)[:, None]
    together = p.pool_slots // (p.mean_prompt_tokens + p.mean_output_tokens)
    held = []
    for _ in range(4):
        tokens = lengths[:together, 0] + steps % (lengths[:together, 1] + 1)
        held.append((tokens.sum(-1), (tokens / p.block_size).ceil().sum(-1)))
    return held


def paged_attention(p: Any, run: Run) -> Any:
    """Keys and values in blocks, walked twice, gathered once, averaged once, and in one piece, for four sequences."""
    import torch

    lengths = (1 + run.rand(p.batch) * p.longest_sequence).long().tolist()
    n_blocks = sum(-(-n // p.block_size) for n in lengths)
    keys, values = (run.randn(n_blocks, p.n_kv_heads, p.block_size, p.d_k).double() for _ in range(2))
    order, found = torch.randperm(n_blocks, generator=run.generator).tolist(), []
    for length in lengths[:4]:
        table = [order.pop() for _ in range(-(-length // p.block_size))]
        q = run.randn(p.n_kv_heads, 1, p.d_k).double() * p.d_k**-0.5
        k, v = (x[table].transpose(0, 1).flatten(1, 2)[:, :length] for x in (keys, values))
        found += [torch.softmax(q @ k.mT, -1) @ v for _ in range(2)]
        for _ in range(4):
            m, total, out = q[..., 0] - float("inf"), q.new_zeros(p.n_kv_heads, 1), q.new_zeros(q.shape)
            for block in table:
                z = q @ keys[block].mT
                new = m.maximum(z.amax(-1))
                factor, powers = (m - new).exp(), (z - new[..., None]).exp()
                total, out = total * factor + powers.sum(-1), out * factor[..., None] + powers @ values[block]
                m = new
            found.append(out / total[..., None])
    return found


def shared_blocks(p: Any, run: Run) -> Any:
    """A number for each token of each branch, written one by one into slots for a key and a value, and read again."""
    import torch

    tokens = torch.arange(p.prompt_len + p.n_branches * p.new_tokens, dtype=torch.float32)
    slots = [tokens.new_zeros(p.n_branches, p.prompt_len + p.new_tokens) for _ in range(2)]
    for branch in range(p.n_branches):
        for x in slots:
            x[branch, : p.prompt_len] = tokens[: p.prompt_len]
    for step in range(p.new_tokens):
        for branch in range(p.n_branches):
            for x in slots:
                x[branch, p.prompt_len + step] = tokens[p.prompt_len + step * p.n_branches + branch]
    return [(x == tokens[: x.shape[1]]).sum() for x in slots]


def length_growth(p: Any, run: Run) -> Any:
    """A product with each matrix of a layer and with one pair, the pairs of all lengths drawn, and two searches."""
    import numpy as np
    import torch

    from engine.model_shapes import SHAPES, weights

    shape, found = SHAPES[p.model], []
    for name, _, weight in weights(shape, torch.bfloat16):
        if weight.ndim > 1 and "norm" not in name:
            found.append(
                torch.empty(1, weight.shape[-1], dtype=torch.bfloat16, device="meta") @ weight.flatten(0, -2).mT
            )
    q = torch.empty(shape.n_heads, 1, shape.d_k, device="meta")
    found.append(q @ q.mT @ q)
    lengths = 2 ** np.arange(9, 22)
    return found, np.outer(np.arange(1, 9), lengths * lengths), [lengths.sum() for _ in range(2 * 22)]


def length_times(p: Any, run: Run) -> Any:
    """Three ways of attention and six products with weights at six lengths, eight times each."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    d, found = p.n_heads * p.d_k, []
    square, up = torch.ones(d, d), torch.ones(4 * d, d)
    for n in (p.seq_len // 2**part for part in range(6)):
        q = torch.arange(p.n_heads * n * p.d_k, dtype=torch.float32).sin_().view(p.n_heads, n, p.d_k)
        x, hidden = q.reshape(n, d), torch.ones(n, 4 * d)
        for _ in range(13):
            found.append(torch.softmax(q @ q.mT * p.d_k**-0.5, -1) @ q)
            found.append([torch.softmax(rows @ q.mT * p.d_k**-0.5, -1) @ q for rows in q.split(p.q_tile, 1)])
            found.append(scaled_dot_product_attention(q[None], q[None], q[None]))
            found.append([*(x @ square for _ in range(4)), x @ up.mT, hidden @ up])
        found = found[-4:]
    return found


def mixing_layers(p: Any, run: Run) -> Any:
    """A layer of each kind without storage at six lengths, and a signal through narrow ones at four."""
    import torch

    def empty(*shape: int) -> Any:
        return torch.empty(shape, device="meta")

    d, h, found = p.d_model, p.n_heads, []
    W, W_4 = empty(d, d), empty(d, 4 * d)
    for n in (16, 128, 1024, 8192):
        q, one, x = empty(h, n, d // h), empty(1, d), empty(n, d)
        window = q[..., None, :].expand(-1, -1, p.window, -1)
        found += [q @ q.mT @ q, q @ (q.mT @ q), q[..., None, :] @ window.mT @ window]
        found += [one @ W, one @ W, one @ W_4, one @ W_4, *(x @ W for _ in range(2 * p.conv_taps))]
    for n in (4, 16, 64, p.seq_len):
        x, W = torch.zeros(n, 4), torch.ones(4, 4)
        for _ in range(2):
            state = x[:1]
            for row in x.split(1):
                state = torch.tanh(row @ W + state @ W)
        for _ in range(n // (p.conv_taps - 1)):
            x = sum(x.roll(tap, 0) @ W for tap in range(p.conv_taps))
        found.append((state, x))


def running_sums(p: Any, run: Run) -> Any:
    """Draw the steps, add them in four ways, each rounded where it is stored; one addition to a table of numbers."""
    import torch

    steps = p.step_mean * (1 + p.step_noise * run.randn(p.n_stores, p.n_kept_numbers))
    chances = run.rand(p.n_stores, p.n_kept_numbers)
    nearest = stochastic = compensated = kept = torch.full((p.n_kept_numbers,), p.start_value)
    rest, spacing = torch.zeros(p.n_kept_numbers), 2.0**-7
    for step, chance in zip(steps, chances, strict=True):
        nearest = (nearest + step).bfloat16().float()
        stochastic = ((stochastic + step) / spacing + chance).floor() * spacing
        wanted = compensated + (step + rest)
        compensated = wanted.bfloat16().float()
        rest = (wanted - compensated).bfloat16().float()
        kept = kept + step
    probes = (1 + torch.arange(512) / 512) * (1 + 2.0 ** torch.arange(-14, -5, 0.25)[:, None])
    return nearest, stochastic, compensated, kept, probes.bfloat16() == 1, probes.half() == 1


def number_formats(p: Any, run: Run) -> Any:
    """Numbers of every power of two, put into four formats and read again."""
    import torch

    x = 2.0 ** torch.arange(-32, 25)[:, None] * (1 + run.rand(57, p.n_drawn_values))
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        found.append(((x.to(dtype).double() - x) / x).square().mean(1).sqrt())
    return found


def moment_formats(p: Any, run: Run) -> Any:
    """Two running means in three formats, and the steps they make."""
    import torch

    g = p.gradient_std * run.randn(p.n_adam_steps, p.n_kept_numbers)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        m = v = torch.zeros(p.n_kept_numbers)
        for n in range(p.n_adam_steps):
            m = 0.9 * m + 0.1 * g[n]
            v = (p.beta_2 * v + (1 - p.beta_2) * g[n] ** 2).to(dtype).float()
            found.append((m, v))
    return found


def gradient_range(p: Any, run: Run) -> Any:
    """The language model forward and back in two formats, and a histogram."""
    import torch

    from engine import inputs, language_model

    tokens = inputs.draw_texts(run, p.source, p.n_texts, p.seq_len).tokens
    found = []
    for dtype in (torch.float16, torch.float32):
        weights = {name: w.to(dtype).requires_grad_() for name, w in language_model.load_weights().items()}
        logits = language_model.forward(weights, tokens)
        loss = language_model.token_losses(logits.float(), tokens).sum() / p.averaged_tokens
        gradients = torch.autograd.grad(loss, [*weights.values(), logits])
        found += [torch.cat([g.flatten().float() for g in gradients]), gradients[-1].float().abs().log2().histc(53)]
    return found


def autocast_types(p: Any, run: Run) -> Any:
    """Eleven operations on two types, and a block forward and back three times."""
    import torch
    from torch.nn import functional as F

    x, target, found = torch.ones(8, 8), torch.zeros(8, dtype=torch.int64), []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for y in (x, x.bfloat16()):
            found += [F.linear(y, x), y @ y, y.softmax(-1), F.layer_norm(y, (8,)), F.rms_norm(y, (8,)), F.gelu(y)]
            found += [y.exp(), y.sum(-1), y + y, y + x, F.cross_entropy(y, target)]
    n = p.d_model
    shapes = ((3 * n, n), (n, n), (4 * n, n), (n, 4 * n))
    drawn = [run.randn(*shape) / shape[1] ** 0.5 for shape in shapes]
    x, target = run.randn(p.batch, p.seq_len, n), run.randn(p.batch, p.seq_len, n)
    for dtype, cast in ((torch.float32, True), (torch.bfloat16, False), (torch.float32, False)):
        W_qkv, W_o, W_up, W_down = (W.to(dtype, copy=True).requires_grad_() for W in drawn)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = x.to(dtype)
            qkv = (F.layer_norm(y, (n,)) @ W_qkv.mT).unflatten(-1, (3, p.n_heads, -1)).transpose(1, 3)
            q, k, v = qkv.unbind(2)
            y = y + ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2) @ W_o.mT
            y = y + F.gelu(F.layer_norm(y, (n,)) @ W_up.mT) @ W_down.mT
            loss = F.mse_loss(y.float(), target)
        found += torch.autograd.grad(loss, (W_qkv, W_o, W_up, W_down))
    return found


def encoder_decoder_costs(p: Any, run: Run) -> Any:
    """The matrices of both layers and the tables on shapes, and two products for each step of both models."""
    import torch
    from torch.utils.flop_counter import flop_registry

    d, shapes = p.d_model, [*[(p.d_model, p.d_model)] * 8, (p.d_ff, p.d_model), (p.d_model, p.d_ff)]
    numbers = sum(torch.empty(shape, device="meta").numel() for shape in [*shapes, *shapes[4:], (p.vocabulary, d)])
    q = torch.empty(1, 1, d, device="meta")
    flop = 0
    for keys in range(1, p.target_len + 1):
        for kv_len in (keys, p.source_len + keys):
            k = q.new_empty(1, d, kv_len)
            flop += flop_registry[torch.ops.aten.bmm](q, k, out_val=torch.bmm(q, k))
    return numbers, flop


def encoder_decoder_reach(p: Any, run: Run) -> Any:
    """Both stacks on a copy for each token, on one sequence three times, and a stack of layers twice."""
    import torch
    from torch.nn import functional as F

    d, n = p.d_model, p.source_len + p.target_len

    def layer(attentions: int) -> list[Any]:
        shapes = [*[(d, d)] * (4 * attentions), (4 * d, d), (d, 4 * d)]
        return [run.randn(*shape) * shape[1] ** -0.5 for shape in shapes]

    encoder, decoder = ([layer(k) for _ in range(p.n_layers)] for k in (1, 2))

    def attend(W: list[Any], x: Any, source: Any, mask: Any) -> Any:
        q, k, v = (
            (y @ m.mT).unflatten(-1, (p.n_heads, -1)).transpose(-3, -2)
            for m, y in zip(W[:3], (x, source, source), strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.layer_norm(x + out.transpose(-3, -2).flatten(-2) @ W[3].mT, (d,))

    def stack(layers: list[Any], x: Any, memory: Any = None, mask: Any = None) -> Any:
        for W in layers:
            x = attend(W, x, x, mask)
            x = x if memory is None else attend(W[4:], x, memory, None)
            x = F.layer_norm(x + (x @ W[-2].mT).relu() @ W[-1].mT, (d,))
        return x

    tokens, others, source = run.randn(n, d), run.randn(n, d), run.randn(p.source_len, d)
    copies = tokens.repeat(n + 1, 1, 1)
    copies[range(n), range(n)] = others
    causal, whole = (torch.ones(length, length, dtype=torch.bool).tril() for length in (p.target_len, n))
    memory = stack(encoder, copies[:, : p.source_len])
    states = stack(decoder, copies[:, p.source_len :], memory, causal)
    target = tokens[p.source_len :]
    found = [stack(decoder, target, stack(encoder, source), causal) for _ in range(3)]
    return [states, *found, *(stack(decoder, tokens, None, whole) for _ in range(2))]


def masked_rank(p: Any, run: Run) -> Any:
    """Weights under three masks in float64, their singular values and those of what they make of v."""
    import torch

    n, found = p.seq_len, []
    q, k, v = (run.randn(n, width).double() for width in (p.d_k, p.d_k, p.d_v))
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    prefix = causal | (torch.arange(n) < p.prefix_tokens)
    for keep in (causal, prefix, torch.ones_like(causal)):
        weights = (q @ k.mT * p.d_k**-0.5).masked_fill(~keep, -torch.inf).softmax(-1)
        found += [torch.linalg.svdvals(weights), torch.linalg.svdvals(weights @ v)]
    return found, torch.linalg.svdvals(weights + torch.eye(n))


def training_targets(p: Any, run: Run) -> Any:
    """Masks of four objectives with their sums, and a small stack forward and back under the causal one."""
    import torch
    from torch.nn.functional import cross_entropy, rms_norm, silu

    n, d = p.raw_tokens, 16
    order = run.rand(3, n).argsort(-1)
    masks = [torch.ones(n, n, dtype=torch.bool).tril() | (torch.arange(n) < prefix) for prefix in (1, n // 2, n, n)]
    seen = [keep[:, order[0] >= 0].sum(-1) / n for keep in masks]
    x = vectors = run.randn(1, n, d).requires_grad_()
    for _ in range(p.n_layers):
        W_q, W_k, W_v, W_o = run.randn(4, d, d) / d**0.5
        W_up, W_gate, W_down = run.randn(2 * d, d) / 4, run.randn(2 * d, d) / 4, run.randn(d, 2 * d) / 6
        h = rms_norm(x, (d,))
        q, k, v = ((h @ W.mT).unflatten(-1, (2, -1)).transpose(1, 2) for W in (W_q, W_k, W_v))
        weights = (q @ k.mT * 8**-0.5).masked_fill(~masks[0], -torch.inf).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).flatten(2) @ W_o.mT
        h = rms_norm(x, (d,))
        x = x + (silu(h @ W_gate.mT) * (h @ W_up.mT)) @ W_down.mT
    loss = cross_entropy((rms_norm(x, (d,)) @ run.randn(32, d).mT)[0], (run.rand(n) * 32).long())
    return seen, torch.autograd.grad(loss, vectors)


def conversation_reuse(p: Any, run: Run) -> Any:
    """A pass over the text so far at every turn, three times: a mask takes as long as another."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    from engine.positions import rotary_angles, rotate

    d, length = p.d_model, p.turn_len + p.answer_len
    shapes = ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))
    layers = [[run.randn(*shape).double() / shape[1] ** 0.5 for shape in shapes] for _ in range(p.n_layers)]
    text, stored = run.randn(p.n_turns * length, d).double(), []
    for _ in range(3):
        for turn in range(1, p.n_turns + 1):
            x, n = text[: turn * length], turn * length
            angles, hidden = rotary_angles(torch.arange(n), d // 2), torch.ones(n, n, dtype=torch.bool).triu(1)
            for W_qkv, W_o, W_up, W_down in layers:
                q, k, v = (layer_norm(x, (d,)) @ W_qkv.mT).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)
                q, k = rotate(q, angles), rotate(k, angles)
                stored.append((k, v))
                weights = (q @ k.mT * (d // 2) ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
                x = x + (weights @ v).transpose(0, 1).flatten(1) @ W_o.mT
                x = x + gelu(layer_norm(x, (d,)) @ W_up.mT) @ W_down.mT
    return stored


def norm_offset(p: Any, run: Run) -> Any:
    """Two norms of the tokens and at nine offsets, a gradient, Jacobians of some tokens and their singular values."""
    import torch

    z, upstream = run.randn(p.normed_tokens, p.d_model), run.randn(p.normed_tokens, p.d_model)
    norms = [lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), lambda x: _standardized(x, (-1,))]
    x = (p.token_offset + p.token_std * z).requires_grad_()
    found = [torch.autograd.grad((norms[0](x) * upstream).sum(), x)]
    for norm in norms:
        found.append(norm(x).square().mean())
        for ratio in range(9):
            out = norm(z + ratio)
            found.append((out - out.mean(-1, keepdim=True)).square().mean())
        copies = x[:4, None, :64].repeat(1, min(64, p.d_model), 1)
        (rows,) = torch.autograd.grad(norm(copies).diagonal(dim1=-2, dim2=-1).sum(), copies)
        found.append(torch.linalg.svdvals(rows.cpu().double()))
    return found


def norm_precision(p: Any, run: Run) -> Any:
    """Tokens normalized in float16, and of two of them 21 sizes in two formats, each in the format and in float32."""
    import torch

    def normed(x: Any, inner: Any) -> Any:
        return (inner * (inner.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    z = run.randn(p.normed_tokens, p.d_model)
    gain = 1 + 0.3 * run.randn(p.d_model)
    x = (p.token_std * z).half()
    found = [normed(x, x).double().square().mean(), (normed(x, x) * gain.half()).double() - normed(x, x.double())]
    for power in range(21):
        y = 10.0 ** (power / 2 - 6) * z[:2, :256]
        found += [normed(y, y).square().mean(), (y / (y.square().mean(-1, keepdim=True).sqrt() + 1e-6)).square().mean()]
        for dtype in (torch.float16, torch.bfloat16):
            low = y.to(dtype)
            for inner in (low, low.float()):
                out, exact = normed(low, inner) * gain[:256].to(dtype), normed(low, low.double()).double()
                found += [((out.double() - exact).square().mean() / exact.square().mean()).sqrt()]
    return found


def norm_rewriting(p: Any, run: Run) -> Any:
    """The language model on the texts in five forms, and the loss of each."""
    import torch

    from engine import language_model as model

    weights = model.load_weights(run.device, run.dtype)
    tokens = torch.randint(model.N_TOKENS, (p.n_texts, p.seq_len), generator=run.generator)
    with torch.inference_mode():
        found = [model.forward_fast(weights, tokens) for _ in range(5)]
        return [model.token_losses(logits, tokens).mean() for logits in found]


def norm_costs(p: Any, run: Run) -> Any:
    """Two norms on tensors without storage, as steps and as PyTorch's calls, and a product."""
    import torch

    x = torch.empty(p.normed_tokens, p.d_model, device="meta", dtype=torch.bfloat16)
    gain, W = x.new_empty(p.d_model), x.new_empty(p.d_model, 3 * p.d_model)
    centred = x - x.mean(-1, keepdim=True)
    found = [centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain]
    found.append(x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain)
    found.append(torch.nn.functional.layer_norm(x, x.shape[-1:], gain))
    return [*found, torch.nn.functional.rms_norm(x, x.shape[-1:], gain), x @ W]


def _wired(W: Any, x: Any, steps: Any, carried: Any, norm: bool = False, keep: Any = None) -> Any:
    """A stack of attention (a) and feed-forward networks (f), what is carried of x times x added."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    for layer, kind in steps:
        read = layer_norm(x, x.shape[-1:]) if norm else x
        q, k, v, o, up, down = (w[..., layer, None, :, :] for w in W)
        if kind == "a":
            logits = (read @ q) @ (read @ k).mT * x.shape[-1] ** -0.5
            logits = logits if keep is None else logits.masked_fill(~keep, -torch.inf)
            x = carried * x + logits.softmax(-1) @ (read @ v) @ o
        else:
            x = carried * x + gelu(read @ up) @ down
    return x


def _drawn_stack(run: Run, n_layers: int, d: int) -> Any:
    shapes = ((d, d),) * 4 + ((d, 4 * d), (4 * d, d))
    return [run.randn(n_layers, *shape) / shape[0] ** 0.5 for shape in shapes]


def depth_signal(p: Any, run: Run) -> Any:
    """Three stacks side by side, forward and back, with the gradient at every layer."""
    import torch

    W = [w.repeat(3, 1, 1, 1) for w in _drawn_stack(run, p.n_layers, p.d_model)]
    carried = torch.tensor([0.0, 1.0, 1.0]).view(3, 1, 1, 1)
    xs = [run.randn(3, 1, p.seq_len, p.d_model).requires_grad_()]
    for layer in range(p.n_layers):
        xs += [_wired(W, xs[-1], [(layer, "a")], carried)]
        xs += [_wired(W, xs[-1], [(layer, "f")], carried)]
    return torch.autograd.grad(xs[-1], xs[:-1], run.randn(*xs[-1].shape)), [x.square().mean((1, 2, 3)) for x in xs]


def token_collapse(p: Any, run: Run) -> Any:
    """Six stacks one after another, in float64, and the spread of the tokens after each layer."""
    W = [w.double() for w in _drawn_stack(run, p.n_layers, p.d_model)]
    x, found = run.randn(1, p.seq_len, p.d_model).double(), []
    for kinds, carried, norm in (("a", 0, 0), ("a", 0, 1), ("af", 0, 0), ("a", 1, 0), ("af", 1, 1), ("af", 1, 1)):
        y = x
        for layer in range(p.n_layers):
            y = _wired(W, y, [(layer, kind) for kind in kinds], carried, bool(norm))
            found.append((y - y.mean(-2, keepdim=True)).norm() / y.norm())
    return found


def path_spectrum(p: Any, run: Run) -> Any:
    """The Jacobian of every layer for three stacks, multiplied, with all singular values."""
    import torch

    n = p.seq_len * p.d_model
    W = [w.repeat(3, 1, 1, 1) for w in _drawn_stack(run, p.n_layers, p.d_model)]
    carried = torch.tensor([0.0, 1.0, 1.0]).view(3, 1, 1, 1)
    x = run.randn(1, 1, p.seq_len, p.d_model).repeat(3, n, 1, 1)
    product, found = torch.eye(n, dtype=torch.float64), []
    for layer in range(p.n_layers):
        x = x.detach().requires_grad_()
        y = _wired(W, x, [(layer, "a"), (layer, "f")], carried)
        (rows,) = torch.autograd.grad(y, x, torch.eye(n).view(1, n, p.seq_len, p.d_model).repeat(3, 1, 1, 1))
        product = rows.flatten(2).double() @ product
        found.append(torch.linalg.svdvals(product))
        x = y
    return found


def stream_parts(p: Any, run: Run) -> Any:
    """One pass over the texts and six without a branch, each from the start, with 13 losses on the way."""
    from engine import inputs, language_model

    weights = language_model.load_weights()
    tokens = inputs.draw_texts(run, "stories", p.n_texts, p.seq_len).tokens
    found = []
    for _ in range(7):
        token_logits = language_model.forward_fast(weights, tokens)
        found += [language_model.token_losses(token_logits, tokens).sum()] * 2
    return found


def joined_streams(p: Any, run: Run) -> Any:
    """Two stacks of six matrices a layer, without storage."""
    import torch

    d, count = p.d_model, 0
    for grows in (0, 1):
        for layer in range(p.n_layers):
            one, two = (1 + grows * 2 * layer) * d, (1 + grows * (2 * layer + 1)) * d
            for rows, columns in (*((one, d),) * 3, (d, d), (two, 4 * d), (4 * d, d)):
                count += torch.empty(rows, columns, device="meta").numel()
    return count


def sublayer_linearity(p: Any, run: Run) -> Any:
    """An attention layer and an FFN in float64: forward on x, y and both, one backward pass a copy, singular values."""
    import torch

    n, d, h = p.seq_len, p.d_model, p.n_heads
    basis = run.randn(p.token_rank, d).double()
    x, y = (run.randn(n, p.token_rank).double() @ basis for _ in range(2))
    W_q, W_k, W_v = (run.randn(h, d // h, d).double() / d**0.5 for _ in range(3))
    W_o, W_up = run.randn(h, d, d // h).double() / d**0.5, run.randn(p.d_ff, d).double() / d**0.5
    W_down = run.randn(d, p.d_ff).double() / p.d_ff**0.5

    def attend(x: Any) -> Any:
        x = x.unsqueeze(-3)
        weights = torch.softmax((x @ W_q.mT) @ (x @ W_k.mT).mT * (d // h) ** -0.5, -1)
        return (weights @ (x @ W_v.mT) @ W_o.mT).sum(-3)

    def feed_forward(x: Any) -> Any:
        return torch.nn.functional.gelu(x @ W_up.mT) @ W_down.mT

    found = []
    for layer in (attend, feed_forward):
        copies = x.expand(n, -1, -1).clone().requires_grad_()
        found += torch.autograd.grad(layer(copies).diagonal(dim1=0, dim2=1).sum(), copies)
        out = layer(x)
        found += [torch.linalg.svdvals(out), (layer(x + y) - out - layer(y)).norm()]
    return found


def fact_memory(p: Any, run: Run) -> Any:
    """Two least-squares fits for each number of facts, one lookup, and products with all answers."""
    import torch

    keys, answers = run.randn(512, p.d_model).double(), run.randn(p.n_answers, p.d_model).double()
    right = torch.randint(p.n_answers, (512,), generator=run.generator)
    hidden = torch.nn.functional.gelu(keys @ run.randn(p.d_ff, p.d_model).double().mT)
    found = []
    for n in sorted({8, 16, 32, 64, 128, 256, 512, p.n_facts}):
        wanted = answers[right[:n]]
        stored = keys[: min(n, p.d_ff)]
        for x in (keys[:n], hidden[:n]):
            found.append((x @ (torch.linalg.pinv(x) @ wanted) @ answers.mT).argmax(-1))
        found.append((torch.relu(keys[:n] @ stored.mT) @ wanted[: len(stored)] @ answers.mT).argmax(-1))
    return found


def sublayer_ablation(p: Any, run: Run) -> Any:
    """The language model over texts for the means, as it is, and with eight sets of sublayers replaced."""
    import torch

    from engine import language_model

    weights = language_model.load_weights(run.device, run.dtype)
    with torch.inference_mode():
        language_model.forward(weights, torch.randint(96, (8, p.seq_len), generator=run.generator))
        tokens = torch.randint(96, (p.n_texts, p.seq_len), generator=run.generator)
        return [language_model.token_losses(language_model.forward(weights, tokens), tokens).mean() for _ in range(9)]


def neuron_contexts(p: Any, run: Run) -> Any:
    """The language model over all texts; for each layer's units the sums by character, their squares, and the top."""
    import torch

    from engine import language_model

    weights = language_model.load_weights(run.device, run.dtype)
    tokens = torch.randint(96, (p.n_texts, 96), generator=run.generator)
    kept = []
    with torch.inference_mode():
        language_model.forward(weights, tokens, edit_hidden=lambda _, h: kept.append(h.flatten(0, 1)) or h)
        here = torch.nn.functional.one_hot(tokens.flatten(), 96).to(run.dtype)
        sums = [((here.mT @ (h - h.mean(0))).square().sum(0), h.var(0)) for h in kept]
        return sums, kept[p.layer][:, p.hidden_unit].topk(10)


def teacher_forcing(p: Any, run: Run) -> Any:
    """A decoder on a sequence and on each of its prefixes, forward and back; and back once for each position."""
    import torch
    from torch.nn.functional import cross_entropy, gelu, layer_norm

    d, n = p.d_model, p.seq_len
    leaves = [run.randn(16, d).double(), run.randn(n, d).double()]
    shapes = ((d, d), (d, d), (d, d), (d, d), (4 * d, d), (d, 4 * d))
    leaves += [run.randn(*shape).double() / shape[1] ** 0.5 for _ in range(p.n_layers) for shape in shapes]
    for leaf in leaves:
        leaf.requires_grad_()
    tokens = torch.randint(16, (n + 1,), generator=run.generator)

    def read(x: Any) -> Any:
        for i in range(2, len(leaves), 6):
            W_q, W_k, W_v, W_o, W_up, W_down = leaves[i : i + 6]
            h = layer_norm(x, (d,))
            q, k, v = ((h @ W.mT).unflatten(-1, (p.n_heads, -1)).transpose(0, 1) for W in (W_q, W_k, W_v))
            hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            weights = torch.softmax((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf), -1)
            x = x + (weights @ v).transpose(0, 1).flatten(1) @ W_o.mT
            x = x + gelu(layer_norm(x, (d,)) @ W_up.mT) @ W_down.mT
        return layer_norm(x, (d,)) @ leaves[0].mT / d**0.5

    x = leaves[0][tokens[:-1]] + leaves[1]
    losses = cross_entropy(read(x), tokens[1:], reduction="none")
    found = [*torch.autograd.grad(losses.sum(), leaves, retain_graph=True)]
    found += [torch.autograd.grad(losses[t], x, retain_graph=True)[0] for t in range(n - 1)]
    for length in range(1, n + 1):
        logits = read(leaves[0][tokens[:length]] + leaves[1][:length])
        found += torch.autograd.grad(cross_entropy(logits[-1:], tokens[length : length + 1]), leaves)
    return found


def dependent_operations(p: Any, run: Run) -> Any:
    """Three kinds of layer on all tokens and on one after another, watched; one of them once more, unwatched."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    from engine.watching import watching

    d, n = 32, p.seq_len
    W = [run.randn(d, d) / d**0.5 for _ in range(8)]
    W_up, W_down, E = run.randn(4 * d, d) / d**0.5, run.randn(d, 4 * d) / (4 * d) ** 0.5, run.randn(16, d)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    found, alive = [], []

    def attention(x: Any, cache: Any) -> Any:
        h = layer_norm(x, (d,))
        q, k, v = ((h @ w).unflatten(-1, (2, -1)).transpose(0, 1) for w in W[:3])
        k, v = torch.cat((cache[0], k), 1), torch.cat((cache[1], v), 1)
        cache[:] = k, v
        logits = (q @ k.mT * (d / 2) ** -0.5).masked_fill(hidden[k.shape[1] - len(x) : k.shape[1], : k.shape[1]], -9.0)
        x = x + (torch.softmax(logits, -1) @ v).transpose(0, 1).flatten(1) @ W[3]
        return x + gelu(layer_norm(x, (d,)) @ W_up.mT) @ W_down.mT

    def recurrence(x: Any, state: Any) -> Any:
        rows = []
        for row in x.split(1):
            state[0] = (layer_norm(row, (d,)) @ W[4] + state[0] @ W[5]).tanh()
            rows.append(row + state[0])
        return torch.cat(rows)

    def scan(x: Any, state: Any) -> Any:
        h = layer_norm(x, (d,))
        a, b = (h @ W[6]).sigmoid(), h @ W[7]
        reach = 1
        while reach < len(x):
            b = a * torch.cat((torch.zeros_like(b[:reach]), b[:-reach])) + b
            a, reach = a * torch.cat((torch.ones_like(a[:reach]), a[:-reach])), 2 * reach
        states = a * state[0] + b
        state[0] = states[-1:]
        return x + states

    def run_all(layer: Any, known: bool) -> None:
        state = [torch.zeros(2, 0, d // 2)] * 2 if layer is attention else [torch.zeros(1, d)]
        tokens = torch.arange(n) % 16 if known else torch.zeros(1, dtype=torch.int64)
        for _ in range(1 if known else n):
            x = E[tokens]
            for _ in range(p.n_layers):
                x = layer(x, state if p.n_layers == 1 else list(state))
            logits = layer_norm(x, (d,)) @ E.mT
            tokens = logits[-1:].argmax(-1)
            found.append(logits)

    with torch.no_grad():
        for layer in (attention, recurrence, scan):
            for known in (True, False):
                with watching(lambda func, args, kwargs, out: alive.append(out)):
                    run_all(layer, known)
        run_all(attention, True)
        run_all(attention, False)
    return found


def error_in_prefix(p: Any, run: Run) -> Any:
    """The beginnings, two branches behind each, and one token after another, through the model."""
    import torch

    from engine import inputs, language_model

    weights = language_model.load_weights(run.device, run.dtype)
    length = 2 * p.string_len + 4
    tokens = inputs.draw_texts(run, "repeats", p.n_texts, length + p.wrong_in_a_row + p.places_after).tokens
    with torch.inference_mode():
        found = [language_model.forward_fast(weights, tokens[:, :length])]
        found += [language_model.forward_fast(weights, tokens[:, length:]) for _ in range(2)]
        found += [language_model.forward_fast(weights, tokens[:, :1]) for _ in range(p.places_after)]
    return found


def logit_growth(p: Any, run: Run) -> Any:
    """The chosen form once, four forms at nine weight gains, two again for the rows."""
    import torch

    unit = [x / x.square().mean(-1, keepdim=True).sqrt() for x in (run.randn(64, 128), run.randn(p.kv_len, 128))]
    q, k = (x @ (run.randn(128, p.d_k) * 128**-0.5) for x in unit)
    found = []
    for _ in range(4 * 9 + 3):
        logits = q @ k.mT * p.d_k**-0.5
        weights = torch.softmax(logits, -1)
        found += [logits.abs().max(), torch.special.xlogy(weights, weights).sum(-1)]
    return found


def gain_bounds(p: Any, run: Run) -> Any:
    """Singular values of the 2 x 2 blocks of all pairs at forty distances, and two products of random vectors."""
    import torch

    first = torch.full((p.d_k // 2,), 1 + p.channel_gain_std, dtype=torch.float64)
    gain_q = torch.cat((first, 1 / first))
    gain_k = 1 / gain_q
    angles = torch.arange(40)[:, None] * p.base ** -(torch.arange(0, p.d_k, 2, dtype=torch.float64) / p.d_k)
    turned = torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), -1).unflatten(-1, (2, 2))
    blocks = gain_q.view(2, -1).mT[:, :, None] * turned * gain_k.view(2, -1).mT[:, None]
    q, k = run.randn(64, p.d_k), run.randn(64, p.d_k)
    return torch.linalg.svdvals(blocks).amax(-1), (q @ k.mT).abs().max(), (q @ k.mT).abs().max()


def retrieval_ceiling(p: Any, run: Run) -> Any:
    """Random keys of one length, those of ten others for the table; log weights of the own keys."""
    import torch

    found = []
    for n in (p.kv_len, *(2**power for power in range(1, 11))):
        k = run.randn(n, p.d_k)
        k = k / k.norm(dim=-1, keepdim=True)
        found.append(torch.log_softmax(p.logits_limit * k[:64] @ k.mT, -1).diagonal().mean())
    return found


def norm_placement(p: Any, run: Run) -> Any:
    """Five stacks, forward and backward, one step along the sign of the gradients, forward again; sums by layer."""
    import torch
    from torch.nn.functional import cross_entropy, gelu, layer_norm

    d, width, n = p.d_model, 4 * p.d_model, p.n_layers
    shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (d, width), "down": (width, d)}
    drawn = {name: run.randn(n, *shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    W_u, x0 = run.randn(d, 16) / d**0.5, run.randn(2, p.seq_len, d)
    target = (run.rand(2, p.seq_len) * 16).long().clamp_max(15).flatten()
    alpha, beta = (2 * n) ** 0.25, (8 * n) ** -0.25
    found = []

    def norm(x: Any) -> Any:
        return layer_norm(x, (d,))

    def forward(layers: list[dict[str, Any]], before: bool, behind: bool, after: bool, skip: float) -> list[Any]:
        x, kept = x0, []
        for W in layers:
            y = norm(x) if before else x
            q, k, v = ((y @ W[name]).unflatten(-1, (2, -1)).transpose(1, 2) for name in "qkv")
            f = (torch.softmax(q @ k.mT * (d // 2) ** -0.5, -1) @ v).transpose(1, 2).flatten(2) @ W["o"]
            x = skip * x + (norm(f) if behind else f)
            x = norm(x) if after else x
            y = norm(x) if before else x
            f = gelu(y @ W["up"]) @ W["down"]
            share = f.square().mean() / x.square().mean()
            x = skip * x + (norm(f) if behind else f)
            x = norm(x) if after else x
            kept.append((x, x.square().mean(), share, norm(x)))
        return kept

    for before, behind, after, skip in (
        (True, False, False, 1.0),
        (False, False, True, 1.0),
        (False, True, False, 1.0),
        (True, True, False, 1.0),
        (False, False, True, alpha),
    ):
        small = beta if skip > 1 else 1.0
        layers = [
            {name: (W[i] * (1.0 if name in "qk" else small)).requires_grad_() for name, W in drawn.items()}
            for i in range(n)
        ]
        start = forward(layers, before, behind, after, skip)
        weights = [W for layer in layers for W in layer.values()]
        gradients = torch.autograd.grad(cross_entropy((norm(start[-1][0]) @ W_u).flatten(0, 1), target), weights)
        with torch.no_grad():
            stepped = iter([W - p.weight_step * g.sign() for W, g in zip(weights, gradients, strict=True)])
            moved = forward([{name: next(stepped) for name in layer} for layer in layers], before, behind, after, skip)
            found.append([(m[3] - s[3]).square().mean() for m, s in zip(moved, start, strict=True)])
            found.append([g.norm() for g in gradients[5::6]])
    return found
