"""Which keys a query may see, as keep-masks: bool tensors (q_len, kv_len), True where the query may see the key.

``engine.attention.mask_logits`` applies one. Masks are combined as conditions are: ``a & b`` sees what both allow,
``a | b`` what either does; only the result is turned into -inf, once. PyTorch's ``scaled_dot_product_attention`` reads
a bool mask in the same way; ``key_padding_mask`` of its ``MultiheadAttention`` is the opposite (True is hidden).

Key j stands at position j. The queries are a run of positions among the keys, and where they begin is the *alignment*:
``bottom_right`` puts the last query on the last key, as when new tokens meet a cache; ``top_left`` puts the first query
on the first key. They differ only where q_len and kv_len do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGNMENTS = ("bottom_right", "top_left")
MASKS = ("causal", "no_mask", "strict", "one_ahead", "prefix", "window", "documents")


def query_positions(
    q_len: int, kv_len: int, alignment: str = "bottom_right", device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The position of each query among the keys; negative where there are more queries than keys before it.

    Shapes: (q_len,). Raises: ValueError for an unknown alignment.
    """
    import torch

    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment: got {alignment!r}, wanted one of {', '.join(ALIGNMENTS)}")
    first = kv_len - q_len if alignment == "bottom_right" else 0
    return torch.arange(first, first + q_len, device=device)


def keep_causal(
    q_len: int,
    kv_len: int | None = None,
    *,
    alignment: str = "bottom_right",
    diagonal: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Keys up to the query's own position, and ``diagonal`` beyond it: -1 leaves the query itself out.

    Shapes: (q_len, kv_len); without kv_len there are as many keys as queries.
    """
    import torch

    kv_len = q_len if kv_len is None else kv_len
    at = query_positions(q_len, kv_len, alignment, device)
    return torch.arange(kv_len, device=device) <= at[:, None] + diagonal


def keep_window(
    q_len: int,
    kv_len: int | None = None,
    *,
    window: int,
    alignment: str = "bottom_right",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The last ``window`` keys up to the query's own position, itself among them. Shapes: as :func:`keep_causal`."""
    past = keep_causal(q_len, kv_len, alignment=alignment, diagonal=-window, device=device)
    return keep_causal(q_len, kv_len, alignment=alignment, device=device) & ~past


def keep_prefix(
    q_len: int,
    kv_len: int | None = None,
    *,
    prefix_len: int,
    alignment: str = "bottom_right",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The first ``prefix_len`` keys for everybody, causal behind them. Shapes: as :func:`keep_causal`."""
    import torch

    causal = keep_causal(q_len, kv_len, alignment=alignment, device=device)
    return causal | (torch.arange(causal.shape[-1], device=device) < prefix_len)


def keep_documents(query_documents: torch.Tensor, key_documents: torch.Tensor) -> torch.Tensor:
    """Keys of the query's own document. It looks both ways: ``& keep_causal(...)`` for a decoder.

    Shapes: (..., q_len) and (..., kv_len), the number of the document each token belongs to; returns
    (..., q_len, kv_len).
    """
    return query_documents[..., :, None] == key_documents[..., None, :]


def keep_padding(
    lengths: Sequence[int], kv_len: int, *, side: str = "right", device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The keys that are tokens and not padding, for a batch of sequences of these lengths, padded on one side.

    Shapes: (batch, 1, kv_len): the same for every query; ``[:, None]`` puts an axis for the heads before it.
    Raises: ValueError for another side than left or right.
    """
    import torch

    if side not in ("right", "left"):
        raise ValueError(f"side: got {side!r}, wanted right or left")
    at, length = torch.arange(kv_len, device=device), torch.tensor(lengths, device=device)[:, None, None]
    return at < length if side == "right" else at >= kv_len - length


def keep_named(
    name: str,
    q_len: int,
    kv_len: int | None = None,
    *,
    prefix_len: int = 1,
    window: int = 1,
    document_len: int = 1,
    alignment: str = "bottom_right",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """One of MASKS by its name: ``strict`` is causal without the query itself, ``one_ahead`` causal and one key more,
    ``documents`` causal within documents of ``document_len`` tokens.

    Shapes: as :func:`keep_causal`. Raises: ValueError for an unknown name.
    """
    import torch

    if name not in MASKS:
        raise ValueError(f"mask: got {name!r}, wanted one of {', '.join(MASKS)}")
    kv_len = q_len if kv_len is None else kv_len
    causal = keep_causal(q_len, kv_len, alignment=alignment, device=device)
    if name == "no_mask":
        return torch.ones_like(causal)
    if name == "prefix":
        return keep_prefix(q_len, kv_len, prefix_len=prefix_len, alignment=alignment, device=device)
    if name == "window":
        return keep_window(q_len, kv_len, window=window, alignment=alignment, device=device)
    if name == "documents":
        positions = query_positions(q_len, kv_len, alignment, device)
        documents = torch.arange(kv_len, device=device) // document_len
        return causal & keep_documents(positions // document_len, documents)
    diagonal = {"causal": 0, "strict": -1, "one_ahead": 1}[name]
    return keep_causal(q_len, kv_len, alignment=alignment, diagonal=diagonal, device=device)


def kept_in_tiles(keep: torch.Tensor, tile: int) -> torch.Tensor:
    """How many pairs are kept in each tile of ``tile`` queries by ``tile`` keys; the last ones may be smaller.

    A kernel that works on tiles can leave out those with 0.

    Shapes: (q_len, kv_len) to (ceil(q_len / tile), ceil(kv_len / tile)), int64.
    """
    from torch.nn.functional import pad

    q_len, kv_len = keep.shape
    # sums of float32 are exact up to 2**24, and several times as fast as those of bool
    padded = pad(keep.float(), (0, -kv_len % tile, 0, -q_len % tile))
    return padded.unflatten(1, (-1, tile)).sum(-1).unflatten(0, (-1, tile)).sum(1).long()
