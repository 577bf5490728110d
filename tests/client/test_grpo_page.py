"""docs/grpo.md shows numbers; they are the ones that the functions compute."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from rm_client import grpo_advantage_report, grpo_advantages, grpo_loss, k3_kl

PAGE = (Path(__file__).parents[2] / "docs" / "grpo.md").read_text(encoding="utf-8")
PRINTED = 5.1e-5  # half a unit of the fourth decimal


def table(first_column: str) -> list[dict[str, str]]:
    """The rows of the one table whose head begins with this column."""
    (block,) = re.findall(rf"^\| {first_column} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    (head,) = re.findall(rf"^(\| {first_column} \|.*)\n", PAGE, re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in [head, *block.splitlines()]]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def column(rows: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def test_the_two_denominators_are_as_printed() -> None:
    rows = table("scale")
    assert len(rows) == 3
    for row in rows:
        got = grpo_advantages([[1.0, 0.0, 0.0, 0.0]], row["scale"], int(row["ddof"]), eps=0.0)[0]  # type: ignore[call-overload]
        assert got == pytest.approx([float(row["best"]), *[float(row["others"])] * 3], abs=PRINTED)


def test_the_worked_example_is_as_printed() -> None:
    rows, totals = table("answer"), {row["quantity"]: float(row["value"]) for row in table("quantity")}
    rewards, old, new, ref = (column(rows, name) for name in ("reward", "old", "new", "ref"))
    report = grpo_advantage_report(rewards)
    ratio = np.exp(new - old)
    clipped = np.clip(ratio, 0.8, 1.2)
    wanted = {
        "advantage": report.advantages,
        "ρ": ratio,
        "clip(ρ)": clipped,
        "min(ρA, clip(ρ)A)": np.minimum(ratio * report.advantages, clipped * report.advantages),
        "d": ref - new,
        "k3": k3_kl(new, ref),
    }
    for name, values in wanted.items():
        np.testing.assert_allclose(column(rows, name), values, atol=PRINTED, err_msg=name)

    old_t, new_t, ref_t = (torch.tensor(x)[None] for x in (old, new, ref))
    loss, stats = grpo_loss(new_t, old_t, ref_t, rewards[None], clip_eps=0.2, kl_coeff=0.05, eps=1e-4)
    assert totals == pytest.approx(
        {
            "mean of the group": report.group_mean[0],
            "std of the group": report.group_std[0],
            "policy loss": stats.policy_loss,
            "mean k3": stats.kl,
            "loss": loss.item(),
            "clip fraction": stats.clip_fraction,
        },
        abs=PRINTED,
    )


def test_the_aggregations_are_as_printed() -> None:
    costs = torch.tensor([[[1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]])
    mask = torch.tensor([[[1, 1, 0, 0], [1, 1, 1, 1]]])
    unmoved = torch.zeros_like(costs)  # ratio 1 everywhere: a token costs minus its advantage
    rows = table("aggregation")
    assert len(rows) == 3
    for row in rows:
        loss, _ = grpo_loss(
            unmoved,
            unmoved,
            advantages=-costs,
            kl_coeff=0.0,
            aggregation=row["aggregation"],  # type: ignore[arg-type]
            mask=mask,
            max_length=8,
        )
        assert loss.item() == pytest.approx(float(row["value"]), abs=PRINTED)


def test_the_limits_the_page_states_are_the_codes() -> None:
    from rm_client.advantages import ZERO_SPREAD
    from rm_client.grpo import LOG_RATIO_LIMIT

    assert ZERO_SPREAD == 1e-6
    assert "max − min ≤ 10⁻⁶ · max |reward|" in PAGE
    assert f"cut off at {LOG_RATIO_LIMIT:.0f} before `exp`" in PAGE
