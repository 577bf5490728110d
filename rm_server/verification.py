"""Rewards by recipe: run the verifiers beside the model, and make one reward of the parts.

Invariant: an item's reward is ``combine(recipe.reward, components)`` of the components that are answered beside it, or
it is an error. What a verifier could not decide is never a number.
"""

import asyncio
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np

from rm_server.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NonFiniteRewardError,
    OverloadedError,
    ServerError,
    describe_exception,
)
from rm_server.groups import Request
from rm_server.inputs import ItemInput, Text
from rm_server.metrics import Metrics
from rm_server.recipe import MissingComponentError, Recipe, combine, identity_of, load_recipe, standards_of
from rm_server.schema import ScoreRequest
from rm_server.scorer import ServedModel
from rm_server.settings import ServerSettings, SettingsError
from rm_server.verifiers.answers import Answer
from rm_server.verifiers.parts import NEEDS_REFERENCE, Standard
from rm_server.verifiers.pool import VerifierPool

logger = logging.getLogger("rm_server")

Value = float | ServerError | None
"""What became of one part of one item; None: not known yet."""
IN_FLIGHT_PER_WORKER = 2
"""Answers of one request that are handed to a worker's queue at once: requests take turns."""


class RecipeRewards:
    """The verifiers of one server and what is made of their values. All but ``start`` on the event loop's thread."""

    def __init__(self, recipe: Recipe, num_workers: int, max_items: int, metrics: Metrics | None = None) -> None:
        self.recipe = recipe
        self.pool = VerifierPool(recipe.verifiers, num_workers)
        if metrics is not None:
            self.pool.on_replaced = metrics.verifiers_replaced.inc
            self.pool.on_done = lambda part, seconds: metrics.verifier_seconds.labels(part=part).observe(seconds)
        self.num_items = 0
        """Items that are being verified."""
        self._max_items = max_items
        self._open: set[Verdicts] = set()
        self._line: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """Requests that wait for room, first come first served, and how many items each has."""

    @property
    def uses_reference(self) -> bool:
        """Whether any part compares answers with the group's ``reference``."""
        return any(isinstance(part, NEEDS_REFERENCE) for part in self.recipe.parts.values())

    def start(self) -> None:
        """Start the worker processes. Blocks; raises ValueError in words where they cannot be started."""
        if self.recipe.verifiers:
            self.pool.start()

    def dress(self, model: ServedModel | None) -> ServedModel:
        """A model as a server with this recipe shows it: with the recipe's ``reward_id``. None: there is no model.

        Raises SettingsError where the recipe wants of the checkpoint what it does not have.
        """
        if model is not None and self.recipe.model_part is None:
            raise SettingsError("the recipe has no part of kind model: a checkpoint would score nothing")
        record = model.record if model is not None else None
        has_spread = record is not None and record.num_eval > 0
        mean, std = (record.reward_mean, record.reward_std) if record is not None and has_spread else (None, None)
        standards = standards_of(self.recipe, mean, std)
        reward_id = identity_of(self.recipe, model.reward_id if model is not None else None, self.pool.versions)
        return cast(ServedModel, RecipeModel(model if model is not None else NoModel(self.pool), reward_id, standards))

    def describe(self, model: ServedModel) -> dict[str, Any]:
        """What `/info` says beside the model's own facts."""
        dressed = cast("RecipeModel", model)
        return {
            "recipe": self.recipe.as_json(),
            "model_reward_id": dressed.model_reward_id,
            "standards": {name: standard.model_dump() for name, standard in dressed.standards.items()},
            "verifier_versions": self.pool.versions,
            "num_verifier_workers": self.pool.num_workers if self.recipe.verifiers else 0,
        }

    async def begin(
        self, inputs: Sequence[ItemInput], model: ServedModel, seconds: float, *, is_templated: bool = False
    ) -> "Verdicts":
        """Start verifying a request's items, as soon as there is room for them.

        ``seconds``: how long to wait for it. ``is_templated``: their texts end with the template's end tokens. Raises
        OverloadedError where too many are under way all that time, or the error that turned the line away.
        """
        await self._enter(len(inputs), seconds)
        verdicts = Verdicts(self, inputs, model, is_templated=is_templated)
        self._open.add(verdicts)
        return verdicts

    async def _enter(self, num_items: int, seconds: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[turn] = num_items
        self._let_in()
        try:
            if not turn.done():
                await asyncio.wait({turn}, timeout=max(seconds, 0))
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:  # let in and gone at the same moment
                self.num_items -= num_items
            raise
        finally:
            self._line.pop(turn, None)
            self._let_in()
        if not turn.done():
            raise OverloadedError(
                f"no room before the deadline: {self.num_items} items are being verified, the limit is "
                f"{self._max_items}",
                5,
            )
        turn.result()

    def _let_in(self) -> None:
        while self._line:
            turn, num_items = next(iter(self._line.items()))
            if self.num_items and self.num_items + num_items > self._max_items:
                return
            del self._line[turn]
            self.num_items += num_items
            turn.set_result(None)

    def turn_away(self, error: ServerError) -> None:
        """Give everybody who waits for room this error."""
        while self._line:
            turn, _ = self._line.popitem(last=False)
            turn.set_exception(error)

    def end(self, verdicts: "Verdicts") -> None:
        """Forget a request; what it still waits for is dropped."""
        if verdicts in self._open:
            self._open.remove(verdicts)
            self.num_items -= verdicts.num_items
            verdicts.task.cancel()
            self._let_in()

    def abandon_all(self, error: ServerError) -> None:
        """Give everything that is not verified this error."""
        self.turn_away(error)
        for verdicts in self._open:
            verdicts.abandon(error)

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()


class Verdicts:
    """What the verifiers say about one request's items: ``values[part][slot]``, filled while ``task`` runs."""

    def __init__(
        self, rewards: RecipeRewards, inputs: Sequence[ItemInput], model: ServedModel, *, is_templated: bool
    ) -> None:
        self.num_items = len(inputs)
        self.values: dict[str, list[Value]] = {name: [None] * len(inputs) for name in rewards.recipe.verifiers}
        self._rewards = rewards
        self._is_templated = is_templated
        self._model = cast("RecipeModel", model)
        self._error: ServerError = DeadlineExceededError("was not verified before the deadline")
        self.task = asyncio.create_task(self._run(inputs), name="rm-verdicts")

    def abandon(self, error: ServerError) -> None:
        """Stop; what is not known gets this error."""
        self._error = error
        self.task.cancel()

    def combine_into(self, request: Request) -> None:
        """Replace the model's outcomes by the recipe's, and note the components. Call when the model's are all in."""
        recipe, standards = self._rewards.recipe, self._model.standards
        # What a model says about its own reward (the spread of its heads) stays, under names that no part can have.
        own = {f"{recipe.model_part}.{key}": values for key, values in (request.components or {}).items()}
        request.components = {**{name: [None] * self.num_items for name in recipe.parts}, **own}
        for slot in range(self.num_items):
            problems: dict[str, ServerError] = {}
            components: dict[str, float] = {}
            for name in recipe.parts:
                value: Value = self.values[name][slot] if name in self.values else request.outcome(slot)
                if isinstance(value, ServerError) or value is None:
                    problems[name] = value or self._error
                    continue
                standard = standards.get(name)
                value = value if standard is None else (value - standard.mean) / standard.std
                if math.isfinite(value):
                    components[name] = request.components[name][slot] = value
                else:
                    problems[name] = NonFiniteRewardError(f"{name}: its value is not a finite number")
            request.replace(slot, _reward(recipe, components, problems))

    async def _run(self, inputs: Sequence[ItemInput]) -> None:
        pool, window = self._rewards.pool, set[asyncio.Task[None]]()
        limit = IN_FLIGHT_PER_WORKER * pool.num_workers
        try:
            for slot, item in enumerate(inputs):
                answer = answer_of(item, self._model, is_templated=self._is_templated)
                for name, values in self.values.items():
                    if isinstance(answer, ServerError):
                        values[slot] = answer
                        continue
                    if len(window) >= limit:
                        _, window = await asyncio.wait(window, return_when=asyncio.FIRST_COMPLETED)
                    window.add(asyncio.create_task(_settle(values, slot, item.path, pool.submit(name, answer))))
            if window:
                await asyncio.wait(window)
        finally:
            for waiting in window:
                waiting.cancel()


async def _settle(values: list[Value], slot: int, path: str, future: "Future[float]") -> None:
    try:
        value: float = await asyncio.wrap_future(future)
        values[slot] = value
    except ServerError as error:
        error.message = f"{path}: {error.message}"
        values[slot] = error
    except Exception as error:  # a bug of ours; it must reach this item's caller
        logger.error("a verifier failed: %s", describe_exception(error))
        values[slot] = InternalError(f"{path}: verifying failed; the server's log says where")


def _reward(recipe: Recipe, components: dict[str, float], problems: dict[str, ServerError]) -> float | ServerError:
    try:
        reward = combine(recipe.reward, components)
    except MissingComponentError as missing:
        return problems[missing.name]
    return reward if math.isfinite(reward) else NonFiniteRewardError("the recipe gives no finite number for this item")


def answer_of(item: ItemInput, model: ServedModel, *, is_templated: bool = False) -> Answer | ServerError:
    """The answer alone, as verifiers read it: the last message of a conversation, or the text after the prompt."""
    if item.ids is not None:
        return InvalidRequestError(f"{item.path}: this server's verifiers read text; send text, not token ids")
    text = item.answer if item.answer is not None else _text_of(item.completion)
    finished = item.finished
    if item.is_templated or is_templated:
        text, is_ended = model.renderer.split_end(text)
        finished = is_ended if finished is None else finished
    return Answer(text, item.reference, finished is not False)


def _text_of(completion: Text | None) -> str:
    if not isinstance(completion, list):
        return completion or ""
    content = completion[-1].content
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content or ""


class RecipeModel:
    """A served model whose ``reward_id`` is the recipe's. Everything else is the model's own."""

    def __init__(self, model: "ServedModel | NoModel", reward_id: str, standards: dict[str, Standard]) -> None:
        self._model = model
        self.reward_id = reward_id
        self.model_reward_id = model.reward_id
        self.standards = standards
        record = model.record
        # What the checkpoint stores is the spread of its own rewards; that of the recipe's is not known.
        self.record = (
            None if record is None else record.model_copy(update={"reward_mean": 0.0, "reward_std": 1.0, "num_eval": 0})
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class NoModel:
    """What stands where a model would be on a server with verifiers only. Nothing is scored but the probe, which
    succeeds while the verifiers' processes can be made."""

    name = "verifiers"
    reward_id = None
    tokenizer_hash = None
    max_length = 1
    vocab_size = 1
    dtype = "none"
    dtype_reason = "there is no model"
    device = "none"
    shares_prefixes = False
    sharing_off = "there is no model"
    token_rewards_off = "there is no model"
    num_heads = 1
    record: Any = None

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool

    @property
    def renderer(self) -> "NoModel":
        return self

    @property
    def rules(self) -> None:
        """There are no rendering rules."""

    def split_end(self, text: str) -> tuple[str, bool]:
        """Without a tokenizer no end token is known: the text as it is, and finished."""
        return text, True

    def score_batch(self, sequences: Sequence[Sequence[int]], **_: Any) -> Any:
        """The probe's forward."""
        self._pool.check()
        return _Zeros(np.zeros(len(sequences), dtype=np.float32))

    def leave_device(self) -> int:
        """There is nothing to free."""
        return 0

    def return_to_device(self) -> None:
        """There is nothing to bring back."""


class _Zeros:
    def __init__(self, rewards: np.ndarray) -> None:
        self.rewards = rewards


def refuse_unused_reference(request: ScoreRequest, rewards: RecipeRewards | None) -> None:
    """A reference that nothing compares with is refused, as every field that would be ignored. Raises ServerError."""
    if rewards is not None and rewards.uses_reference:
        return
    places = [f"groups[{i}]." for i, group in enumerate(request.groups or ()) if group.reference is not None]
    places += [""] if request.reference is not None else []
    if places:
        raise InvalidRequestError(
            f"{places[0]}reference: is not supported by this server: no part of its reward compares answers with one"
        )


def rewards_of(settings: ServerSettings, metrics: Metrics) -> RecipeRewards | None:
    """What the settings' recipe describes; None where there is none. Raises SettingsError for one that cannot be."""
    path, checkpoint = settings.recipe, settings.checkpoint
    if path is None:
        return None
    recipe = load_recipe(Path(path))
    if recipe.model_part is not None and checkpoint is None:
        raise SettingsError(f"{path}: parts.{recipe.model_part}: needs a reward model; give a CHECKPOINT")
    if recipe.model_part is None and checkpoint is not None:
        raise SettingsError(
            f"{path}: no part is of kind model, so CHECKPOINT would score nothing; leave it out, or add "
            "model: {kind: model} to parts"
        )
    num_workers = settings.num_verifier_workers or len(os.sched_getaffinity(0))
    return RecipeRewards(recipe, num_workers, settings.max_queued_items, metrics)
