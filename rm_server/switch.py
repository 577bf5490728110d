"""Change what a running server scores with: another checkpoint, or nothing for a while.

The new model is loaded and verified on a thread of its own while the old one goes on. Then new requests go to the new
one, between two batches; the old one finishes what it was asked, and is freed. What cannot be loaded changes nothing.

Invariant: at every moment one model takes the new requests, or none with a reason; one change happens at a time.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rm_server.batches import probe
from rm_server.engine import Engine, check_limits
from rm_server.errors import (
    BusyError,
    CheckpointRefusedError,
    DeadlineExceededError,
    InternalError,
    NotEnoughMemoryError,
    RewardIdMismatchError,
    ServerError,
    describe_exception,
)
from rm_server.loader import load_model, measure_model
from rm_server.memory import Need, resident_bytes, return_freed_memory, why_too_little
from rm_server.scorer import ServedModel, is_out_of_memory
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings

logger = logging.getLogger("rm_server")

LOAD_SECONDS = 1800.0
"""How long loading a checkpoint may take; a download from the hub that hangs would end no earlier."""


@dataclass(frozen=True)
class Swapped:
    """What a swap did. ``is_freed``: the old model has answered all it was asked, and its memory is given back."""

    reward_id: str
    model: str
    previous_reward_id: str
    previous_model: str
    load_seconds: float
    is_freed: bool


class Switch:
    """The changes of one service. ``load`` and ``measure`` run on a thread of their own and may take their time."""

    def __init__(
        self,
        service: ScoringService,
        load: Callable[[ServerSettings, str], ServedModel] = load_model,
        measure: Callable[[ServerSettings, str], Need] = measure_model,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self._service = service
        self._load = load
        self._measure = measure
        self._load_seconds = load_seconds
        self._is_busy = False
        self._leaving: asyncio.Task[None] | None = None
        self._thread = _loader_thread()

    async def swap(self, checkpoint: str, reward_id: str | None = None) -> Swapped:
        """Serve another checkpoint. Waits for the old model to be freed, ``grace_seconds`` at most.

        ``reward_id`` is the one expected of it. Raises ServerError, and then nothing has changed.
        """
        service = self._service
        with self._alone():
            if (error := service.why_not_serving()) is not None:
                raise error
            if self._leaving is not None and not self._leaving.done():
                raise BusyError("the model before the present one is still answering; try again", 5)
            old = service.engine
            assert old is not None, "this is a bug: serving without a model"
            start = service.clock()
            logger.info("loading %s beside %s", checkpoint, old.model.name)
            try:
                engine = await self._load_beside(checkpoint, reward_id, old.model.device)
            except ServerError as refusal:
                logger.warning("the checkpoint is not served: %s", refusal.message)
                service.metrics.swaps.labels(outcome=refusal.type).inc()
                raise
            if (error := service.why_not_serving()) is not None:
                raise error
            load_seconds = service.clock() - start
            service.serve_with(engine)
            service.metrics.swaps.labels(outcome="succeeded").inc()
            logger.info("serving %s instead of %s", engine.model.reward_id, old.model.reward_id)
            # A bare name, so that nothing here keeps the old model alive.
            self._leaving = asyncio.create_task(self._free(old), name="rm-free-old-model")
            before = (old.model.reward_id, old.model.name)
            del old
            done, _ = await asyncio.wait({self._leaving}, timeout=service.settings.grace_seconds)
            return Swapped(engine.model.reward_id, engine.model.name, *before, round(load_seconds, 3), bool(done))

    async def sleep(self) -> int:
        """Finish what was admitted (``grace_seconds`` at most) and free the device. Returns the bytes given back.

        New requests get AsleepError until ``wake``. Sleeping twice is no error.
        """
        service = self._service
        with self._alone():
            if service.state == "asleep":
                return 0
            if (error := service.why_not_serving()) is not None:
                raise error
            assert service.engine is not None, "this is a bug: serving without a model"
            before = resident_bytes() or 0
            await service.fall_asleep()
            engine = service.engine
            try:
                freed = await service.on_worker(lambda: _leave_device(engine))
            except Exception as failure:  # the host's memory may be full; part of the model may have moved
                logger.error("the model cannot leave its device: %s", describe_exception(failure))
                await self._bring_back(engine.model)
                if is_out_of_memory(failure):
                    raise NotEnoughMemoryError(
                        "not enough memory on the host to sleep; the server goes on", 5
                    ) from None
                raise InternalError("the model cannot leave its device; it goes on") from None
            logger.info("asleep: the model is off its device")
            return max(freed, before - (resident_bytes() or before), 0)

    async def wake(self) -> None:
        """Bring the model back, prove it with a forward, and serve again. Raises ServerError, and sleeps on."""
        service = self._service
        with self._alone():
            if service.state != "asleep":
                if (error := service.why_not_serving()) is not None:
                    raise error
                return
            assert service.engine is not None, "this is a bug: asleep without a model"
            await self._bring_back(service.engine.model)
            logger.info("awake: serving %s", service.engine.model.reward_id)

    def close(self) -> None:
        """End the loader's thread. A load that is under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _bring_back(self, model: ServedModel) -> None:
        try:
            await self._service.on_worker(lambda: _return_to_device(model))
        except Exception as error:  # whatever a device raises; the caller is told, and the server sleeps on
            logger.error("the model cannot be woken: %s", describe_exception(error))
            if is_out_of_memory(error):
                raise NotEnoughMemoryError("not enough memory on the device to wake", 5) from None
            raise InternalError("the model cannot be brought back; the server's log says where") from None
        self._service.wake_up()

    async def _load_beside(self, checkpoint: str, reward_id: str | None, device: Any) -> Engine:
        """What ``_prepare`` gives. One that takes too long is left to itself, and what it gives is dropped."""
        loading = asyncio.get_running_loop().run_in_executor(self._thread, self._prepare, checkpoint, reward_id, device)
        await asyncio.wait({loading}, timeout=self._load_seconds)
        if loading.done():
            return loading.result()
        loading.add_done_callback(_drop)
        self.close()
        self._thread = _loader_thread()  # the other one is not free before the load ends, if it ever does
        raise DeadlineExceededError(f"{checkpoint}: was not loaded within {self._load_seconds:g} s, which is the limit")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_busy:
            raise BusyError("another change of the model is under way; try again when it is done", 5)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _prepare(self, checkpoint: str, reward_id: str | None, device: Any) -> Engine:
        """Load and verify, beside a model on ``device``. On the loader's thread; raises ServerError."""
        settings, rewards = self._service.settings, self._service.rewards
        if rewards is not None and rewards.recipe.model_part is None:
            raise CheckpointRefusedError("the recipe has no part of kind model: nothing would use a checkpoint")
        self._service.loads.add(load := object())
        try:
            lacking = why_too_little(self._measure(settings, checkpoint), device, settings.memory_fraction)
            if lacking is not None:
                raise NotEnoughMemoryError(f"{checkpoint}: {lacking}", 30)
            model = self._service.dress(self._load(settings, checkpoint))
            if reward_id is not None and model.reward_id != reward_id:
                raise RewardIdMismatchError(f"reward_id: {checkpoint} is {model.reward_id}, not the one expected")
            check_limits(settings, model)
            probe(model)
            return Engine(model, settings, self._service.clock)
        except ServerError:
            raise
        except (ValueError, OSError) as error:  # how a checkpoint that cannot be used is reported
            raise CheckpointRefusedError(" ".join(str(error).split()) or type(error).__name__) from None
        except Exception as error:  # whatever loading raises: the old model goes on, and the caller is told
            logger.error("loading a checkpoint failed: %s", describe_exception(error))
            if is_out_of_memory(error):
                raise NotEnoughMemoryError(f"{checkpoint}: memory ran out while it was loaded", 30) from None
            raise CheckpointRefusedError(f"{checkpoint}: cannot be loaded; the server's log says where") from None
        finally:
            self._service.loads.discard(load)

    async def _free(self, old: Engine) -> None:
        """Wait for the last answer of an engine and give its memory back."""
        service = self._service
        await old.is_idle.wait()
        service.retire(old)
        # On the worker's thread, behind whatever it was given before.
        await service.on_worker(old.scorer.release)
        del old
        frozen = gc.get_freeze_count() > 0
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
        return_freed_memory()
        logger.info("the old model is freed")


def _loader_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rm-loader")


def _drop(late: "asyncio.Future[Engine]") -> None:
    if late.cancelled() or late.exception() is not None:
        return
    logger.warning("a checkpoint that took too long is loaded now, and dropped")


def _leave_device(engine: Engine) -> int:
    engine.scorer.release()
    freed = engine.model.leave_device()
    return_freed_memory()
    return freed


def _return_to_device(model: ServedModel) -> None:
    model.return_to_device()
    probe(model)
