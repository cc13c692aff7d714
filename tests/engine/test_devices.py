"""devices.py on the CPU that is here, and on stand-ins for the systems and accelerators that are not."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from engine import devices

GB = 2**30


@pytest.fixture(autouse=True)
def _forget():
    """What was found on the stand-ins of one test must not be remembered in the next."""
    devices.available.cache_clear()
    devices.idle_gpu.cache_clear()
    yield
    devices.available.cache_clear()
    devices.idle_gpu.cache_clear()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty system to fill with files."""
    monkeypatch.setattr(devices, "ROOT", tmp_path)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def meminfo(total: int, free: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n"}


# --------------------------------------------------------------------------------------------------------------------
# The real CPU


def test_the_cpu_is_there_and_computes_what_it_says():
    cpu = devices.get("cpu")
    assert devices.available()[-1] == cpu
    assert cpu.name
    for dtype in cpu.dtypes:
        ones = torch.ones(3, 3, dtype=getattr(torch, dtype))
        assert (ones @ ones).tolist() == [[3.0] * 3] * 3
    assert {"float32", "float64"} <= set(cpu.dtypes)


def test_the_figures_of_the_real_system_are_possible():
    cpu = devices.get("cpu")
    assert (
        2**20 < devices.free_bytes(cpu) < cpu.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


def test_an_unknown_device_is_told_what_there_is():
    with pytest.raises(devices.UnknownDevice, match=r"'tpu'.* has .*cpu"):
        devices.get("tpu")


# --------------------------------------------------------------------------------------------------------------------
# Limits of containers

V2_NAMESPACE = {  # a container with a namespace of its own: its group looks like the top
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup ro,nosuid shared:4 - cgroup2 cgroup rw,nsdelegate\n",
    "sys/fs/cgroup/memory.max": str(690 * 2**20),
    "sys/fs/cgroup/memory.current": str(500 * 2**20),
    "sys/fs/cgroup/memory.stat": f"anon 1\nfile 1\ninactive_file {100 * 2**20}\n",
}
V2_NESTED = {  # the parent is tighter than the group of the process
    "proc/self/cgroup": "0::/pod/app\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/pod/app/memory.max": str(8 * GB),
    "sys/fs/cgroup/pod/app/memory.current": str(1 * GB),
    "sys/fs/cgroup/pod/app/memory.stat": "inactive_file 0\n",
    "sys/fs/cgroup/pod/memory.max": str(690 * 2**20),
    "sys/fs/cgroup/pod/memory.current": str(400 * 2**20),
    "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\n",
}
V1_DOCKER = {  # no namespace: the path counts from the top, the mount begins at the container's group
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n",
    "proc/self/mountinfo": "41 30 0:32 /docker/abc /sys/fs/cgroup/memory ro master:17 - cgroup cgroup rw,memory\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(690 * 2**20),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(500 * 2**20),
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {100 * 2**20}\n",
}
V1_HOST = {  # version 1 on a plain machine: both limits are "none", which it writes as a huge number
    "proc/self/cgroup": "4:memory:/user.slice\n",
    "proc/self/mountinfo": "41 30 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/user.slice/memory.usage_in_bytes": "1\n",
    "sys/fs/cgroup/memory/user.slice/memory.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        (V2_NAMESPACE, 690 * 2**20, 290 * 2**20),  # 690 - (500 - 100 that the kernel can drop)
        (V2_NESTED, 690 * 2**20, 290 * 2**20),
        (V1_DOCKER, 690 * 2**20, 290 * 2**20),
        (V1_HOST, 64 * GB, 32 * GB),
        ({**V2_NAMESPACE, "sys/fs/cgroup/memory.max": "max\n"}, 64 * GB, 32 * GB),
        ({**V2_NAMESPACE, "sys/fs/cgroup/memory.stat": "garbage"}, 64 * GB, 32 * GB),
        ({}, 64 * GB, 32 * GB),
    ],
    ids=["v2", "v2 nested", "v1", "v1 no limit", "v2 no limit", "unreadable", "none"],
)
def test_the_memory_of_the_cpu_respects_its_cgroup(root, files, total, free):
    write(root, {**meminfo(64 * GB, 32 * GB), **files})
    cpu = devices.get("cpu")
    assert (cpu.memory_bytes, devices.free_bytes(cpu)) == (total, free)


def test_a_full_cgroup_leaves_nothing_and_never_less(root):
    write(root, {**meminfo(64 * GB, 32 * GB), **V2_NAMESPACE, "sys/fs/cgroup/memory.current": str(GB)})
    assert devices.free_bytes(devices.get("cpu")) == 0


def test_a_system_that_has_less_free_than_its_cgroup_allows(root):
    write(root, {**meminfo(GB, 2**20), **V2_NESTED})
    assert devices.free_bytes(devices.get("cpu")) == 2**20


def test_a_system_without_proc_still_gives_figures(root, monkeypatch):
    monkeypatch.delattr("os.sysconf")  # as on Windows
    cpu = devices.get("cpu")
    assert cpu.memory_bytes == devices.UNKNOWN_MEMORY_BYTES
    assert devices.free_bytes(cpu) == devices.UNKNOWN_MEMORY_BYTES // 2


# --------------------------------------------------------------------------------------------------------------------
# Accelerators, as torch would show them


def real_ones(refuse: dict[str, set[torch.dtype]]):
    """torch.ones on pretended devices; a refused type raises as a real device does."""
    ones = torch.ones

    def fake(*shape, dtype, device):
        for kind, dtypes in refuse.items():
            if device.startswith(kind) and dtype in dtypes:
                raise TypeError(f"Cannot convert a {kind} Tensor to {dtype}")
        return ones(*shape, dtype=dtype)

    return fake


@pytest.fixture
def cuda(monkeypatch):
    """Two CUDA devices of 16 GiB, 10 free, of which torch holds 3 and uses 1; the type bfloat16 fails on them."""
    properties = types.SimpleNamespace(name="Pretended GPU", total_memory=16 * GB)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: properties,
        "mem_get_info": lambda device: (10 * GB, 16 * GB),
        "memory_reserved": lambda device: 3 * GB,
        "memory_allocated": lambda device: 1 * GB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "ones", real_ones({"cuda": {torch.bfloat16}}))


