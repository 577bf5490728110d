"""Several reward heads on one backbone: what tells how sure a reward is.

The checkpoint's own head is their mean, which for linear heads is one head again: plain peft, transformers and every
server read it as any other reward model. The single heads lie in a folder beside it, where loaders of weights do not
look.

Invariant: the head that is served is the mean of the stored ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from rm_core.weights import WeightsError, hash_tensors, read_tensor

HEADS_FOLDER = "reward_heads"
_NAME = "heads"


def read_heads(directory: Path) -> torch.Tensor | None:
    """The single heads of a checkpoint, float32 [K, H]; None where it has one head alone."""
    folder = directory / HEADS_FOLDER
    return read_tensor(folder, _NAME) if folder.is_dir() else None


def hash_heads(directory: Path) -> str | None:
    """``sha256:…`` of the single heads, None where there are none."""
    folder = directory / HEADS_FOLDER
    return hash_tensors(folder) if folder.is_dir() else None


def write_heads(directory: Path, heads_KH: torch.Tensor) -> None:
    """Write the single heads into their folder."""
    folder = directory / HEADS_FOLDER
    folder.mkdir()
    save_file({_NAME: heads_KH.detach().float().cpu().contiguous()}, folder / "heads.safetensors")


def offsets_of(head_means: Sequence[float] | None) -> np.ndarray | None:
    """By how much each head, float32 [K], lies above their mean; None where no means were stored.

    Bradley-Terry sees differences alone, so every head's offset is free, and says nothing of how sure a reward is.
    """
    if head_means is None:
        return None
    means = np.asarray(head_means, dtype=np.float64)
    offsets: np.ndarray = (means - means.mean()).astype(np.float32)
    return offsets


def check_mean(heads_KH: torch.Tensor, head_1H: torch.Tensor) -> None:
    """Raise WeightsError where the served head [1, H] is not the mean of the single ones."""
    mean = heads_KH.mean(dim=0, keepdim=True)
    if mean.shape != head_1H.shape or not torch.allclose(mean, head_1H.float().cpu(), atol=1e-5, rtol=1e-4):
        raise WeightsError(f"{HEADS_FOLDER}: the reward head is not the mean of the heads stored there")


@contextmanager
def as_mean(head: nn.Linear) -> Iterator[None]:
    """Within the block the head of K rows is its mean, of one row: for writing it."""
    rows = head.weight
    head.weight = nn.Parameter(rows.detach().mean(dim=0, keepdim=True), requires_grad=False)
    head.out_features = 1
    try:
        yield
    finally:
        head.weight = rows
        head.out_features = rows.shape[0]
