"""The state that ``rm-train fit --resume`` continues from, and the metrics file that belongs to it.

Invariant: a state appears by one rename; the metrics file is cut back to what the state had seen, so that no line is
repeated or lost.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rm_train.rows import first_line
from rm_train.sharding import placed_like, whole

STATE_FILE = "resume.pt"


class ResumeError(ValueError):
    """A run that cannot be resumed: there is no state, or it belongs to other data or settings."""


class MetricsFile:
    """``metrics.jsonl``: one line per step or evaluation. Opened for each line, so nothing stays unwritten."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def position(self) -> int:
        """Where the next line goes. All before it is on the disk, so that a state may rely on it."""
        with self._path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def write(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def cut(self, position: int) -> None:
        """Forget everything behind ``position``. Raises ResumeError where the file is shorter than that."""
        with self._path.open("ab") as file:
            if file.tell() < position:
                raise ResumeError(
                    f"{self._path}: lines that belong to the saved state are missing; start again with --overwrite"
                )
            file.truncate(position)


def trainable_state(network: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every weight that is trained, whole: collective where the weights are divided among processes."""
    return {name: whole(p.detach().clone()) for name, p in network.named_parameters() if p.requires_grad}


def load_trainable(network: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Put a copy back."""
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            parameters[name].copy_(placed_like(value, parameters[name]))


def save_state(directory: Path, state: dict[str, Any]) -> None:
    """Write the state beside the old one and rename it over. Raises OSError where the disk is full."""
    temporary = directory / f".{STATE_FILE}.tmp"
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)  # half a state only fills the disk
        raise
    temporary.replace(directory / STATE_FILE)


def forget_state(directory: Path) -> None:
    """Remove the state of an earlier run: ``--resume`` must not continue it once the new one has begun."""
    (directory / STATE_FILE).unlink(missing_ok=True)


def load_state(directory: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Read the state back; ResumeError where there is none or ``identity`` (data, settings) differs from its own."""
    path = directory / STATE_FILE
    if not path.is_file():
        raise ResumeError(f"{path}: there is no state to resume from; run without --resume (set train.save_every)")
    try:
        # only tensors and plain containers: weights_only refuses anything that could run code
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch raise anything; it is translated, not hidden
        raise ResumeError(f"{path}: cannot be read ({first_line(error)}); start again with --overwrite") from error
    for key, value in identity.items():
        if state["identity"].get(key) != value:
            raise ResumeError(
                f"{path}: {key} was {state['identity'].get(key)!r} and is now {value!r}; resume with the same"
            )
    return state
