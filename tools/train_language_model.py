"""Train the language model whose weights are in the repository: ``python -m tools.train_language_model``.

Writes the weights in 16 bits, the training curve and the settings into engine/trained. The seed decides the weights to
start from and all texts. The same machine gives the same model again; another may round otherwise, and then the curves
part after some hundred steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine import corpus, language_model
from engine.base import data_file

if TYPE_CHECKING:
    import torch

STORIES_SHARE = 0.4  # of each batch; the rest are repeated strings
HELD_OUT_SEED = 10**6  # no training seed is as high
N_HELD_OUT = 32  # texts of each kind
PERIOD = 24  # of the held-out strings


@dataclass(frozen=True)
class Settings:
    """How long and how fast; ``learning_rate`` is reached after ``warm_up`` steps and falls to a tenth by a cosine."""

    seed: int = 0
    steps: int = 4000
    batch: int = 32
    learning_rate: float = 3e-3
    warm_up: int = 200
    weight_decay: float = 0.05
    every: int = 100  # steps between two points of the curve

    def rate(self, step: int) -> float:
        """The learning rate at a step."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def batches(seed: int, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of tokens, and which of them can be known: of a random string all but its first time.

    Shapes: (batch, seq_len) and, for the tokens from the second on, (batch, seq_len - 1) of bool.
    """
    import torch

    n_stories = round(batch * STORIES_SHARE)
    told = corpus.stories(2 * seed, language_model.SEQ_LEN)
    again = corpus.repeats(2 * seed + 1, language_model.SEQ_LEN)
    while True:
        strings = list(itertools.islice(again, batch - n_stories))
        texts = [*itertools.islice(told, n_stories), *(text for text, _ in strings)]
        first = torch.tensor([0] * n_stories + [period for _, period in strings])
        known = torch.arange(1, language_model.SEQ_LEN) >= first[:, None]
        yield torch.tensor([corpus.encode(text) for text in texts]), known


def held_out() -> dict[str, torch.Tensor]:
    """Texts that no training saw: stories, and strings of PERIOD characters that come again and again."""
    import torch

    kinds = {
        "stories": corpus.stories(2 * HELD_OUT_SEED, language_model.SEQ_LEN),
        "repeats": (text for text, _ in corpus.repeats(2 * HELD_OUT_SEED + 1, language_model.SEQ_LEN, period=PERIOD)),
    }
    return {
        kind: torch.tensor([corpus.encode(text) for text in itertools.islice(texts, N_HELD_OUT)])
        for kind, texts in kinds.items()
    }


def evaluate(weights: language_model.Weights) -> dict[str, float]:
    """Held-out losses in nats a character; of the repeated strings the first time and the later ones apart."""
    import torch

    with torch.no_grad():
        losses = {
            kind: language_model.token_losses(language_model.forward_fast(weights, tokens), tokens)
            for kind, tokens in held_out().items()
        }
    return {
        "stories": losses["stories"].mean().item(),
        "first_time": losses["repeats"][:, : PERIOD - 1].mean().item(),
        "repeated": losses["repeats"][:, PERIOD:].mean().item(),
    }


def train(settings: Settings, report: Callable[[dict[str, float]], None]) -> dict[str, torch.Tensor]:
    """Train from the settings; a point of the curve is reported every ``settings.every`` steps and at the end."""
    import torch

    generator = torch.Generator().manual_seed(settings.seed)
    weights = {name: w.requires_grad_() for name, w in language_model.draw_weights(generator).items()}
    matrices = [w for w in weights.values() if w.ndim == 2]
    gains = [w for w in weights.values() if w.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
    )
    start = time.perf_counter()
    recent: list[float] = []
    for step, (tokens, known) in zip(range(settings.steps), batches(settings.seed, settings.batch), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        loss = language_model.token_losses(language_model.forward_fast(weights, tokens), tokens)[known].mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        if (step + 1) % settings.every == 0 or step + 1 == settings.steps:
            point = {"step": step + 1, "training_loss": sum(recent) / len(recent), "grad_norm": norm.item()}
            report(point | evaluate(weights) | {"seconds": time.perf_counter() - start})
            recent.clear()
    return {name: w.detach() for name, w in weights.items()}


def save(weights: dict[str, torch.Tensor], settings: Settings, curve: list[dict[str, float]], folder: Path) -> None:
    """Write model.npz (16 bits) and training.json (settings, curve, the losses of the rounded weights)."""
    import numpy as np
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "model.npz", **{name: w.half().numpy() for name, w in weights.items()})
    rounded = {name: w.half().float() for name, w in weights.items()}
    about = {
        "settings": asdict(settings),
        "tokens": settings.steps * settings.batch * language_model.SEQ_LEN,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "stored": {name: round(value, 4) for name, value in evaluate(rounded).items()},
        "curve": [{name: round(value, 4) for name, value in point.items()} for point in curve],
    }
    (folder / "training.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--out", type=Path, default=data_file(language_model.FILES[0]).parent)
    chosen = parser.parse_args(arguments)
    settings = Settings(seed=chosen.seed, steps=chosen.steps, learning_rate=chosen.learning_rate)
    torch.set_num_threads(1)  # the model is small, and so it comes out the same beside other work
    curve: list[dict[str, float]] = []

    def report(point: dict[str, float]) -> None:
        curve.append(point)
        print("  ".join(f"{name} {value:.4g}" for name, value in point.items()), flush=True)

    weights = train(settings, report)
    save(weights, settings, curve, chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
