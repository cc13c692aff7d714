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
