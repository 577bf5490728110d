"""Notice a loss that runs away while it is still a number.

Invariant: what is noticed depends on the run's losses alone, so that every process notices it, and a resumed run stops
where the unbroken one would.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

WINDOW = 20
"""Steps over which the loss is averaged: single steps jump."""


class DivergenceWatch:
    """Compares the mean loss of the last steps with the lowest such mean so far."""

    def __init__(self, last: Sequence[float] = (), lowest: float = float("inf")) -> None:
        self._last = deque(last, maxlen=WINDOW)
        self._lowest = lowest

    @property
    def state(self) -> dict[str, Any]:
        """The arguments of a watch that goes on from here."""
        return {"last": list(self._last), "lowest": self._lowest}

    def see(self, loss: float) -> str | None:
        """Take the loss of one more step; the diagnosis where it has run away, else None.

        Away is five times the lowest mean and two nats above it: to be so wrong, a model must prefer rejected answers
        with confidence, where knowing nothing costs ln 2.
        """
        self._last.append(loss)
        if len(self._last) < WINDOW:
            return None
        mean = sum(self._last) / WINDOW
        self._lowest = min(self._lowest, mean)
        if mean <= max(5 * self._lowest, self._lowest + 2):
            return None
        return f"the loss diverges: {mean:.3g} on average over {WINDOW} steps, after {self._lowest:.3g} at its best"
