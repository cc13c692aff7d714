"""What this machine has to compute on, what each device can do, and how much memory is left.

CUDA and ROCm (which torch drives through the same calls), Apple's MPS, Intel's XPU, and the CPU. Everything is asked
of the device, nothing is looked up in a table of models. Only the CPU part was tried on real hardware; the others are
tested with stand-ins for torch's modules (docs/devices.md says which calls they rest on).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["cpu", "cuda", "rocm", "mps", "xpu"]

DTYPES = ("float32", "float64", "bfloat16", "float16")

ROOT = Path("/")  # where /proc, /sys and /dev hang; a test puts a folder here
UNKNOWN_MEMORY_BYTES = 4 * 2**30  # assumed where the system does not tell (Windows)


@dataclass(frozen=True)
class Device:
    """One thing to compute on. ``dtypes``: the floating-point types in which it multiplied two matrices when asked."""

    id: str
    kind: Kind
    name: str
    memory_bytes: int
    dtypes: tuple[str, ...]


class UnknownDevice(LookupError):
    """No such device here; the message says which there are."""

    def __init__(self, device: str, here: tuple[str, ...]) -> None:
        super().__init__(f"got device {device!r}; this machine has {', '.join(here)}")
        self.device, self.here = device, here

    def __reduce__(self) -> Any:  # exceptions cross process borders too
        return UnknownDevice, (self.device, self.here)


class UnsupportedDtype(ValueError):
    """The device does not compute in this type; the message says in which it does."""

    def __init__(self, device: str, dtype: str, dtypes: tuple[str, ...]) -> None:
        super().__init__(f"got dtype {dtype!r}; {device} computes in {', '.join(dtypes)}")
        self.device, self.dtype, self.dtypes = device, dtype, dtypes

    def __reduce__(self) -> Any:
        return UnsupportedDtype, (self.device, self.dtype, self.dtypes)


# --------------------------------------------------------------------------------------------------------------------
# What there is


@functools.cache
def available() -> tuple[Device, ...]:
    """All devices that answer: accelerators first, the CPU last."""
    return (*_cuda(), *_mps(), *_xpu(), _cpu())


def get(device: str) -> Device:
    """The device of that id; "cuda" and "xpu" are the first of their kind.

    Raises: UnknownDevice.
    """
    for found in available():
        if device in (found.id, found.id.removesuffix(":0")):
            return found
    raise UnknownDevice(device, tuple(d.id for d in available()))


def default() -> Device:
    """The first device that also computes in float64, in which the engine takes its measures; at the least the CPU.

    Apple's GPUs and some of Intel's have no float64; they can be chosen, but are not taken unasked.
    """
    return next(d for d in available() if "float64" in d.dtypes or d.kind == "cpu")


def _cuda() -> Iterator[Device]:
    import torch

    if not torch.cuda.is_available():
        return
    kind: Kind = "rocm" if torch.version.hip else "cuda"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device = f"cuda:{index}"
        yield Device(device, kind, properties.name, properties.total_memory, _dtypes(device))


def _mps() -> Iterator[Device]:
    import torch

    if torch.backends.mps.is_available():
        yield Device("mps", "mps", f"{_cpu_name()} GPU", torch.mps.recommended_max_memory(), _dtypes("mps"))


def _xpu() -> Iterator[Device]:
    import torch

    if not torch.xpu.is_available():
        return
    for index in range(torch.xpu.device_count()):
        properties = torch.xpu.get_device_properties(index)
        device = f"xpu:{index}"
        yield Device(device, "xpu", properties.name, properties.total_memory, _dtypes(device))


def _cpu() -> Device:
    return Device(
        "cpu", "cpu", _cpu_name(), min([_physical_bytes(), *(limit for limit, _ in _cgroups())]), _dtypes("cpu")
    )


def _dtypes(device: str) -> tuple[str, ...]:
    """The types in which the device really multiplies two matrices; a driver that only claims to fails here."""
    import torch

    works = []
    for dtype in DTYPES:
        try:
            ones = torch.ones(2, 2, dtype=getattr(torch, dtype), device=device)
            right = bool((ones @ ones == 2).all())
        except (
            RuntimeError,
            TypeError,
        ):  # what an unsupported type raises: MPS the second for float64, others the first
            continue
        if right:
            works.append(dtype)
    return tuple(works)


def _cpu_name() -> str:
    """The processor as its maker calls it."""
    try:
        lines = (ROOT / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """What a command prints, "" when it is missing, fails or takes more than ten seconds."""
    if not shutil.which(command[0]):
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# --------------------------------------------------------------------------------------------------------------------
# Memory


def free_bytes(device: Device) -> int:
    """How much a run could take now, counting what torch keeps in its own pool as free."""
    import torch

    if device.kind in ("cuda", "rocm"):
        free, _ = torch.cuda.mem_get_info(device.id)
        return int(free + torch.cuda.memory_reserved(device.id) - torch.cuda.memory_allocated(device.id))
    if device.kind == "xpu":
        free, _ = torch.xpu.mem_get_info(device.id)
        return int(free + torch.xpu.memory_reserved(device.id) - torch.xpu.memory_allocated(device.id))
    if device.kind == "mps":  # shares the memory of the CPU
        return int(max(0, min(device.memory_bytes - torch.mps.current_allocated_memory(), _cpu_free_bytes())))
    return _cpu_free_bytes()


def empty_pool(device: str) -> None:
    """Give what torch keeps in its own pool back to the device; the CPU has no such pool."""
    import torch

    kind = device.partition(":")[0]
    if kind != "cpu":
        getattr(torch, kind).empty_cache()


def _cpu_free_bytes() -> int:
    """The least of what the system and every enclosing cgroup have left."""
    return max(0, min([_system_free_bytes(), *(limit - used for limit, used in _cgroups())]))


def _meminfo(name: str) -> int | None:
    try:
        lines = (ROOT / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _physical_bytes() -> int:
    if total := _meminfo("MemTotal"):
        return total
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY_BYTES


def _system_free_bytes() -> int:
    """What Linux calls available; elsewhere half of the memory, since no call of the standard library tells."""
    free = _meminfo("MemAvailable")
    return _physical_bytes() // 2 if free is None else free


def _cgroups() -> list[tuple[int, int]]:
    """(limit, used) in bytes of every cgroup around this process that has a limit, in version 2 and in version 1.

    The page cache that the kernel would drop first does not count as used.
    """
    found = []
    for folder, version in _cgroup_folders(ROOT):
        limit_file, used_file, cache = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        try:
            limit = int((folder / limit_file).read_text())  # "max" is no number: no limit
            if limit > 2**60:  # version 1 writes a huge number for "no limit"
                continue
            used = int((folder / used_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        found.append((limit, max(0, used - int(stat.get(cache, 0)))))
    return found


@functools.cache  # a process stays in its groups; asking anew costs more than a small run
def _cgroup_folders(root: Path) -> tuple[tuple[Path, int], ...]:
    """The memory cgroup of this process and all above it, as far up as they are mounted, each with its version."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ()
    found = []
    paths = {}  # version to path within its hierarchy
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in mounts:
        before, _, after = line.partition(" - ")
        mount_root, mount_point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version not in paths:
            continue
        top = root / mount_point.lstrip("/")
        # in a container the mount often begins at the container's own group, while the path counts from the top
        inside = os.path.relpath(paths[version], mount_root) if paths[version].startswith(mount_root) else "."
        folder = top / inside if (top / inside).is_dir() and ".." not in Path(inside).parts else top
        for group in (folder, *folder.parents):
            found.append((group, version))
            if group == top:
                break
    return tuple(found)


