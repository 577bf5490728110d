"""Which device and dtype to compute in, decided in one place, with the reason in words."""

from typing import Literal, NamedTuple

import torch

DtypeName = Literal["auto", "float32", "bfloat16"]


class Compute(NamedTuple):
    """Where and in what numbers a model runs; ``reason`` goes into the log and into ``/info``."""

    device: torch.device
    dtype: torch.dtype
    reason: str

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_compute(dtype: DtypeName = "auto", device: str = "auto") -> Compute:
    """Pick the device (CUDA where there is one) and the dtype that is fast there and still accurate."""
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: 'cuda' was asked for, and torch finds no CUDA device here")
    if dtype != "auto":
        return Compute(chosen, getattr(torch, dtype), f"{dtype} was asked for")
    if chosen.type == "cuda":
        return Compute(chosen, torch.bfloat16, "bfloat16: the GPU's matrix units are fast in it")
    if has_fast_bfloat16():
        return Compute(chosen, torch.bfloat16, "bfloat16: this CPU has matrix instructions for it (AMX or AVX512_BF16)")
    return Compute(chosen, torch.float32, "float32: this CPU has no bfloat16 matrix instructions, emulation is slower")


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    avx = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return capabilities not in ("DEFAULT", "NO AVX") and bool(amx or avx)
