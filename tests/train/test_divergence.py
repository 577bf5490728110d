"""A loss that runs away is noticed while it is a number, and not before."""

from pathlib import Path

import pytest

from rm_train.divergence import WINDOW, DivergenceWatch
from rm_train.fit import fit
from rm_train.loop import DivergedError
from tests.train.runs import Killed, Quiet, kill_at, make_config, metric_lines, text_rows, write_rows


def first_alarm(losses: list[float]) -> int | None:
    watch = DivergenceWatch()
    return next((step for step, loss in enumerate(losses, 1) if watch.see(loss)), None)


@pytest.mark.parametrize(
    "losses",
    [
        [0.69] * 200,
        [0.69, 3.0] * 100,
        [0.01] * 100 + [0.9] * 100,  # overfitted, then other data
        [12.0] * 50 + [6.0] * 50 + [10.0] * 50,  # large margins
        [0.69] * WINDOW + [30.0] + [0.69] * WINDOW,  # one bad step
    ],
    ids=["flat", "jumping", "overfitted", "margins", "one step"],
)
def test_usual_losses_raise_no_alarm(losses: list[float]) -> None:
    assert first_alarm(losses) is None


def test_runaway_loss_is_noticed_by_its_mean() -> None:
    """From 0.7 upwards by 1 a step: the mean of 20 steps passes five times 0.7 when the last is about 13."""
    losses = [0.7] * 30 + [0.7 + number for number in range(1, 60)]
    step = first_alarm(losses)
    assert step is not None
    assert sum(losses[step - WINDOW : step]) / WINDOW > 3.5 >= sum(losses[step - WINDOW - 1 : step - 1]) / WINDOW


def test_watch_goes_on_with_the_losses_of_before() -> None:
    losses = [0.7] * 30 + [0.7 + number for number in range(1, 60)]
    expected = first_alarm(losses)
    assert expected is not None
    for cut in (5, 25, expected - 1):
        watch = DivergenceWatch()
        assert not any(watch.see(loss) for loss in losses[:cut])
        watch = DivergenceWatch(**watch.state)
        found = next(step for step, loss in enumerate(losses[cut:], cut + 1) if watch.see(loss))
        assert found == expected


def test_diverging_run_stops_with_the_step_and_the_cure_and_so_does_its_resume(tiny_base: Path, tmp_path: Path) -> None:
    """Random preferences that are fought with a huge learning rate and no clipping."""
    pairs = write_rows(tmp_path / "pairs.jsonl", text_rows(8))
    settings = {
        "max_steps": 400,
        "learning_rate": 3.0,
        "max_grad_norm": None,
        "schedule": "constant",
        "save_every": 5,
        "batch_size": 2,
    }

    def run(directory: Path, quiet: Quiet, resume: bool = False) -> str:
        config = make_config(tiny_base, directory, pairs, pairs, lora={"r": 2, "alpha": 2}, train=settings)
        with pytest.raises(DivergedError) as caught:
            fit(config, quiet, resume=resume)
        return str(caught.value)

    message = run(tmp_path / "whole", Quiet())
    assert "the loss diverges: " in message
    assert "lower train.learning_rate (now 3)" in message
    steps = len(metric_lines(tmp_path / "whole" / "runs" / "run"))
    assert message.startswith(f"step {steps}: ")

    config = make_config(tiny_base, tmp_path / "killed", pairs, pairs, lora={"r": 2, "alpha": 2}, train=settings)
    with pytest.raises(Killed):
        fit(config, kill_at(12))
    assert run(tmp_path / "killed", Quiet(), resume=True) == message
