"""The YAML of ``rm-train fit``: every key, its type, its bounds, its default and what it does.

Invariant: a key stands here only if training honours it; what a run used is ``dump_resolved(config)``, and reading
that JSON back gives an equal config. Reading files and overrides lives in ``config_file.py``.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from typing_extensions import Self

_FROZEN = ConfigDict(
    frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), coerce_numbers_to_str=True
)

CANONICAL_COLUMNS = (
    "prompt",
    "chosen",
    "rejected",
    "completions",
    "ranks",
    "scores",
    "margin",
    "weight",
    "label",
    "category",
    "source",
    "id",
    "tools",
)
"""What a row may say. ``columns`` maps these names to those of a file."""

Columns = dict[str, str | None]

_PEFT_OWN = {
    "r": "use lora.r",
    "lora_alpha": "use lora.alpha",
    "lora_dropout": "use lora.dropout",
    "target_modules": "use lora.target_modules",
    "modules_to_save": "leave it out: the head is always trained and saved",
    "task_type": "leave it out: it is always SEQ_CLS",
    "inference_mode": "nothing would be trained",
    "layer_replication": "the checkpoint would not fit the base it names",
    "lora_bias": "such an adapter cannot be merged into layers without a bias, as loading does",
    "alora_invocation_tokens": "such an adapter cannot be merged into its base, as loading does",
}
_INIT_LORA_WEIGHTS = (True, False, "gaussian", "orthogonal", "pissa", "olora")
"""The others draw what loading would have to draw again, or need preparations of their own to have an effect."""


def _check_columns(columns: Columns) -> Columns:
    for name in columns:
        if name not in CANONICAL_COLUMNS:
            close = difflib.get_close_matches(name, CANONICAL_COLUMNS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(CANONICAL_COLUMNS)}"
            raise ValueError(f"{name!r} is not one of our column names; {hint}")
    return columns


def _source_from_text(value: Any) -> Any:
    return parse_source(value) if isinstance(value, str) else value


def parse_source(text: str) -> dict[str, Any]:
    """Read ``PATH``, ``org/name`` or ``org/name:split``, the short form of a source, into its long form.

    A directory that holds a saved set may name its split like that, too.
    """
    head, colon, tail = text.rpartition(":")
    is_set = head.count("/") == 1 or (Path(head).is_dir() and not Path(text).exists())
    if colon and tail and is_set and "." not in tail and "/" not in tail and "\\" not in tail:
        return {"path": head, "split": tail}
    return {"path": text}


class RunConfig(BaseModel):
    """The run and where it goes."""

    model_config = _FROZEN

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its directory."""
    output_dir: str = Field(default="runs", min_length=1)
    """Directory that holds the runs; this one writes to `output_dir/name/`."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the split, the order of the pairs, the initial weights and dropout."""


class ModelConfig(BaseModel):
    """The model that is trained."""

    model_config = _FROZEN

    base: str = Field(min_length=1)
    """Base model: a local directory, a hub id, or `smollm2-135m-instruct` (the bundled one). Or a reward model to go on
    from: a whole one keeps its head; an adapter checkpoint goes on with that adapter, under the same `lora` settings
    (with `lora: null` it is merged and all weights are trained)."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of the base model; null for the default branch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of the base model. `auto` takes bfloat16 where the machine gains by it and says why."""
    max_length: int = Field(default=1024, ge=8)
    """Longest training sequence in tokens. Longer pairs lose turns, then tokens, from the left of the prompt."""
    text_as: Literal["raw", "chat"] | None = None
    """How text (not messages) is scored: as it is (`raw`), or as one user and one assistant turn (`chat`). Kept in the
    checkpoint. null goes on as a checkpoint named in `base` was trained, and means `raw` for all others."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    quantize: Literal["4bit", "8bit"] | None = None
    """Store the base's linear layers in 4 bits (NF4, as QLoRA does) or 8, the head left out: less memory. Needs CUDA
    and bitsandbytes. The checkpoint is measured, and served, on the unquantised base."""


class LoraConfig(BaseModel):
    """The adapter. `lora: null` trains all weights instead."""

    model_config = _FROZEN

    r: int = Field(default=16, ge=1)
    """Rank."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapter; its output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Which layers get an adapter: `all-linear`, or a list of module names."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `peft.LoraConfig`, passed on as they are (for instance `use_rslora: true`)."""

    @field_validator("target_modules")
    @classmethod
    def _name_some_module(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("is empty: name modules, or use 'all-linear'")
        return value

    @field_validator("options")
    @classmethod
    def _leave_own_keys_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _PEFT_OWN:
                raise ValueError(f"{name!r} cannot be given here; {_PEFT_OWN[name]}")
        start = value.get("init_lora_weights", True)
        if start not in _INIT_LORA_WEIGHTS:
            known = ", ".join(map(str, _INIT_LORA_WEIGHTS)).replace("True", "true").replace("False", "false")
            raise ValueError(f"init_lora_weights {start!r} is not supported; one of {known}")
        return value


class HeadConfig(BaseModel):
    """The scalar head on the last token's hidden state."""

    model_config = _FROZEN

    count: int = Field(default=1, ge=1, le=64)
    """How many heads are trained beside each other, at about the cost of one: each from its own start and on its own
    bootstrap sample of the pairs. The reward is their mean; how far they are apart tells how sure it is."""

    learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of the head; null for `train.learning_rate`."""
    init_scale: float = Field(default=0.01, ge=0)
    """The head's initial weights are normal with standard deviation `init_scale / sqrt(hidden size)`. The default
    starts training at a loss of ln 2; a larger one starts with random preferences."""


class SourceConfig(BaseModel):
    """One source of pairs, in `data.train` and `data.eval` alike. A text stands for `{path: TEXT}`, and
    `org/name:split` for a split of a hub dataset."""

    model_config = _FROZEN

    path: str = Field(min_length=1)
    """File (.jsonl, .json, .csv: also .gz or .zst; .parquet, .arrow), directory of such files, or hub dataset id."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration name of a hub dataset that has several."""
    revision: str | None = None
    """Revision (branch, tag or commit) of a hub dataset."""
    columns: Columns = Field(default_factory=dict)
    """Column names of this source, over those of `data.columns`."""
    mix_weight: float = Field(default=1.0, gt=0, le=1000)
    """How often an epoch sees each row of this source: 2 is twice, 0.5 is a fixed random half."""

    _columns = field_validator("columns")(_check_columns)