def test_cuda_devices_come_first_with_the_types_they_really_compute(cuda):
    first, second, cpu = devices.available()
    assert [d.id for d in (first, second, cpu)] == ["cuda:0", "cuda:1", "cpu"]
    assert (first.kind, first.name, first.memory_bytes) == ("cuda", "Pretended GPU", 16 * GB)
    assert first.dtypes == ("float32", "float64", "float16")
    assert devices.default() == first
    assert devices.get("cuda") == first
    assert devices.free_bytes(first) == 12 * GB  # 10 free, and 2 that torch holds but does not use


def test_rocm_is_told_from_cuda(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert devices.get("cuda:1").kind == "rocm"


def test_mps_has_no_float64_and_is_not_taken_unasked(monkeypatch, root):
    write(root, {**meminfo(16 * GB, 4 * GB), "proc/cpuinfo": "model name\t: Apple M9\n"})
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 11 * GB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 1 * GB)
    monkeypatch.setattr(torch, "ones", real_ones({"mps": {torch.float64}}))
    mps = devices.get("mps")
    assert mps == devices.Device("mps", "mps", "Apple M9 GPU", 11 * GB, ("float32", "bfloat16", "float16"))
    assert devices.default().id == "cpu"
    assert devices.free_bytes(mps) == 4 * GB  # it shares the CPU's memory, of which no more is free


