"""The training loop: evaluate, save, stop, step, log.

Invariant: the loss of a step is the mean over all of its pairs, whatever the number of micro-batches and processes.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn.parallel import DistributedDataParallel

from rm_core.model import RewardModel
from rm_train.batching import split_by_tokens, step_batches
from rm_train.config import FitConfig
from rm_train.divergence import DivergenceWatch
from rm_train.encode import EncodedPair
from rm_train.losses import BootstrapSamples, head_losses, pair_losses
from rm_train.sharding import load_optimizer_state, num_passes, shard, whole, whole_optimizer_state
from rm_train.state import MetricsFile, load_trainable, save_state, trainable_state

Evaluate = Callable[[], dict[str, float]]


class DivergedError(RuntimeError):
    """The loss became NaN or infinite. One line that names the step and what to change."""


@dataclass
class _StepTotals:
    """Sums over a step's pairs, on every process: loss, correct (ties half), reward differences, tokens."""

    loss: float = 0.0
    correct: float = 0.0
    margin: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0


def count_steps(config: FitConfig, num_pairs: int) -> int:
    """Optimizer steps of the whole run."""
    return config.train.max_steps or config.train.epochs * -(-num_pairs // config.train.batch_size)


def learning_rate_factor(done: int, num_steps: int, warmup_ratio: float, schedule: str) -> float:
    """Factor on the learning rate of the step that follows ``done`` steps.

    Warm-up rises in equal parts towards 1 and begins above zero, so that no step is done in vain; then comes the
    schedule: ``linear`` or ``cosine`` fall to zero behind the last step, ``constant`` stays.
    """
    warmup = math.ceil(warmup_ratio * num_steps)
    if done < warmup:
        return (done + 1) / (warmup + 1)
    progress = (done - warmup) / max(num_steps - warmup, 1)
    if schedule == "linear":
        return max(1.0 - progress, 0.0)
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))) if schedule == "cosine" else 1.0


