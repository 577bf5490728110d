"""``rm-train fit``: from a config to a frozen checkpoint.

Invariant: what the checkpoint says was measured was measured on the files in it, loaded again, or in the training
model where the config says so.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import peft
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import gather_object

from rm_core.checkpoint import CheckpointRecord, Measured, write_checkpoint
from rm_core.hardware import choose_compute
from rm_core.model import RewardModel
from rm_train.baselines import bag_of_words_accuracy
from rm_train.config import FitConfig, dump_resolved
from rm_train.config_file import ConfigError
from rm_train.data import FitData, data_fingerprint, load_fit_data
from rm_train.encode import EncodedPair, count_truncated, encode_pairs
from rm_train.evaluation import Rewards, measured, quick_metrics, score_pairs
from rm_train.loop import DivergedError, train
from rm_train.rows import first_line
from rm_train.state import forget_state, load_state


class Reporter(Protocol):
    """How ``fit`` tells the user what it does; the command line draws progress bars, tests keep quiet."""

    def say(self, text: str) -> None: ...

    def bar(self, title: str, total: int) -> AbstractContextManager[Callable[..., None]]:
        """A progress bar; the function it gives takes (advance, text)."""
        ...


@dataclass(frozen=True)
class FitResult:
    """Where the run lies, its checkpoint's record, and the number of optimizer steps."""

    directory: Path
    record: CheckpointRecord | None
    steps: int


def fit(config: FitConfig, reporter: Reporter, *, resume: bool = False) -> FitResult:
    """Train, evaluate, write ``runs/NAME/checkpoint``.

    Under ``torchrun`` or ``accelerate launch`` every process calls this; the first one writes, the others return a
    result without a record. Raises DataError, CheckpointError, DivergedError or ResumeError, each one line.
    """
    _check_trackers(config.train.report_to)
    accelerator = Accelerator(
        log_with=list(config.train.report_to) or None,
        project_dir=str(_run_directory(config)),
        cpu=not torch.cuda.is_available(),
    )
    directory = _run_directory(config)
    say = reporter.say if accelerator.is_main_process else lambda text: None

    data = load_fit_data(config.data, config.run.seed)
    say(f"data: {len(data.train)} training and {len(data.eval)} evaluation pairs{_warnings(data)}")
    fingerprint = {"train": data_fingerprint(data.train), "eval": data_fingerprint(data.eval)}
    identity = _identity(config, fingerprint, accelerator)
    state = load_state(directory, identity) if resume else None
    model = _build_model(config, str(accelerator.device))
    if config.model.gradient_checkpointing:
        model.network.use_gradient_checkpointing()
    trainable = sum(p.numel() for p in model.network.parameters() if p.requires_grad)
    say(f"model: {config.model.base}, {trainable:,} trainable weights, {model.device.type}, {model.dtype_reason}")

    limit = min(config.model.max_length, model.max_length)
    train_pairs = encode_pairs(data.train, model.renderer, limit)
    eval_pairs = encode_pairs(data.eval, model.renderer, limit)
    for name, encoded in (("training", train_pairs), ("evaluation", eval_pairs)):
        if cut := count_truncated(encoded):
            say(f"{name}: {cut} of {len(encoded)} pairs are over {limit} tokens and lost the start of their prompts")
    if accelerator.is_main_process:
        # Not before everything is known to fit: a run that is refused must leave an earlier one as it was.
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(dump_resolved(config), encoding="utf-8")
        if state is None:
            forget_state(directory)

    def evaluate() -> dict[str, float]:
        return quick_metrics(_finite(_score_on_all_processes(model, eval_pairs, config, accelerator), config))

    if config.train.report_to:
        accelerator.init_trackers("betterthan", config=_flat(json.loads(dump_resolved(config))))
    with reporter.bar("training", 1) if accelerator.is_main_process else _no_bar() as advance:
        steps = train(
            model,
            train_pairs,
            config,
            directory,
            accelerator,
            identity=identity,
            state=state,
            evaluate=evaluate,
            on_step=lambda step, total, line: advance(step / total, _describe(step, total, line)),
        )
    in_training = None
    if config.train.final_eval_dtype == "compute":
        in_training = _score_on_all_processes(model, eval_pairs, config, accelerator)
    record = None
    if accelerator.is_main_process:
        say(f"evaluating {len(eval_pairs)} pairs and writing {directory / 'checkpoint'}")
        record = write_checkpoint(
            model,
            directory / "checkpoint",
            training_length=limit,
            measure=lambda reloaded: _measure(reloaded, in_training, data, eval_pairs, config, reporter),
            data={
                "fingerprint": fingerprint,
                "train_pairs": len(data.train),
                "eval_pairs": len(data.eval),
                "truncated": {"train": count_truncated(train_pairs), "eval": count_truncated(eval_pairs)},
                "leaked_prompts": len(data.leaks),
                "sources": [source.path for source in config.data.train],
                "steps": steps,
            },
        )
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return FitResult(directory, record, steps)