def test_xpu(monkeypatch):
    properties = types.SimpleNamespace(name="Pretended Arc", total_memory=8 * GB)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda index: properties,
        "mem_get_info": lambda device: (6 * GB, 8 * GB),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
    }.items():
        monkeypatch.setattr(torch.xpu, name, value)
    monkeypatch.setattr(torch, "ones", real_ones({"xpu": {torch.float64}}))
    arc = devices.get("xpu:0")
    assert (arc.kind, arc.name, arc.dtypes) == ("xpu", "Pretended Arc", ("float32", "bfloat16", "float16"))
    assert devices.free_bytes(arc) == 6 * GB
    assert devices.default().id == "cpu"


def test_emptying_the_pool_reaches_the_device_that_is_meant(monkeypatch):
    emptied = []
    for kind in ("cuda", "mps", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "empty_cache", lambda kind=kind: emptied.append(kind))
    for device in ("cpu", "cuda:1", "mps", "xpu:0"):
        devices.empty_pool(device)
    assert emptied == ["cuda", "mps", "xpu"]


# --------------------------------------------------------------------------------------------------------------------
# An idle GPU


@pytest.fixture
def torch_build(tmp_path, monkeypatch):
    """Pretend an installed torch with this version file."""

    def pretend(version: str | None) -> None:
        package = tmp_path / "site" / "torch"
        package.mkdir(parents=True)
        if version is not None:
            (package / "version.py").write_text(version)
        spec = types.SimpleNamespace(origin=str(package / "__init__.py"))
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: spec)

    return pretend


CPU_BUILD = (
    "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
)
CUDA_BUILD = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
ROCM_BUILD = "__version__ = '2.13.0+rocm7.0'\ncuda = None\nhip = '7.0.1'\n"
NVIDIA = {"proc/driver/nvidia/version": "NVRM", "dev/nvidia0": "", "dev/nvidiactl": ""}
AMD = {
    "dev/kfd": "",
    "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 8\nsimd_count 0\n",
    "sys/class/kfd/kfd/topology/nodes/1/properties": "cpu_cores_count 0\nsimd_count 256\n",
}
AMD_WITHOUT_GPU = {name: text for name, text in AMD.items() if "nodes/1" not in name}
HOST_DRIVER_ONLY = {"proc/driver/nvidia/version": "NVRM", "dev/null": ""}  # a container that was given no GPU


@pytest.mark.parametrize(
    ("version", "files", "expected"),
    [
        (CPU_BUILD, NVIDIA, "nvidia"),
        (CPU_BUILD, AMD, "amd"),
        (CPU_BUILD, {}, None),
        (CPU_BUILD, AMD_WITHOUT_GPU, None),
        (CPU_BUILD, HOST_DRIVER_ONLY, None),
        (CUDA_BUILD, NVIDIA, None),
        (ROCM_BUILD, AMD, None),
        (None, NVIDIA, None),
    ],
)
def test_idle_gpu(root, torch_build, monkeypatch, version, files, expected):
    monkeypatch.setenv("PATH", str(root))  # no nvidia-smi
    write(root, files)
    torch_build(version)
    assert devices.idle_gpu() == expected


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_was_hidden_on_purpose_is_not_idle(root, torch_build, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    write(root, NVIDIA)
    torch_build(CPU_BUILD)
    assert devices.idle_gpu() is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'GPU 0: Pretended (UUID: GPU-1)'", "nvidia"),
        ("echo 'No devices were found'", None),
        ("echo 'GPU 0: Pretended'; exit 9", None),  # the driver does not answer
    ],
)
def test_idle_gpu_where_only_nvidia_smi_knows(root, torch_build, monkeypatch, script, expected):
    program = root / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    torch_build(CPU_BUILD)
    assert devices.idle_gpu() == expected


def test_the_installed_build_is_known_without_importing_torch():
    code = "import sys; from engine import devices as d; print(d._torch_build(), d.idle_gpu(), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    build = "gpu" if torch.version.cuda or torch.version.hip or torch.version.xpu else "cpu"
    assert done.stdout.split()[0] == build
    assert done.stdout.split()[2] == "False"