def train(
    model: RewardModel,
    pairs: Sequence[EncodedPair],
    config: FitConfig,
    directory: Path,
    accelerator: Accelerator,
    *,
    identity: dict[str, Any],
    state: dict[str, Any] | None,
    evaluate: Evaluate,
    on_step: Callable[[int, int, dict[str, Any]], None],
) -> int:
    """Train ``model`` in place and return the number of steps done.

    ``identity`` says what run this is (a resume must match it); ``state`` is what an interrupted run saved, None to
    start anew; ``evaluate`` scores the evaluation pairs; ``on_step`` is called as (steps done, steps in all, metrics)
    on the main process. Raises DivergedError.
    """
    settings = config.train
    num_steps = count_steps(config, len(pairs))
    if settings.shard:
        shard(model.network, accelerator)
    optimizer = _optimizer(model, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: learning_rate_factor(done, num_steps, settings.warmup_ratio, settings.schedule)
    )
    torch.manual_seed(config.run.seed * 1_000_003 + accelerator.process_index)  # dropout differs between processes
    metrics = MetricsFile(directory / "metrics.jsonl") if accelerator.is_main_process else None
    step, best, waited = 0, None, 0
    keeps_best = settings.keep_best or settings.early_stopping_patience is not None
    if state is not None:
        load_trainable(model.network, state["weights"])
        load_optimizer_state(optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        _set_rng(state["rng"][accelerator.process_index])
        step, best, waited = state["step"], state["best"], state["waited"]
        if metrics:
            metrics.cut(state["metrics_position"])
    elif metrics:
        metrics.cut(0)
    copies = accelerator.num_processes > 1 and not settings.shard
    network = accelerator.prepare_model(model.network) if copies else model.network
    samples = BootstrapSamples(pairs, config.head.count, config.run.seed)
    watch = DivergenceWatch(**(state.get("watch", {}) if state is not None else {}))
    started = time.perf_counter() - (state.get("seconds", 0.0) if state is not None else 0.0)
    prompts = [item.prompt for item in pairs] if settings.group_by_prompt else None
    for epoch, indices in step_batches(len(pairs), settings.batch_size, config.run.seed, step, prompts):
        # ---- evaluate
        if settings.eval_every and step and (step % settings.eval_every == 0 or step == num_steps):
            found = evaluate()
            if metrics:
                metrics.write({"step": step, **{f"eval_{name}": value for name, value in found.items()}})
            accelerator.log({f"eval/{name}": value for name, value in found.items()}, step=step)
            if best is None or found["loss"] < best["loss"]:
                weights = trainable_state(model.network) if keeps_best else {}
                best, waited = {"loss": found["loss"], "step": step, "weights": weights}, 0
            else:
                waited += 1
        # ---- stop
        stopped = settings.early_stopping_patience is not None and waited >= settings.early_stopping_patience
        if step == num_steps or stopped:
            break
        # ---- step
        model.network.train()
        totals = _forward_backward(
            network, accelerator, model, [pairs[index] for index in indices], config, samples.weights(indices)
        )
        if not math.isfinite(totals.loss):
            rows = ", ".join(dict.fromkeys(pairs[index].pair.where for index in indices[:3]))
            raise DivergedError(f"step {step + 1}: the loss is {totals.loss} (rows {rows}, …); {_cure(config)}")
        norm = float(whole(torch.nn.utils.clip_grad_norm_(_trainable(model), settings.max_grad_norm or math.inf)))
        if not math.isfinite(norm):
            raise DivergedError(f"step {step + 1}: the gradient's norm is {norm}; {_cure(config)}")
        rate = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        # ---- log
        line = {
            "step": step,
            "epoch": epoch,
            "loss": totals.loss,
            "accuracy": totals.correct,
            "margin": totals.margin,
            "grad_norm": norm,
            "learning_rate": rate,
            "pairs": len(indices),
            "tokens": totals.tokens,
            "computed_tokens": totals.computed_tokens,
            "seconds": round(time.perf_counter() - started, 3),
        }
        if metrics:
            metrics.write(line)
            on_step(step, num_steps, line)
        accelerator.log({f"train/{name}": value for name, value in line.items() if name != "step"}, step=step)
        if why := watch.see(totals.loss):
            raise DivergedError(f"step {step}: {why}; {_cure(config)}")
        # ---- save
        if settings.save_every and (step % settings.save_every == 0 or step == num_steps):
            rng = _gather_rng(accelerator)
            if metrics or settings.shard:  # collective where the weights are divided
                weights, of_optimizer = trainable_state(model.network), whole_optimizer_state(optimizer)
            if metrics:
                save_state(
                    directory,
                    {
                        "identity": identity,
                        "step": step,
                        "best": best,
                        "waited": waited,
                        "weights": weights,
                        "optimizer": of_optimizer,
                        "scheduler": scheduler.state_dict(),
                        "rng": rng,
                        "metrics_position": metrics.position(),
                        "watch": watch.state,
                        "seconds": time.perf_counter() - started,
                    },
                )
    if best is not None and keeps_best:
        load_trainable(model.network, best["weights"])
    return step


def _forward_backward(
    network: torch.nn.Module,
    accelerator: Accelerator,
    model: RewardModel,
    step_pairs: list[EncodedPair],
    config: FitConfig,
    samples: list[list[float]] | None,
) -> _StepTotals:
    """Accumulate the gradient of the step's mean loss; return the step's means over all processes.

    ``samples`` are the weights of each pair in the loss of each head, [B][K]; None with one head. What is returned is
    then that of the heads' mean.
    """
    num_pairs = sum(item.pair.weight for item in step_pairs) or 1.0
    weighed = list(zip(step_pairs, samples or [[1.0]] * len(step_pairs), strict=True))
    mine = weighed[accelerator.process_index :: accelerator.num_processes]
    micro_batches = split_by_tokens(
        mine,
        cost=lambda items: model.network.batch_tokens(_sequences([item for item, _ in items])),
        size=lambda item: len(item[0].chosen) + len(item[0].rejected),
        prompt=lambda item: item[0].prompt,
        max_tokens=config.train.max_tokens,
    )
    # A process with fewer pairs, or none (a short last step), takes part in every exchange, at the end with weight 0.
    wanted = num_passes(accelerator, len(micro_batches)) if config.train.shard else 1
    passes = [*micro_batches, *[weighed[:1]] * (wanted - len(micro_batches))]
    sums = torch.zeros(5, dtype=torch.float64)
    for number, micro_batch in enumerate(passes):
        idle = number >= len(micro_batches)
        items = [item for item, _ in micro_batch]
        sequences = _sequences(items)
        with _sync_only(accelerator, network, last=number == len(passes) - 1), _compute(model):
            rewards = network(sequences)
            chosen, rejected = rewards[0::2], rewards[1::2]
            if samples is None:
                losses = trained = pair_losses(chosen, rejected, items, config.loss)
            else:
                trained = head_losses(chosen, rejected, items, config.loss, [weights for _, weights in micro_batch])
                chosen, rejected = chosen.detach().mean(dim=1), rejected.detach().mean(dim=1)
                losses = pair_losses(chosen, rejected, items, config.loss)
            # DDP averages over processes, the step's mean is a sum over them.
            loss = trained.sum() * (0.0 if idle else accelerator.num_processes / num_pairs)
            loss.backward()
        if not idle:
            difference = (chosen - rejected).detach().double()
            even = torch.tensor([item.pair.label == 0.5 for item in items], device=difference.device)
            right = ((difference > 0).double() + 0.5 * (difference == 0).double()).masked_fill(even, 0.5)
            tokens = sum(map(len, sequences))
            computed = model.network.batch_tokens(sequences)
            sums += torch.tensor(
                [float(losses.detach().sum()), float(right.sum()), float(difference.sum()), tokens, computed],
                dtype=torch.float64,
            )
    if accelerator.num_processes > 1:
        sums = accelerator.reduce(sums.float().to(accelerator.device), reduction="sum").double().cpu()
    loss_sum, correct, margin, tokens_sum, computed_sum = sums.tolist()
    count = len(step_pairs)
    return _StepTotals(loss_sum / num_pairs, correct / count, margin / count, int(tokens_sum), int(computed_sum))


def _sequences(items: Sequence[EncodedPair]) -> list[list[int]]:
    return [ids for item in items for ids in (item.chosen, item.rejected)]


@contextlib.contextmanager
def _compute(model: RewardModel) -> Iterator[None]:
    """The forward's numbers: fp32 master weights of LoRA and head, multiplied in the backbone's dtype."""
    from peft.helpers import disable_input_dtype_casting

    with contextlib.ExitStack() as stack:
        if model.compute.dtype != torch.float32:
            stack.enter_context(torch.autocast(model.device.type, dtype=model.compute.dtype))
            if model.kind == "adapter":
                # peft would turn LoRA's input into fp32 first, and autocast turn it back
                stack.enter_context(disable_input_dtype_casting(model.network.classifier))
        yield


@contextlib.contextmanager
def _sync_only(accelerator: Accelerator, network: torch.nn.Module, *, last: bool) -> Iterator[None]:
    """Exchange gradients between copies in the step's last backward only; divided ones are exchanged in each."""
    if isinstance(network, DistributedDataParallel) and not last:
        with accelerator.no_sync(network):
            yield
    else:
        yield


def _optimizer(model: RewardModel, config: FitConfig) -> torch.optim.AdamW:
    settings = config.train
    backbone = {id(parameter) for parameter in model.network.backbone.parameters()}
    trainable = _trainable(model)
    groups = [
        {"params": [p for p in trainable if id(p) in backbone], "lr": settings.learning_rate},
        {
            "params": [p for p in trainable if id(p) not in backbone],
            "lr": config.head.learning_rate or settings.learning_rate,
        },
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=settings.weight_decay)


def _trainable(model: RewardModel) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.network.parameters() if parameter.requires_grad]


def _gather_rng(accelerator: Accelerator) -> list[dict[str, torch.Tensor]]:
    """Every process's generator states, in the order of the processes."""
    mine = {"cpu": torch.get_rng_state()}
    if accelerator.device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state()  # dropout on a GPU draws from its own generator
    if accelerator.num_processes == 1:
        return [mine]
    found = gather_object([(accelerator.process_index, mine)])
    return [states for _, states in sorted(found, key=lambda item: item[0])]


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _cure(config: FitConfig) -> str:
    rate = f"lower train.learning_rate (now {config.train.learning_rate:g})"
    return rate if config.model.dtype == "float32" else f"{rate}, or set model.dtype: float32"
