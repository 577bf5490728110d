"""``rm-train calibrate`` and ``rm-train merge``: a record for a model trained elsewhere, an adapter made a full model.

Invariant: both write by rename, and both measure the files they wrote.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rm_core.chat import Renderer
from rm_core.checkpoint import (
    RECORD_FILE,
    CheckpointError,
    CheckpointRecord,
    Measured,
    describe,
    replace_directory,
    write_checkpoint,
    write_record,
)
from rm_core.golden import golden_ids, score_each
from rm_core.loading import locate
from rm_core.model import RewardModel


def calibrate(
    path: str,
    measure: Callable[[RewardModel], Measured],
    data: dict[str, Any],
    *,
    output: Path | None,
    text_as: Literal["raw", "chat"] | None,
    end: Literal["token", "template"] | None,
    training_length: int | None,
) -> tuple[CheckpointRecord, Path]:
    """Write ``reward_model.json`` into the model's folder, or into a copy of it at ``output``.

    ``measure`` evaluates the model, loaded in fp32. What is None stays as an earlier record has it; without one, text
    is raw and ends as the template does. Raises CheckpointError.
    """
    source = locate(path)
    if output is None and source.revision is not None:
        raise CheckpointError(f"{path}: lies in the hub's cache; name a directory of your own with --output")
    target = source.directory
    if output is not None and output.resolve() != source.directory.resolve():
        target = output
        _check_new(target)
        if source.directory.resolve() in target.resolve().parents:
            raise CheckpointError(f"{target}: lies inside the model's own folder; name another --output")
    target.parent.mkdir(parents=True, exist_ok=True)
    model = RewardModel.load(path, dtype="float32", verify=False)
    old = model.record
    rules = Renderer.for_tokenizer(
        model.tokenizer,
        text_as=text_as or (old.rules.text_as if old else "raw"),
        end=end or (old.rules.end if old else "template"),
        date=old.rules.date if old else None,
    ).rules
    model = RewardModel.load(path, dtype="float32", verify=False, rules=rules)
    record = describe(
        model,
        measure(model),
        base=model.base,
        trained_in=old.numerics if old else {"dtype": None, "quantization": None, "device": None},
        training_length=training_length or (old.training_length if old else None),
        data={**old.data, "calibrated_on": data["sources"]} if old else data,
    )
    if target == source.directory:
        write_record(record, target)
        return record, target
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        shutil.copytree(source.directory, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(RECORD_FILE))
        staging.chmod(0o755)
        model.tokenizer.save_pretrained(str(staging))
        write_record(record, staging)
        replace_directory(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return record, target


def merge(path: str, output: Path, dtype: Literal["float32", "bfloat16"]) -> tuple[CheckpointRecord, float]:
    """Write an adapter checkpoint as a plain sequence-classification model.

    Returns the new record and the largest difference between the golden scores of the two, in reward units. Raises
    CheckpointError where that is more than the checkpoint's own tolerance for ``dtype``.
    """
    _check_new(output)
    model = RewardModel.load(path, dtype="float32")
    conversations = [ids for _, ids in golden_ids(model.renderer, model.max_length)]
    before = score_each(model, conversations)
    old = model.record
    measured = Measured()
    if old is not None:
        measured = Measured(
            old.reward_mean, old.reward_std, old.temperature, old.num_eval, dict(old.metrics), old.head_means
        )
    model.to_dtype(dtype)
    config = model.network.base.config
    config.pad_token_id = model.tokenizer.pad_token_id if model.tokenizer.pad_token_id is not None else 0
    largest = 0.0
    tolerance = old.golden.tolerance.get(dtype) if old else None

    def compare(reloaded: RewardModel) -> Measured:
        nonlocal largest
        largest = float(np.abs(score_each(reloaded, conversations) - before).max())
        if tolerance is not None and not largest <= tolerance:
            raise CheckpointError(
                f"{path}: merged in {dtype}, a golden score moves by {largest:.3g} (allowed: {tolerance:.3g}); "
                "nothing was written" + ("; merge with --dtype float32" if dtype != "float32" else "")
            )
        return measured

    record = write_checkpoint(
        model,
        output,
        training_length=old.training_length if old else None,
        measure=compare,
        data={**(old.data if old else {}), "merged_from": model.reward_id},
    )
    return record, largest


def _check_new(directory: Path) -> None:
    """Refuse to write over anything but an empty directory."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        raise CheckpointError(f"{directory}: exists already; name a new directory")
