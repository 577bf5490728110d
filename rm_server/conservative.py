"""A model whose reward is the mean over its heads less their spread, as a server with ``conservative`` shows it.

Invariant: another K is another ``reward_id``, so that a client who pins one never gets the other. ``BatchScorer`` takes
the spread off.
"""

from typing import Any, cast

from rm_server.scorer import ServedModel
from rm_server.settings import SettingsError


class ConservativeModel:
    """A served model under the ``reward_id`` of mean - K * std. Everything but its record is the model's own."""

    def __init__(self, model: ServedModel, conservative: float) -> None:
        from rm_core.checkpoint import conservative_reward_id

        self._model = model
        self.checkpoint_reward_id = model.reward_id
        self.reward_id = conservative_reward_id(model.reward_id, conservative)
        record = model.record
        if record is not None:
            spread = record.metrics.get("heads", {}).get("mean_std")
            # The mean moves by what is taken off on average; where that was not measured, nothing is known.
            unknown = {"reward_mean": 0.0, "reward_std": 1.0, "num_eval": 0}
            moved = {"reward_mean": record.reward_mean - conservative * spread} if spread is not None else unknown
            record = record.model_copy(update=moved)
        self.record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def conservative_model(model: ServedModel, conservative: float) -> ServedModel:
    """The model as a server with this setting shows it: itself where that is 0. Raises SettingsError for one head."""
    if not conservative:
        return model
    if model.num_heads == 1:
        raise SettingsError(
            f"conservative ({conservative:g}): {model.name} has one head alone (head.count), so nothing tells how sure "
            "a reward is"
        )
    return cast(ServedModel, ConservativeModel(model, conservative))
