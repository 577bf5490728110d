"""``rm-train fit``: from a config to a frozen checkpoint.

Invariant: what the checkpoint says was measured was measured on the files in it, loaded again, or in the training
model where the config says so.
"""

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from rm_core.checkpoint import CheckpointRecord, Measured, write_checkpoint
from rm_core.hardware import choose_compute
from rm_core.model import RewardModel, hash_weights
from rm_train.baselines import BagOfWords, accuracy_of_margins
from rm_train.build import build_model, check_trackers
from rm_train.check import json_of, lines_of
from rm_train.config import FitConfig, dump_resolved
from rm_train.data import FitData, data_fingerprint, load_fit_data
from rm_train.doctor import check_encoded, check_pairs
from rm_train.encode import EncodedPair, count_truncated, encode_pairs, find_identical
from rm_train.eval_table import measured, table_of
from rm_train.evaluation import Rewards, quick_metrics, score_pairs
from rm_train.loop import DivergedError, train
from rm_train.pairs import Pair
from rm_train.rows import DataError, first_line
from rm_train.run_directory import (
    CHECK_FILE,
    CHECKPOINT,
    CONFIG_FILE,
    RunError,
    check_nothing_to_resume,
    clear_leftovers,
    forget_evaluation,
    locked,
    stopped_before_first_save,
    write_evaluation,
    write_whole,
)
from rm_train.sharding import check_launch, score_together
from rm_train.state import forget_state, load_state, load_trainable, trainable_state


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


def fit(config: FitConfig, reporter: Reporter, *, resume: bool = False, overwrite: bool = False) -> FitResult:
    """Train, evaluate, write ``runs/NAME/checkpoint``.

    What an unfinished run of that name saved is gone on with (``resume``), thrown away (``overwrite``), or refused.
    Under ``torchrun`` or ``accelerate launch`` every process calls this; the first one writes, the others return a
    result without a record. Raises DataError, CheckpointError, DivergedError, ResumeError or RunError, each one line.
    """
    with contextlib.ExitStack() as held:
        try:
            return _fit(config, reporter, held, resume=resume, overwrite=overwrite)
        except torch.OutOfMemoryError as error:
            raise RunError(f"out of memory: {first_line(error)}; {_less_memory(config)}") from error


