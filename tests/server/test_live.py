"""Rewards and rates of the live page, without a page."""

import numpy as np
import pytest

from rm_server.live import WINDOW, RewardWindow, describe_rewards


def test_window_keeps_the_last_rewards_and_no_more() -> None:
    window = RewardWindow()
    for number in range(WINDOW + 10):
        window.add(float(number))
    assert sorted(window.values()) == [float(number) for number in range(10, WINDOW + 10)]


def test_drift_is_in_the_checkpoints_standard_deviations() -> None:
    found = describe_rewards(np.array([1.0, 2.0, 3.0]), mean=1.0, std=0.5)
    assert found["mean"] == 2.0
    assert found["drift"] == 2.0
    assert found["quantiles"]["p50"] == 2.0
    assert found["std"] == pytest.approx(np.std([1, 2, 3]))
    assert found["histogram"]["edges"][0] == -1.0
    assert found["histogram"]["edges"][-1] == 3.0


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0], [-1e-9, 1e-9], [1e9, -1e9], list(range(1000))])
def test_every_reward_is_in_a_bar(values: list[float]) -> None:
    for mean, std in ((None, None), (0.0, 1.0), (0.0, 0.0)):
        histogram = describe_rewards(np.array(values, dtype=float), mean, std)["histogram"]
        assert sum(histogram["counts"]) == len(values)
        assert np.all(np.diff(histogram["edges"]) > 0)
        assert len(histogram["counts"]) == 32


def test_nothing_scored_is_nothing_said() -> None:
    assert describe_rewards(np.zeros(0), 0.0, 1.0)["mean"] is None
