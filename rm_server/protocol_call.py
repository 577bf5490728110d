"""One request of another trainer's client, from its URL to its rewards.

Invariant: the same engine call as ``/score``; all items get a reward, or the request is an error.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rm_server.errors import RewardIdMismatchError
from rm_server.inputs import ItemInput, TokenizeOptions
from rm_server.protocol_schema import UrlOptions
from rm_server.scorer import ServedModel
from rm_server.service import ScoringService

LOADING_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Outcome:
    """N rewards, and what is told beside them."""

    rewards: list[float]
    truncated: list[bool]
    num_tokens: int
    model: ServedModel
    components: dict[str, list[float | None]]
    """The parts of each reward, from a server with a recipe."""


@dataclass(frozen=True)
class Call:
    """One request of such a client: where it is scored, and what its URL asks for."""

    service: ScoringService
    options: UrlOptions
    arrival: float

    async def score(
        self, inputs: Sequence[ItemInput], *, cut_to: int | None = None, deadline_ms: float | None = None
    ) -> Outcome:
        """Score all items or raise. ``cut_to``: keep the last so many tokens. Waits while the model is loaded."""
        service, options = self.service, self.options
        deadline_ms = options.deadline_ms or deadline_ms or service.settings.default_deadline_ms
        deadline = self.arrival + deadline_ms / 1000
        # A caller with few tries left would use them all up while the model is loaded after a restart.
        while service.state == "loading" and service.clock() < deadline:  # noqa: ASYNC110 (once, at start-up)
            await asyncio.sleep(LOADING_POLL_SECONDS)
        model = service.model
        if (error := service.why_not_serving()) is not None:
            raise error
        assert model is not None, "this is a bug: serving without a model"
        if options.reward_id not in (None, model.reward_id):
            raise RewardIdMismatchError(
                f"reward_id: this server scores with {model.reward_id}, not with the pinned one"
            )
        limit = min(service.max_length, cut_to or service.max_length)
        truncation = options.truncation if cut_to is None else "left"
        scored = await service.score(inputs, TokenizeOptions(limit, truncation), deadline)
        if scored.errors:
            errors = [error for _, error in sorted(scored.errors.items())]
            # The one that no retry can mend, if there is one: trying again would cost as much and end the same.
            raise next((error for error in errors if not error.retryable), errors[0])
        rewards = [reward for reward in scored.rewards if reward is not None]
        assert len(rewards) == len(inputs), "this is a bug: an item has neither reward nor error"
        return Outcome(rewards, list(scored.truncated), scored.num_tokens, model, scored.components or {})

    @property
    def has_model(self) -> bool:
        """Whether a model takes part in the reward; not on a server with verifiers only."""
        return self.service.rewards is None or self.service.rewards.recipe.model_part is not None

    @property
    def has_verifiers(self) -> bool:
        """Whether parts of the reward read the answer's text."""
        return self.service.rewards is not None and bool(self.service.rewards.recipe.verifiers)

    def policy_texts(self, texts: Sequence[str], path: str) -> list[ItemInput]:
        """Texts as a policy's tokens decode: each is finished if it stops at an end token, unless the URL says more."""
        finished = True if self.options.finished == "always" else None
        return [ItemInput(f"{path}[{i}]", text, finished=finished, is_templated=True) for i, text in enumerate(texts)]

    def is_finished(self, item: ItemInput, model: ServedModel) -> bool:
        """Whether what a policy wrote was scored as finished."""
        return item.finished or (isinstance(item.completion, str) and model.renderer.split_end(item.completion)[1])
