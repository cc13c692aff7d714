"""What layers with a sliding window keep: a ring of slots for the last tokens, and masks made from stored positions.

A window of W counts the query itself: at position t a query sees the keys at t - W + 1 to t. Token t has its place in
slot t mod n_slots, where it overwrites the one that stood there. Which key stands in which slot does not matter to
attention, as long as each key carries its own position and the mask asks for that and not for the slot.

Sources: mistral-code, README and ``one_file_ref.py`` (the rolling buffer).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

EMPTY = -1  # the position of a slot without a token


class Stored(NamedTuple):
    """What one layer holds. Shapes: keys, values (..., n_kv_heads, n_slots, d_k), positions (n_slots,)."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor


class RingCache:
    """Keys, values and positions of the last ``n_slots`` tokens of every layer, in memory that is laid out once.

    ``tokens_written``: by each layer so far, those that were taken back as well.
    """

    def __init__(self, n_layers: int, n_slots: int) -> None:
        self.n_slots = n_slots
        self.layers: list[Stored | None] = [None] * n_layers
        self._written = [0] * n_layers

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor | None = None
    ) -> None:
        """Put tokens into their slots, those of position mod n_slots unless given; of more than n_slots the last ones.

        Shapes: k, v (..., n_kv_heads, n_tokens, d_k), positions and slots (n_tokens,).
        """
        held = self.layers[layer]
        if held is None:
            keys, values = (x.new_zeros((*x.shape[:-2], self.n_slots, x.shape[-1])) for x in (k, v))
            held = self.layers[layer] = Stored(keys, values, positions.new_full((self.n_slots,), EMPTY))
        slots = (positions % self.n_slots if slots is None else slots)[-self.n_slots :]
        held.keys[..., slots, :] = k[..., -self.n_slots :, :]
        held.values[..., slots, :] = v[..., -self.n_slots :, :]
        held.positions[slots] = positions[-self.n_slots :]
        self._written[layer] += len(slots)

    def stored(self, layer: int) -> Stored | None:
        """All slots of a layer, empty ones among them; None before the first write."""
        return self.layers[layer]

    def forget_from(self, position: int) -> None:
        """Take back all tokens from that position on. What they overwrote is gone."""
        for held in self.layers:
            if held is not None:
                held.positions[held.positions >= position] = EMPTY

    @property
    def tokens_written(self) -> int:
        return min(self._written)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(held.keys.nbytes + held.values.nbytes for held in self.layers if held is not None)


def keep_at(q_positions: torch.Tensor, kv_positions: torch.Tensor, window: int) -> torch.Tensor:
    """Keys within the window of each query, by the positions they carry; empty slots are hidden.

    Shapes: (q_len,) and (kv_len,) to (q_len, kv_len).
    """
    back = q_positions[:, None] - kv_positions
    return (back >= 0) & (back < window) & (kv_positions != EMPTY)