def _measure(
    reloaded: RewardModel,
    in_training: Rewards | None,
    data: FitData,
    eval_pairs: list[EncodedPair],
    config: FitConfig,
    reporter: Reporter,
) -> Measured:
    rewards = in_training
    if rewards is None:
        with reporter.bar("evaluating", 2 * len(eval_pairs)) as advance:
            rewards = score_pairs(reloaded, eval_pairs, max_tokens=config.train.max_tokens, progress=advance)
    dtype = reloaded.dtype if in_training is None else "compute"
    return measured(
        _finite(rewards, config),
        eval_pairs,
        {"dtype": dtype, "bag_of_words": bag_of_words_accuracy(data.train, data.eval)},
    )


def _score_on_all_processes(
    model: RewardModel, encoded: list[EncodedPair], config: FitConfig, accelerator: Accelerator
) -> Rewards:
    """Each process scores its share; all get all rewards, in order."""
    was_training = model.network.training
    model.network.eval()
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    mine = score_pairs(model, encoded[share], max_tokens=config.train.max_tokens)
    model.network.train(was_training)
    if accelerator.num_processes == 1:
        return mine
    parts = gather_object([(accelerator.process_index, mine.chosen, mine.rejected)])
    return Rewards.interleave([part[1:] for part in sorted(parts, key=lambda part: part[0])])


def _finite(rewards: Rewards, config: FitConfig) -> Rewards:
    if rewards.num_not_finite:
        raise DivergedError(
            f"evaluation: {rewards.num_not_finite} rewards are NaN or infinite; lower train.learning_rate "
            f"(now {config.train.learning_rate:g})"
        )
    return rewards


def _build_model(config: FitConfig, device: str) -> RewardModel:
    try:
        model = RewardModel.for_training(
            config.model.base,
            revision=config.model.revision,
            lora=_lora_options(config),
            seed=config.run.seed,
            head_init_scale=config.head.init_scale,
            dtype=config.model.dtype,
            device=device,
            text_as=config.model.text_as,
        )
    except ValueError as error:
        if config.lora is None or type(error).__module__.startswith("rm_"):
            raise
        # peft's own refusals of a set of options
        raise ConfigError(f"lora (target_modules: {config.lora.target_modules}): {first_line(error)}") from error
    if config.lora is not None and isinstance(config.lora.target_modules, list):
        names = [name for name, _ in model.network.base.named_modules()]
        for target in config.lora.target_modules:
            # peft says nothing where one of several is found nowhere
            if not any(name == target or name.endswith(f".{target}") for name in names):
                last = {
                    name.rpartition(".")[2]
                    for name, module in model.network.base.named_modules()
                    if hasattr(module, "lora_A")
                }
                raise ConfigError(
                    f"lora.target_modules: no layer is called {target!r}; adapted are {', '.join(sorted(last))}"
                )
    return model


def _lora_options(config: FitConfig) -> dict[str, Any] | None:
    lora = config.lora
    if lora is None:
        return None
    known = [field.name for field in dataclasses.fields(peft.LoraConfig)]
    for name in lora.options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"lora.options: peft.LoraConfig has no argument {name!r}{hint}")
    own = {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
    }
    return {**own, **lora.options}


def _check_trackers(names: list[str]) -> None:
    """accelerate leaves a tracker whose package is missing out without a word."""
    available = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(f"train.report_to: {name!r} is no tracker; known: {', '.join(LOGGER_TYPE_TO_CLASS)}")
        if name not in available:
            raise ConfigError(f"train.report_to: the package of {name!r} is not installed (pip install {name})")


def _identity(config: FitConfig, fingerprint: dict[str, str], accelerator: Accelerator) -> dict[str, Any]:
    """What a resumed run must have in common with the one that wrote the state."""
    resolved = json.loads(dump_resolved(config))
    for section, keys in {"run": ("name", "output_dir"), "train": ("save_every", "report_to")}.items():
        for key in keys:
            resolved[section].pop(key)
    compute = choose_compute(config.model.dtype, str(accelerator.device))  # what `auto` is on this machine
    return {**_flat(resolved), **{f"data fingerprint ({k})": v for k, v in fingerprint.items()},
            "number of processes": accelerator.num_processes, "device": compute.device.type,
            "compute dtype": compute.dtype_name}  # fmt: skip


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str | int | float) else json.dumps(value)
    return flat


def _warnings(data: FitData) -> str:
    notes = []
    if data.leaks:
        notes.append(f"WARNING: {len(data.leaks)} evaluation pairs have a prompt that is trained on")
    if data.tied_rows:
        notes.append(f"{data.tied_rows} rows with only tied answers gave no pair")
    return "".join(f"; {note}" for note in notes)


def _describe(step: int, total: int, line: dict[str, Any]) -> str:
    return f"step {step}/{total} loss {line['loss']:.4f} accuracy {line['accuracy']:.2f}"


def _run_directory(config: FitConfig) -> Path:
    return Path(config.run.output_dir) / config.run.name


def _no_bar() -> AbstractContextManager[Callable[..., None]]:
    from contextlib import nullcontext

    return nullcontext(lambda *args: None)
