"""The self-describing checkpoint: ``reward_model.json`` beside plain peft or transformers files.

Invariant: what was written is what is loaded. The hashes prove identity; the golden scores catch a changed renderer,
pooling or library. A checkpoint appears by one rename, after one that moves an old one aside whole.
"""

import datetime
import importlib.metadata
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rm_core.chat import Renderer, RenderingRules, sha256_of, tokenizer_hash
from rm_core.golden import Golden, find_drift, measure_golden
from rm_core.loading import Source, head_tensor_names
from rm_core.model_card import CARD_FILE, model_card
from rm_core.reward_heads import hash_heads
from rm_core.weights import count_parameters, hash_tensors

if TYPE_CHECKING:
    from rm_core.model import RewardModel

RECORD_FILE = "reward_model.json"
SCHEMA_VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot or must not be used. One line that names what differs and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class WeightHashes(_Section):
    """What defines the reward, part by part."""

    base: str
    """Base weights without any head."""
    adapter: str | None
    """Adapter tensors without the head; None for a full model."""
    head: str
    """The reward head's tensors."""
    heads: str | None = None
    """The single heads whose mean the reward head is; None where there is one alone."""
    tokenizer: str
    """``rm_core.chat.tokenizer_hash``."""


class BaseModelName(_Section):
    """Where the base of an adapter is found again."""

    name: str
    revision: str | None = None


class CheckpointRecord(_Section):
    """The content of ``reward_model.json``."""

    schema_version: Literal[1] = 1
    reward_id: str
    """sha256 over hashes and rules: two checkpoints with one id give the same rewards."""
    kind: Literal["adapter", "model"]
    hashes: WeightHashes
    base_model: BaseModelName
    rules: RenderingRules
    numerics: dict[str, str | None]
    """dtype, quantisation and device of the training; not part of the reward's identity."""
    training_length: int | None = None
    """Longest sequence in training, in tokens; None when unknown (adopted model)."""
    reward_mean: float = 0.0
    """Mean of the raw reward on the evaluation split."""
    reward_std: float = Field(default=1.0, ge=0)
    """Standard deviation of the raw reward on the evaluation split."""
    head_means: list[float] | None = None
    """Mean of each single head's raw reward on the evaluation split: taken off before the heads' std and min are told.
    None where there is one head alone, and in earlier checkpoints, whose heads are compared as they are."""
    temperature: float = Field(default=1.0, gt=0)
    """P(chosen better) = sigmoid(difference / temperature) is calibrated on the evaluation split."""
    num_eval: int = 0
    """Sequences behind mean and std."""
    data: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    git_revision: str | None = None
    created: datetime.datetime
    golden: Golden


class Measured(NamedTuple):
    """What an evaluation found out about a model's rewards; goes into its record."""

    reward_mean: float = 0.0
    reward_std: float = 1.0
    temperature: float = 1.0
    num_eval: int = 0
    metrics: dict[str, Any] = {}  # noqa: RUF012 - never changed
    head_means: list[float] | None = None


def read_record(directory: Path) -> CheckpointRecord | None:
    """Parse ``reward_model.json``; None where the folder has none (a model trained elsewhere)."""
    path = directory / RECORD_FILE
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: is not readable JSON: {error}") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: has schema_version {version}, this version reads up to {SCHEMA_VERSION}: upgrade"
        )
    try:
        return CheckpointRecord.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def renderer_for(
    tokenizer: Any,
    record: CheckpointRecord | None,
    name: str,
    *,
    text_as: Literal["raw", "chat"] | None = None,
    end: Literal["token", "template"] | None = None,
) -> Renderer:
    """How the model called ``name`` is trained on: as its record renders, or by rules derived anew where it has none.

    What is None is the record's, or else raw text and the end token. Raises CheckpointError where a record says
    otherwise than what is given or than what tokenizer and template do, and RenderError.
    """
    from rm_core.chat import RenderError

    if record is None:
        return Renderer.for_tokenizer(tokenizer, text_as=text_as or "raw", end=end or "token")
    for rule, given in (("text_as", text_as), ("end", end)):
        recorded = getattr(record.rules, rule)
        if given not in (None, recorded):
            raise CheckpointError(
                f"{name}: was trained with {rule} {recorded}, not {given}; going on keeps it: leave {rule} out"
            )
    renderer = Renderer(tokenizer, record.rules)
    try:
        renderer.check_rules()
    except RenderError as error:
        raise CheckpointError(f"{name}: a rendering rule changed: {error}") from None
    return renderer


def compute_hashes(
    directory: Path, kind: Literal["adapter", "model"], base_directory: Path, tokenizer: Any
) -> WeightHashes:
    """Hash the parts of a reward model from its files."""

    def is_head(name: str) -> bool:
        return bool(head_tensor_names([name.removeprefix("base_model.model.")]))

    def is_body(name: str) -> bool:
        # A language model's output layer takes no part in a reward.
        return not is_head(name) and not name.startswith("lm_head.")

    return WeightHashes(
        base=hash_tensors(base_directory, is_body),
        adapter=hash_tensors(directory, is_body) if kind == "adapter" else None,
        head=hash_tensors(directory, is_head),
        heads=hash_heads(directory),
        tokenizer=tokenizer_hash(tokenizer),
    )


