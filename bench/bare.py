"""The tensor operations that an experiment can't do without, one function each, named after it; nothing is checked,
summed up or tabulated. ``bench/experiments.py`` compares.
"""

from __future__ import annotations

from typing import Any

from engine.base import Run


def qk_variance(p: Any, run: Run) -> Any:
    """Draw q and k, multiply, sum: one logit a pair; its four moments."""
    q, k = run.randn(p.n_pairs, p.d_k), run.randn(p.n_pairs, p.d_k)
    qk = (q * k).sum(-1) * p.d_k**-0.5
    return qk.mean(), qk.var(), qk.abs().max()