def _fit(
    config: FitConfig, reporter: Reporter, held: contextlib.ExitStack, *, resume: bool, overwrite: bool
) -> FitResult:
    """``fit``; what must be held until its end goes into ``held``."""
    check_trackers(config.train.report_to)
    accelerator = Accelerator(
        log_with=list(config.train.report_to) or None,
        project_dir=str(_run_directory(config)),
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",  # ours is the config's; accelerate's own would wrap the forward a second time
    )
    check_launch(config, accelerator)
    directory = _run_directory(config)
    say = reporter.say if accelerator.is_main_process else lambda text: None
    locks = accelerator.is_main_process
    if locks and directory.is_dir():
        held.enter_context(locked(directory))
        locks = False
    if not resume and not overwrite:
        check_nothing_to_resume(directory)

    data = load_fit_data(config.data, config.run.seed)
    say(f"data: {len(data.train)} training and {len(data.eval)} evaluation pairs{_warnings(data)}")
    if config.train.save_every is None:
        say("train.save_every is null: no state is saved, so this run cannot be resumed")
    if note := _margin_note(data, config):
        say(note)
    findings = None
    if accelerator.is_main_process:
        findings = check_pairs(_distinct(data.train), data.eval, tied_rows=data.tied_rows, baselines="length")
        for line in lines_of(findings):
            say(line)
    fingerprint = {"train": data_fingerprint(data.train), "eval": data_fingerprint(data.eval)}
    saves = resume or config.train.save_every is not None
    identity = _identity(config, fingerprint, accelerator) if saves else {}
    if resume and stopped_before_first_save(directory):
        say(f"resume: {directory} was stopped before its first saved state, so it starts from the beginning")
        resume = False
    state = load_state(directory, identity) if resume else None
    model = build_model(config, str(accelerator.device))
    if config.model.gradient_checkpointing:
        model.network.use_gradient_checkpointing()
    trainable = sum(p.numel() for p in model.network.parameters() if p.requires_grad)
    say(f"model: {config.model.base}, {trainable:,} trainable weights, {model.device.type}, {model.dtype_reason}")

    limit = min(config.model.max_length, model.max_length)
    if limit < config.model.max_length:
        say(f"model.max_length: {config.model.max_length} is more than the model reads; it is cut to {limit} tokens")
    with _bar(reporter, accelerator, "tokenising", len(data.train) + len(data.eval)) as advance:
        train_pairs = encode_pairs(data.train, model.renderer, limit, lambda: advance(1))
        eval_pairs = encode_pairs(data.eval, model.renderer, limit, lambda: advance(1))
    for name, encoded in (("training", train_pairs), ("evaluation", eval_pairs)):
        if cut := count_truncated(encoded):
            say(f"{name}: {cut} of {len(encoded)} pairs are over {limit} tokens and lost the start of their prompts")
        if same := find_identical(encoded):
            say(f"{name}: {len(same)} of {len(encoded)} pairs are the same tokens on both sides; first {same[0].where}")
    if findings is not None:
        before, findings = findings, check_encoded(findings, [*train_pairs, *eval_pairs], model.renderer, limit)
        for line in lines_of(findings, besides=before):
            say(line)
    if accelerator.is_main_process:
        # Not before everything is known to fit: a run that is refused must leave an earlier one as it was.
        directory.mkdir(parents=True, exist_ok=True)
        if locks:
            held.enter_context(locked(directory))
        clear_leftovers(directory)
        write_whole(directory / CONFIG_FILE, dump_resolved(config))
        if findings is not None:
            write_whole(directory / CHECK_FILE, json_of(findings))
        if state is None:
            forget_state(directory)
            forget_evaluation(directory)

    def evaluate() -> dict[str, float]:
        rewards = _score_on_all_processes(model, eval_pairs, config, accelerator)
        return quick_metrics(_finite(rewards, config), eval_pairs)

    if config.train.report_to:
        accelerator.init_trackers("betterthan", config=_flat(json.loads(dump_resolved(config))))
    with _bar(reporter, accelerator, "training", 1) as advance:
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
    weights = trainable_state(model.network) if config.train.shard else None
    # The first process evaluates what it wrote, for as long as that takes: a collective would run into its time-out.
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if not accelerator.is_main_process:
        return FitResult(directory, None, steps)
    if weights is not None:
        model = _whole_model(model, config, weights)
    say(f"evaluating {len(eval_pairs)} pairs and writing {directory / CHECKPOINT}")
    final = _FinalEvaluation(data, eval_pairs, limit, config, reporter, in_training)
    record = write_checkpoint(
        model,
        directory / CHECKPOINT,
        training_length=limit,
        measure=final.measure,
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
    assert final.rewards is not None, "this is a bug: the checkpoint was written without an evaluation"
    write_evaluation(directory, final.rewards, eval_pairs, final.bag_of_words)
    return FitResult(directory, record, steps)


class _FinalEvaluation:
    """The last evaluation; keeps what the run's evaluation file needs."""

    def __init__(
        self,
        data: FitData,
        eval_pairs: list[EncodedPair],
        max_length: int,
        config: FitConfig,
        reporter: Reporter,
        in_training: Rewards | None,
    ) -> None:
        self.data, self.eval_pairs, self.config, self.reporter = data, eval_pairs, config, reporter
        self.max_length = max_length
        self.rewards = in_training
        self.dtype = "compute" if in_training is not None else None
        self.bag_of_words: list[float] = []

    def measure(self, reloaded: RewardModel) -> Measured:
        """Score with the loaded checkpoint, unless the training model's rewards are what was asked for."""
        if self.rewards is None:
            with self.reporter.bar("evaluating", 2 * len(self.eval_pairs)) as advance:
                self.rewards = score_pairs(
                    reloaded, self.eval_pairs, max_tokens=self.config.train.max_tokens, progress=advance
                )
        self.bag_of_words = BagOfWords(self.data.train).margins(self.data.eval).tolist()
        rewards = _finite(self.rewards, self.config)
        return measured(
            table_of(self.eval_pairs, rewards.chosen, rewards.rejected, rewards.heads),
            {
                "dtype": self.dtype or reloaded.dtype,
                "max_length": self.max_length,
                "bag_of_words": accuracy_of_margins(self.bag_of_words, self.data.eval),
            },
        )


def _score_on_all_processes(
    model: RewardModel, encoded: list[EncodedPair], config: FitConfig, accelerator: Accelerator
) -> Rewards:
    """Each process scores its share; all get all rewards, in order."""
    was_training = model.network.training
    model.network.eval()
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    if config.train.shard:
        sequences = [ids for item in encoded[share] for ids in (item.chosen, item.rejected)]
        mine = Rewards.of_sides(score_together(model.network, sequences, config.train.max_tokens, accelerator))
    else:
        mine = score_pairs(model, encoded[share], max_tokens=config.train.max_tokens)
    model.network.train(was_training)
    if accelerator.num_processes == 1:
        return mine
    parts = gather_object([(accelerator.process_index, mine)])
    return Rewards.interleave([part for _, part in sorted(parts, key=lambda part: part[0])])


def _whole_model(model: RewardModel, config: FitConfig, weights: dict[str, torch.Tensor]) -> RewardModel:
    """The model in one piece, on the CPU: built again, with the trained weights."""
    built = build_model(config, "cpu")
    load_trainable(built.network, weights)
    built.compute = model.compute
    return built


def _finite(rewards: Rewards, config: FitConfig) -> Rewards:
    if rewards.num_not_finite:
        raise DivergedError(
            f"evaluation: {rewards.num_not_finite} rewards are NaN or infinite; lower train.learning_rate "
            f"(now {config.train.learning_rate:g})"
        )
    return rewards


def _less_memory(config: FitConfig) -> str:
    cure = f"lower train.max_tokens (now {config.train.max_tokens})"
    return cure if config.model.gradient_checkpointing else f"{cure} or set model.gradient_checkpointing: true"


def _identity(config: FitConfig, fingerprint: dict[str, str], accelerator: Accelerator) -> dict[str, Any]:
    """What a resumed run must have in common with the one that wrote the state: all that its bits depend on."""
    resolved = json.loads(dump_resolved(config))
    for section, keys in {"run": ("name", "output_dir"), "train": ("save_every", "report_to")}.items():
        for key in keys:
            resolved[section].pop(key)
    for source in [*resolved["data"]["train"], *(resolved["data"]["eval"] or [])]:
        source.pop("path")  # the fingerprints tell the data, wherever they lie
    compute = choose_compute(config.model.dtype, str(accelerator.device))  # what `auto` is on this machine
    return {**_flat(resolved), **{f"data fingerprint ({k})": v for k, v in fingerprint.items()},
            "number of processes": accelerator.num_processes, "device": compute.device.type,
            "compute dtype": compute.dtype_name, "base weights": hash_weights(config.model.base, config.model.revision),
            "version of torch": str(torch.__version__),
            **({"number of threads": torch.get_num_threads()} if compute.device.type == "cpu" else {})}  # fmt: skip


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str | int | float) else json.dumps(value)
    return flat


def _distinct(pairs: list[Pair]) -> list[Pair]:
    """Without the repetitions that mixing weights make: those are meant."""
    return list({id(pair): pair for pair in pairs}.values())


def _margin_note(data: FitData, config: FitConfig) -> str | None:
    """What to say of margins that the loss leaves out. Raises DataError where it asks for some and there are none."""
    found = sum(pair.margin is not None for pair in data.train)
    if config.loss.use_margin and not found:
        where = ", ".join(source.path for source in config.data.train)
        raise DataError(
            where, "loss.use_margin is true, but no training pair has a margin (data.columns can map names)"
        )
    if not found or config.loss.use_margin:
        return None
    return f"margins: {found} of {len(data.train)} training pairs have one, and loss.use_margin is false: not used"


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


def _bar(
    reporter: Reporter, accelerator: Accelerator, title: str, total: int
) -> AbstractContextManager[Callable[..., None]]:
    """The reporter's bar on the first process, nothing on the others."""
    if accelerator.is_main_process:
        return reporter.bar(title, total)
    return contextlib.nullcontext(lambda *args: None)
