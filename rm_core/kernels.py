"""The compiled part of the CPU's forward pass: finds a C compiler, builds it once into the cache, loads it.

The library is code that will run: one that another user could have written is refused.

Invariant: nothing depends on it. Without a compiler, or on a CPU without AMX, ``load`` gives the reason in words and
everything is computed by torch's own operations, slower and within the same bounds.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from rm_core.smollm2 import cache_directory

_HEADER, *_SOURCES = (Path(__file__).with_name(name) for name in ("kernels.h", "kernels.c", "products.c"))
_FLAGS = [
    *("-O3", "-fno-math-errno", "-fopenmp", "-fPIC"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mamx-tile", "-mamx-bf16"),
]
_COMPILE_SECONDS = 120

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "use_threads": [_int],
    "add_rms_norm": [*[_pointer] * 3, _float, _pointer, _pointer, _long, _long, _int],
    "rms_norm_backward": [_pointer, _pointer, _float, *[_pointer] * 4, _long, _long, _int],
    "silu_mul_backward": [*[_pointer] * 4, _long, _long, _int],
    "decoder_rows": [
        _long, _long, *[_pointer] * 6, _float, _pointer, _float, *[_pointer] * 4, _long, _int,
    ],
    "adapted_rows": [_long, _pointer, _int, *[_pointer] * 3, _int, *[_pointer] * 4, _long, _int],
    "adapter_gradient": [_long, _pointer, _long, _pointer, _long, _pointer, _pointer, _int],
    "tree_attention": [
        *[_pointer] * 7, _float, _long, _int, _int, _int, _float, _long,
        _long, *[_pointer] * 5, _long, *[_pointer] * 3, _long, *[_pointer] * 4, _long, *[_pointer] * 3, _int,
    ],
    "tree_attention_backward": [
        *[_pointer] * 7, _int, _int, _int, _float, *[_pointer] * 5, _long, *[_pointer] * 5, _int,
    ],
}  # fmt: skip


class Product(ctypes.Structure):
    """``Product`` in ``products.c``: weight [outputs, inputs], bias [outputs] or null; bf16."""

    _fields_ = (("weight", _pointer), ("bias", _pointer), ("outputs", _long), ("inputs", _long))

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> "Product":
        """Refers to these tensors, which must outlive it."""
        assert weight.is_contiguous(), "this is a bug: rows with gaps"
        return cls(weight.data_ptr(), None if bias is None else bias.data_ptr(), *weight.shape)

    @classmethod
    def of_transposed(cls, weight: torch.Tensor) -> "Product":
        """For a function that takes weights as [inputs, outputs]."""
        assert weight.is_contiguous(), "this is a bug: rows with gaps"
        return cls(weight.data_ptr(), None, weight.shape[1], weight.shape[0])


class NoKernelsError(RuntimeError):
    """Why the kernels cannot be used here, in words."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library, its functions declared. Raises NoKernelsError."""
    if sys.platform != "linux" or not (torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported()):
        raise NoKernelsError("they need Linux on a CPU with AMX and AVX512_BF16")
    try:
        # torch has loaded its OpenMP for everyone: what the library lacks is found there
        library = ctypes.CDLL(str(_built()))
    except OSError as error:
        raise NoKernelsError(f"they cannot be built or loaded ({error})") from error
    if library.allow_amx() != 0:
        raise NoKernelsError("the system does not allow AMX")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _built() -> Path:
    """The shared library of this source, compiled unless an earlier run has done it. Raises NoKernelsError, OSError."""
    compiler = shlex.split(os.environ.get("CC", "")) or [
        next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")
    ]
    if not shutil.which(compiler[0]):
        raise NoKernelsError("there is no C compiler (install gcc, or name one in CC)")
    sources = [path.read_text() for path in (_HEADER, *_SOURCES)]
    key = hashlib.sha256("\0".join([*sources, *_FLAGS, *compiler]).encode()).hexdigest()[:16]
    target = cache_directory() / f"kernels-{key}.so"
    if target.is_file():
        status = target.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise NoKernelsError(f"{target} could have been written by another user; remove it")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        library = Path(folder) / target.name
        objects = {source: Path(folder) / f"{source.stem}.o" for source in _SOURCES}
        # two steps: linking with -fopenmp would bring a second OpenMP, whose threads would fight torch's for the cores
        for command in (
            *([*compiler, *_FLAGS, "-c", str(source), "-o", str(file)] for source, file in objects.items()),
            [*compiler, "-shared", *map(str, objects.values()), "-o", str(library), "-lm"],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
            except subprocess.TimeoutExpired as error:
                raise NoKernelsError(f"{compiler[0]} did not end within {_COMPILE_SECONDS} s") from error
            if done.returncode != 0:
                problem = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise NoKernelsError(f"{compiler[0]} failed: {problem}")
        library.chmod(0o755)
        library.replace(target)
    return target
