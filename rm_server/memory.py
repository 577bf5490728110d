"""How much memory a model needs and how much there is: on this machine, in this container, on this device.

Invariant: what cannot be found out is None, and no check is made on it; a number is never invented.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


class Memory(NamedTuple):
    """Bytes, in all and free."""

    total: int
    free: int


class Need(NamedTuple):
    """Bytes that loading a checkpoint takes: on the host at its highest, and on the device for good."""

    host: int
    device: int


def host_memory() -> Memory | None:
    """The machine's memory, or the container's where that is less; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
        memory = Memory(sizes["MemTotal"], sizes["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):
        return None
    group = _container_memory()
    return memory if group is None else Memory(min(memory.total, group.total), min(memory.free, group.free))


def _container_memory() -> Memory | None:
    for limit_file, usage_file, stat_file in _CGROUPS:
        try:
            limit, usage = int(Path(limit_file).read_text()), int(Path(usage_file).read_text())
            stat = dict(line.split() for line in Path(stat_file).read_text().splitlines())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        reclaimable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        return Memory(limit, max(limit - usage + reclaimable, 0))
    return None


def resident_bytes() -> int | None:
    """Bytes of this process in memory; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def device_memory(device: Any) -> Memory | None:
    """A CUDA device's memory, what torch holds unused counted as free; None for the CPU."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(total, free + unused)


def why_too_little(need: Need, device: Any, fraction: float) -> str | None:
    """Why a checkpoint that needs this much cannot be loaded beside what is there, or None where it can.

    ``fraction`` is the share of the memory that this process may use.
    """
    on_device = device_memory(device)
    host_need = need.host + (0 if on_device is not None else need.device)
    for what, needed, memory, used in (
        ("memory", host_need, host_memory(), resident_bytes()),
        (f"memory on {device}", need.device, on_device, _allocated(device) if on_device is not None else None),
    ):
        if memory is None:
            continue
        free = memory.free if used is None else min(memory.free, int(memory.total * fraction) - used)
        if needed > free:
            return f"it needs about {needed // MIB} MiB of {what}, and {max(free, 0) // MIB} MiB are free"
    return None


def _allocated(device: Any) -> int:
    import torch

    return int(torch.cuda.memory_reserved(device))


def bound_device_memory(device: Any, fraction: float) -> None:
    """Let torch take no more than this share of a CUDA device; nothing on the CPU."""
    import torch

    if torch.device(device).type == "cuda" and fraction < 1:
        torch.cuda.set_per_process_memory_fraction(fraction, torch.device(device))


def return_freed_memory() -> None:
    """Give freed memory back to the system: torch's unused device memory, and what the C library keeps (glibc)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