# --------------------------------------------------------------------------------------------------------------------
# A GPU that this torch can't use


@functools.cache
def idle_gpu() -> Literal["nvidia", "amd"] | None:
    """The maker of a GPU that stands idle because the installed torch is a CPU build; torch is not imported.

    One that was hidden on purpose (``CUDA_VISIBLE_DEVICES=``, ``-1``) does not count.
    """
    if _torch_build() != "cpu":
        return None
    if _has_nvidia() and not _hidden("CUDA_VISIBLE_DEVICES"):
        return "nvidia"
    if _has_amd() and not _hidden("HIP_VISIBLE_DEVICES"):
        return "amd"
    return None


def _hidden(variable: str) -> bool:
    return os.environ.get(variable, "all").strip() in ("", "-1")


def _torch_build() -> Literal["cpu", "gpu"] | None:
    """What the installed torch was built for, read from its version file; None when it is not installed."""
    spec = importlib.util.find_spec("torch")  # finds a top-level package without importing it
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text("utf-8"))
    except (OSError, SyntaxError):
        return None
    values: dict[str, object] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            values.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return "gpu" if any(values.get(name) for name in ("cuda", "hip", "rocm", "xpu")) else "cpu"


def _has_nvidia() -> bool:
    """An NVIDIA GPU that this process may use: its device file on Linux, what nvidia-smi lists elsewhere (WSL)."""
    if (ROOT / "proc/driver/nvidia").is_dir():
        # a container sees the host's driver here, but only the GPUs it was given below /dev
        return any((ROOT / "dev").glob("nvidia[0-9]*"))
    return _output("nvidia-smi", "-L").startswith("GPU ")


def _has_amd() -> bool:
    """An AMD GPU under the compute driver: a node with SIMD units (the CPU is a node too, with none)."""
    if not (ROOT / "dev/kfd").exists():
        return False
    for properties in (ROOT / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            words = properties.read_text().split()
        except OSError:  # another user's GPU
            continue
        if int(dict(zip(words[::2], words[1::2], strict=False)).get("simd_count", 0)) > 0:
            return True
    return False