def reward_id_of(hashes: WeightHashes, rules: RenderingRules) -> str:
    """The reward's identity: sha256 over its parts' hashes and the rendering rules."""
    parts = hashes.model_dump()
    if parts["heads"] is None:
        del parts["heads"]  # ids of checkpoints with one head stay what they were before there were several
    return sha256_of(json.dumps([parts, rules.model_dump(mode="json")], sort_keys=True))


def conservative_reward_id(reward_id: str, conservative: float) -> str:
    """Identity of mean - ``conservative`` · std over the heads of the model whose mean is ``reward_id``."""
    return sha256_of(json.dumps({"reward_id": reward_id, "conservative": float(conservative)}, sort_keys=True))


def verify_identity(
    record: CheckpointRecord, hashes: WeightHashes, renderer: Renderer, directory: Path, base_directory: Path
) -> None:
    """Raise CheckpointError naming the part (tokenizer, template, base, adapter, head) that was changed."""
    from rm_core.chat import RenderError

    recorded = record.hashes
    if hashes.tokenizer != recorded.tokenizer:
        raise CheckpointError(f"{directory}: the tokenizer is not the one this checkpoint was trained with")
    try:
        renderer.check_rules()
    except RenderError as error:
        what = "the chat template is another one" if error.field == "chat_template" else "a rendering rule changed"
        raise CheckpointError(f"{directory}: {what}: {error}") from None
    for part, where in (
        ("base", base_directory),
        ("adapter", directory),
        ("head", directory),
        ("heads", directory),
    ):
        if getattr(hashes, part) != getattr(recorded, part):
            names = {"head": "the reward head", "heads": "one of the single reward heads"}
            name = names.get(part, f"the {part} weights")
            raise CheckpointError(f"{where}: {name} changed since this checkpoint was written (hash differs)")
    if reward_id_of(hashes, record.rules) != record.reward_id:
        raise CheckpointError(
            f"{directory / RECORD_FILE}: rules or reward_id were edited: the reward_id does not fit them"
        )


def verify_golden(record: CheckpointRecord, model: "RewardModel", directory: Path) -> None:
    """Recompute the golden scores and raise CheckpointError where ids or rewards drifted."""
    if (drift := find_drift(record.golden, model)) is not None:
        raise CheckpointError(f"{directory}: golden conversation {drift}")


def write_checkpoint(
    model: "RewardModel",
    directory: Path,
    *,
    training_length: int | None,
    measure: Callable[["RewardModel"], Measured] = lambda model: Measured(),
    data: dict[str, Any] | None = None,
) -> CheckpointRecord:
    """Write weights, tokenizer and record under a temporary name, then rename.

    ``measure`` and the golden scores see the files just written, loaded again in fp32, so both vouch for what a server
    will load; on the CPU where the GPU has no room for them beside the model that was trained.
    """
    from rm_core.model import RewardModel

    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        model.save_weights(staging)
        staging.chmod(0o755)
        weights = count_parameters(staging)
        if model.kind == "adapter":
            weights += count_parameters(model.base.directory)
        reloaded = RewardModel.load(
            str(staging),
            dtype="float32",
            device=device_for_measuring(weights),
            verify=False,
            base=model.base,
            rules=model.renderer.rules,
        )
        record = describe(
            reloaded,
            measure(reloaded),
            base=model.base,
            trained_in={"dtype": model.dtype, "quantization": model.quantization, "device": model.compute.device.type},
            training_length=training_length,
            data=data or {},
        )
        write_record(record, staging)
        (staging / CARD_FILE).write_text(model_card(record), encoding="utf-8")
        replace_directory(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return record


def device_for_measuring(num_weights: int) -> str:
    """The CPU where a GPU has no room for so many weights in fp32, and some activations, beside what it holds."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return "auto" if 1.2 * 4 * num_weights < free else "cpu"


def describe(
    reloaded: "RewardModel",
    measured: Measured,
    *,
    base: Source,
    trained_in: dict[str, str | None],
    training_length: int | None,
    data: dict[str, Any],
) -> CheckpointRecord:
    """The record of a model that was loaded in fp32 from its files. Leaves the model in bf16: do not use it further."""
    rules = reloaded.renderer.rules
    return CheckpointRecord(
        reward_id=reward_id_of(reloaded.hashes, rules),
        kind=reloaded.kind,
        hashes=reloaded.hashes,
        base_model=BaseModelName(name=base.name, revision=base.revision),
        rules=rules,
        numerics=trained_in,
        training_length=training_length,
        reward_mean=measured.reward_mean,
        reward_std=measured.reward_std,
        head_means=measured.head_means,
        temperature=measured.temperature,
        num_eval=measured.num_eval,
        data=data,
        metrics=measured.metrics,
        versions=library_versions(),
        git_revision=_git_revision(),
        created=datetime.datetime.now(datetime.timezone.utc),
        golden=measure_golden(reloaded, measured.reward_std),
    )


def write_record(record: CheckpointRecord, directory: Path) -> None:
    """Write ``reward_model.json`` through a temporary file and a rename."""
    path = directory / RECORD_FILE
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(record.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def replace_directory(staging: Path, directory: Path) -> None:
    """Put ``staging`` in the place of ``directory``: at every moment one of the two is whole on the disk."""
    for path in staging.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if directory.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
        directory.rename(old / directory.name)
        try:
            staging.rename(directory)
        except OSError:
            (old / directory.name).rename(directory)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        staging.rename(directory)


def library_versions() -> dict[str, str]:
    """Versions of what decides a score."""
    names = ("betterthan", "torch", "transformers", "peft", "tokenizers", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_revision() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