Source = Annotated[SourceConfig, BeforeValidator(_source_from_text)]


class DataConfig(BaseModel):
    """The preference pairs."""

    model_config = _FROZEN

    train: list[Source] = Field(min_length=1)
    """Sources of training pairs."""
    eval: list[Source] | None = Field(default=None, min_length=1)
    """Sources of evaluation pairs; null sets some prompts of the training pairs apart."""
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training pairs set apart, whole prompts at a time, when `eval` is null."""
    columns: Columns = Field(default_factory=dict)
    """Our column names to those of the files, for instance `{prompt: question}`; a null hides a column."""
    limit: int | None = Field(default=None, ge=1)
    """Train on at most this many pairs, drawn by the seed; null for all."""
    eval_limit: int | None = Field(default=None, ge=1)
    """Evaluate on at most this many pairs, drawn by the seed; null for all."""

    _columns = field_validator("columns")(_check_columns)

    @model_validator(mode="after")
    def _evaluate_each_pair_once(self) -> Self:
        for index, source in enumerate(self.eval or []):
            if source.mix_weight != 1.0:
                raise ValueError(f"eval[{index}].mix_weight: evaluation sees every pair once; leave it out")
        return self


class LossConfig(BaseModel):
    """Bradley-Terry and what may be added to it."""

    model_config = _FROZEN

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of wrong labels. A pair's own soft label, where it has one, is smoothed by it too."""
    use_margin: bool = False
    """Ask the chosen answer to win by the pair's `margin`; pairs without one ask for 0, and data without any are
    refused."""
    centering: float = Field(default=0.0, ge=0)
    """Coefficient of the squared sum of both rewards, which keeps rewards around zero (0.01 is usual)."""


class TrainConfig(BaseModel):
    """The optimisation."""

    model_config = _FROZEN

    epochs: int = Field(default=1, ge=1)
    """Passes over the training pairs; not used when `max_steps` is set."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after exactly this many optimizer steps, however many epochs that takes; null for whole epochs."""
    batch_size: int = Field(default=16, ge=1)
    """Pairs per optimizer step, over all processes."""
    group_by_prompt: bool = False
    """Bring the pairs of one prompt into one step, which then computes the prompt once. Faster where prompts have many
    pairs; the pairs of a step are then no longer drawn independently."""
    max_tokens: int = Field(default=8192, ge=16)
    """Most tokens that one forward pass holds; a step is cut into as many passes as it needs. Changes speed and
    memory, not the result. Must hold one pair of `model.max_length`."""
    shard: bool = False
    """With several processes: divide weights, gradients and optimizer state among them (FSDP2) instead of keeping a
    copy in each. For models that one device cannot train; the first process still writes and measures the whole one."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Highest learning rate of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps in which the learning rate rises to its highest."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """What the learning rate does after warm-up: falls to zero linearly or by a half cosine, or stays."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm; null leaves them alone."""
    eval_every: int | None = Field(default=None, ge=1)
    """Evaluate every this many steps; null evaluates only at the end."""
    save_every: int | None = Field(default=None, ge=1)
    """Save the state for `--resume` every this many steps and after the last; null saves none, so that the run cannot
    be resumed."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row without a lower loss, and keep the best weights; null never stops."""
    keep_best: bool = False
    """Write the weights of the evaluation with the lowest loss instead of the last ones, without stopping early."""
    final_eval_dtype: Literal["float32", "compute"] = "float32"
    """Numbers of the last evaluation, which the checkpoint records: float32 on the written checkpoint, loaded again, or
    `compute`, the faster type of the training itself."""
    report_to: list[str] = Field(default_factory=list)
    """Trackers beside the metrics file, by accelerate's names (`tensorboard`, `wandb`, `mlflow`, ...)."""


class FitConfig(BaseModel):
    """All of one training run."""

    model_config = _FROZEN

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig | None = Field(default_factory=LoraConfig)
    head: HeadConfig = Field(default_factory=HeadConfig)
    data: DataConfig
    loss: LossConfig = Field(default_factory=LossConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.train.max_tokens < 2 * self.model.max_length:
            raise ValueError(
                f"train.max_tokens: {self.train.max_tokens} cannot hold one pair of model.max_length "
                f"{self.model.max_length}; it must be at least {2 * self.model.max_length}"
            )
        if self.train.early_stopping_patience is not None and self.train.eval_every is None:
            raise ValueError("train.early_stopping_patience: needs train.eval_every, or nothing is evaluated in time")
        if self.train.keep_best and self.train.eval_every is None:
            raise ValueError("train.keep_best: needs train.eval_every, or there is only one evaluation")
        if self.model.quantize is not None and self.lora is None:
            raise ValueError("model.quantize: needs lora; quantised weights cannot be trained themselves")
        if self.model.quantize is not None and self.train.shard:
            raise ValueError("train.shard: quantised weights cannot be divided; set model.quantize to null")
        return self


def dump_resolved(config: FitConfig) -> str:
    """Give the config with every default filled in, as indented JSON text."""
    return config.model_dump_json(indent=2) + "\n"
