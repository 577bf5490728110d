"""Safetensors files read without a model: names, hashes and single tensors.

Invariant: the hash covers names, dtypes, shapes and bytes of tensors, not files, so sharding does not change it.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class WeightsError(ValueError):
    """A weights file that is missing, truncated or not safetensors. The message names the file."""


class _Entry(NamedTuple):
    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model folder (adapter or full model).

    Raises WeightsError when there are none, for instance when the folder holds pickle files only.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        hint = f" ({pickles[0]} is a pickle file, which is never loaded: convert it to safetensors)" if pickles else ""
        raise WeightsError(f"{directory} has no *.safetensors file{hint}")
    return files


def tensor_names(directory: Path) -> set[str]:
    """Names of all tensors in the folder's safetensors files."""
    return {entry.name for file in weight_files(directory) for entry in _entries(file)}


def count_parameters(directory: Path) -> int:
    """How many numbers the folder's safetensors files hold, by their headers."""
    return sum(math.prod(entry.shape) for file in weight_files(directory) for entry in _entries(file))


def hash_tensors(directory: Path, keep: Callable[[str], bool] = lambda name: True) -> str:
    """``sha256:…`` over the folder's tensors whose name ``keep`` accepts."""
    entries = sorted(
        (e for file in weight_files(directory) for e in _entries(file) if keep(e.name)), key=lambda e: e.name
    )
    # hashlib lets go of the interpreter lock, so two threads hash twice as fast on two cores.
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [_take_begun(entry) or pool.submit(_hash_entry, entry) for entry in entries]
        digests = [future.result() for future in futures]
    total = hashlib.sha256()
    for entry, digest in zip(entries, digests, strict=True):
        total.update(json.dumps([entry.name, entry.dtype, list(entry.shape)]).encode() + digest)
    return "sha256:" + total.hexdigest()


def begin_hashing(directory: Path) -> None:
    """Hash a folder's tensors on threads of their own, beside whatever comes before ``hash_tensors`` asks for them.

    Each hash is used once, and only if its file is still the same by size, time and inode. Needs no torch. A folder
    that cannot be read is left for ``hash_tensors`` to complain about.
    """
    pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hash")
    try:
        for file in sorted(directory.glob("*.safetensors")):
            stamp = _stamp(file)
            for entry in _entries(file):
                _begun[entry, stamp] = pool.submit(_hash_entry, entry)
    except (OSError, WeightsError, KeyError, TypeError, ValueError):
        return
    finally:
        pool.shutdown(wait=False)


_Stamp = tuple[int, int, int]
_begun: "dict[tuple[_Entry, _Stamp], Future[bytes]]" = {}


def _take_begun(entry: _Entry) -> "Future[bytes] | None":
    key = (entry, _stamp(entry.file))
    return _begun.pop(key) if key in _begun else None


def _stamp(file: Path) -> _Stamp:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_tensor(directory: Path, name: str) -> "torch.Tensor | None":
    """One tensor in the dtype it was stored in, or None where no file has it."""
    from safetensors import safe_open

    for file in weight_files(directory):
        with safe_open(str(file), framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor
    return None


def _entries(file: Path) -> Iterator[_Entry]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise WeightsError(f"{file} is truncated or not a safetensors file")
        try:
            header = json.loads(opened.read(length))
        except ValueError:
            raise WeightsError(f"{file} is not a safetensors file: its header is unreadable") from None
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        if 8 + length + end > size:
            raise WeightsError(f"{file} is truncated: tensor {name!r} ends behind the end of the file")
        yield _Entry(name, file, info["dtype"], tuple(info["shape"]), 8 + length + begin, 8 + length + end)


def _hash_entry(entry: _Entry) -> bytes:
    if entry.begin == entry.end:
        return hashlib.sha256().digest()
    with (
        entry.file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        view[entry.begin : entry.end] as part,
    ):
        return hashlib.sha256(part).digest()
