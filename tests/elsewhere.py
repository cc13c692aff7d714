"""An accelerator that is only pretended, for machines without one: its tensors refuse what those of a GPU refuse.

They lie on the CPU and compute there, so a run "on" it must give the CPU's numbers to the last digit. But they are of a
class of their own, made by ``device=DEVICE`` and ``.to(DEVICE)``, and left by ``.cpu()``. Code that would fail on real
hardware fails here: tensors of two devices in one operation, ``numpy()`` without ``cpu()``, a random generator of the
CPU, float64 (which Apple's GPUs and some of Intel's lack).

What it can't show: kernels that round otherwise, memory, and time. For that there are the tests on real accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("xpu", 0)  # of a kind that no machine of ours has


class OnDevice(torch.Tensor):
    """A tensor of the pretended accelerator."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with its tensors changed, also those in lists, tuples and what torch names as a tuple."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and any(True for _ in _tensors(value)):
        parts = [_each(part, change) for part in value]
        return type(value)(parts)
    return value


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.float64:
        raise TypeError("float64 on an accelerator: not all of them have it; move to the CPU first")
    return tensor if isinstance(tensor, OnDevice) else tensor.as_subclass(OnDevice)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


class Elsewhere(TorchFunctionMode):
    """While it is on, ``DEVICE`` exists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        given = [*_tensors(args), *_tensors(list(kwargs.values()))]
        there = [t for t in given if isinstance(t, OnDevice)]
        if there and func == torch.Tensor.device.__get__:
            return DEVICE
        wanted, args = _wish(name, args, kwargs)
        if wanted is not None:  # made on a device, or moved to one
            if kwargs.get("generator") is not None and wanted == DEVICE:
                raise RuntimeError(f"{name}: expected a generator of {DEVICE}, got one of the CPU")
            return _each(func(*args, **kwargs), _moved if wanted == DEVICE else _plain)
        if not there:
            return func(*args, **kwargs)
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert a tensor of an accelerator to numpy; use Tensor.cpu() first")
        if any(t.ndim and not isinstance(t, OnDevice) for t in given) and not _copies(name, args):
            raise RuntimeError(f"{name}: expected all tensors on one device, found {DEVICE} and the CPU")
        return _each(func(*args, **kwargs), _moved)


def _wish(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, tuple[Any, ...]]:
    """The device that a call asks for, None where it asks for none; its arguments ask for the CPU then."""
    if name == "cpu":
        return torch.device("cpu"), args
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "meta":
        wanted, kwargs["device"] = torch.device(kwargs["device"]), "cpu"
        return wanted, args
    if name == "to":
        for place, value in enumerate(args):
            if isinstance(value, (torch.device, str)):
                return torch.device(value), (*args[:place], "cpu", *args[place + 1 :])
    return None, args


def _copies(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call may take tensors of two devices: what copies, and an index of the CPU into another device."""
    return name in ("copy_", "__setitem__") or (name == "__getitem__" and isinstance(args[0], OnDevice))
