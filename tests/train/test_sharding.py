"""Two processes that divide one model between them train as one process does, and leave the same checkpoint."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from rm_core.checkpoint import read_record
from rm_train.config_file import ConfigError, load_config
from rm_train.fit import fit
from rm_train.state import STATE_FILE
from tests.train.runs import (
    RUN_FILES,
    Quiet,
    assert_same_training,
    make_config,
    metric_lines,
    text_rows,
    weights_of,
    write_rows,
)
from tests.train.test_processes import assert_finish, config_file, start_two


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [{}, {"lora": None, "train": {"learning_rate": 1e-4}}, {"head": {"count": 3}}],
    ids=["adapter", "all_weights", "three_heads"],
)
def test_two_processes_that_divide_the_model_equal_one(
    sections: dict[str, Any], tiny_base: Path, tmp_path: Path
) -> None:
    """The processes check that each holds DTensors and about half of the weights; they need different numbers of passes
    in training and evaluation, and the last step has a pair for one of them alone."""
    train = sections.get("train", {})
    path, _ = config_file(tmp_path / "two", tiny_base, **{**sections, "train": {**train, "shard": True}})
    assert_finish(start_two(path, module="tests.train.test_sharding"))
    _, config = config_file(tmp_path / "one", tiny_base, **sections)
    fit(config, Quiet())
    two, one = (tmp_path / name / "runs" / "run" for name in ("two", "one"))
    assert_same_training(two, one)
    assert sorted(file.name for file in two.iterdir()) == RUN_FILES
    records = read_record(two / "checkpoint"), read_record(one / "checkpoint")
    assert records[0] is not None
    assert records[1] is not None
    assert records[0].metrics["accuracy"] == records[1].metrics["accuracy"]
    assert records[0].numerics == records[1].numerics


@pytest.mark.slow
def test_divided_run_that_was_killed_resumes_to_the_same_bits(tiny_base: Path, tmp_path: Path) -> None:
    """Killed behind step 3, when the state of step 2 is the last; the best weights are kept across the kill too."""
    train = {"shard": True, "save_every": 2, "epochs": 2, "keep_best": True, "final_eval_dtype": "compute"}
    whole, _ = config_file(tmp_path / "whole", tiny_base, train=train, lora={"dropout": 0.3})
    assert_finish(start_two(whole, module="tests.train.test_sharding"))
    path, _ = config_file(tmp_path / "killed", tiny_base, train=train, lora={"dropout": 0.3})
    processes = start_two(path, "--die-at", 3, module="tests.train.test_sharding")
    assert [process.wait(timeout=300) for process in processes] == [9, 9]
    run, expected = (tmp_path / name / "runs" / "run" for name in ("killed", "whole"))
    assert torch.load(run / STATE_FILE, weights_only=True)["step"] == 2
    assert_finish(start_two(path, "--resume", module="tests.train.test_sharding"))
    assert metric_lines(run) == metric_lines(expected)
    weights, wanted = weights_of(run / "checkpoint"), weights_of(expected / "checkpoint")
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_one_process_has_nothing_to_divide(tiny_base: Path, tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(4))
    with pytest.raises(ConfigError, match=r"train\.shard: there is one process.*torchrun"):
        fit(make_config(tiny_base, tmp_path, pairs, train={"shard": True}), Quiet())


def test_launcher_that_asks_for_another_way_is_refused(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --use_fsdp` would wrap the model its own way and save parts of it."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(4))
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    try:
        with pytest.raises(ConfigError, match=r"the launcher asks for FSDP.*set train\.shard: true"):
            fit(make_config(tiny_base, tmp_path, pairs), Quiet())
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def _run(arguments: list[str]) -> None:
    """One of the two processes."""
    import os

    from torch.distributed.tensor import DTensor

    import rm_train.fit as fit_module
    from rm_train import loop

    real_optimizer = loop._optimizer
    die_at = int(arguments[arguments.index("--die-at") + 1]) if "--die-at" in arguments else 0

    def checked(model: Any, config: Any) -> Any:
        parameters = list(model.network.parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters)
        mine, all_ = (sum(x) for x in zip(*((p.to_local().numel(), p.numel()) for p in parameters), strict=True))
        assert 0.4 < mine / all_ < 0.6
        return real_optimizer(model, config)

    loop._optimizer = checked
    if die_at:
        # both processes meet in every step's forward passes: they die before the same one
        real, steps = loop._forward_backward, iter(range(1, 1000))

        def dying(*args: Any) -> Any:
            if next(steps) > die_at:
                os._exit(9)
            return real(*args)

        loop._forward_backward = dying
    fit_module.fit(load_config(arguments[0]), Quiet(), resume="--resume" in arguments)


if __name__ == "__main__":
    _run(sys.argv[1:])
