"""The plots of a run's report, as PNG bytes.

Invariant: a plot is made from a ``Run`` alone, and left out where the run has no data for it; text is large enough to
be read on a phone, and nothing is told by colour alone.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rm_train import metrics
from rm_train.run_directory import Run

Floats = npt.NDArray[np.float64]

CHOSEN, REJECTED, NEUTRAL, DARK = "#1f6f9f", "#c2552d", "#8a8f98", "#24292f"
_STYLE: Any = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": NEUTRAL,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "axes.axisbelow": True,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "white",
    "legend.fontsize": 11,
    "savefig.facecolor": "white",
}
_MOST_POINTS = 800
_MOST_GROUPS = 14


def plots(run: Run) -> Iterator[tuple[str, str, bytes]]:
    """Yield (file name without suffix, what it shows in words, PNG) of every plot the run has data for."""
    makers: list[tuple[str, str, Callable[[Run], Figure | None]]] = [
        ("loss", "Loss of training steps and evaluations against the step", _loss),
        ("accuracy", "Accuracy of training steps and evaluations against the step", _accuracy),
        ("optimisation", "Learning rate and gradient norm against the step", _optimisation),
        ("rewards", "Histogram of the rewards of chosen and rejected answers", _rewards),
        ("margins", "Histogram of chosen minus rejected reward", _margins),
        ("reliability", "Accuracy against the model's confidence", _reliability),
        ("categories", "Accuracy by category beside the baselines", _categories),
        ("length", "Reward against the length of the answer", _length),
    ]
    with matplotlib.rc_context(_STYLE):
        for name, words, make in makers:
            figure = make(run)
            if figure is not None:
                png = io.BytesIO()
                # no date inside: the same run gives the same bytes
                figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
                yield name, words, png.getvalue()


def _figure(height: float = 3.9) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    return figure, figure.add_subplot()


# ------------------------------------------------------------------ training


def _curve(axes: Any, steps: Floats, values: Floats, label: str, colour: str) -> None:
    """The single steps faint, their running mean strong."""
    if len(steps) > _MOST_POINTS:
        size = -(-len(steps) // _MOST_POINTS)
        parts = np.array_split(np.arange(len(steps)), -(-len(steps) // size))
        steps = np.array([steps[part].mean() for part in parts])
        values = np.array([values[part].mean() for part in parts])
    window = max(1, len(steps) // 20)
    if window == 1:
        axes.plot(steps, values, color=colour, marker="." if len(steps) < 40 else None, label=label)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    kernel = np.ones(window)
    counts = np.convolve(np.ones_like(values), kernel, mode="same")
    axes.plot(steps, np.convolve(values, kernel, mode="same") / counts, color=colour, linewidth=2, label=label)


def _steps(run: Run, name: str) -> tuple[Floats, Floats]:
    lines = [line for line in run.steps if name in line]
    return np.array([line["step"] for line in lines], float), np.array([line[name] for line in lines], float)


def _evaluations(run: Run, name: str) -> tuple[Floats, Floats]:
    lines = [line for line in run.evaluations if name in line]
    return np.array([line["step"] for line in lines], float), np.array([line[name] for line in lines], float)


def _over_steps(run: Run, name: str, title: str, level: float, level_label: str, place: str) -> Figure | None:
    steps, values = _steps(run, name)
    if not len(steps):
        return None
    figure, axes = _figure()
    axes.axhline(level, color=NEUTRAL, linestyle="--", linewidth=1.2, label=level_label)
    _curve(axes, steps, values, "training", CHOSEN)
    at, found = _evaluations(run, f"eval_{name}")
    if len(at):
        axes.plot(at, found, color=REJECTED, marker="o", linewidth=2, label="evaluation")
    axes.set(title=title, xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc=place)
    return figure


def _loss(run: Run) -> Figure | None:
    return _over_steps(run, "loss", "Loss", float(np.log(2)), "ln 2: no preference", "lower left")


def _accuracy(run: Run) -> Figure | None:
    return _over_steps(run, "accuracy", "Accuracy", 0.5, "chance", "lower right")


def _optimisation(run: Run) -> Figure | None:
    steps, rates = _steps(run, "learning_rate")
    _, norms = _steps(run, "grad_norm")
    if not len(steps):
        return None
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(steps, rates, color=DARK)
    above.set(title="Learning rate")
    above.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    _curve(below, steps, norms, "", CHOSEN)
    below.set(title="Gradient norm, before clipping", xlabel="step")
    if (norms > 0).all() and norms.max() > 30 * np.median(norms):
        below.set_yscale("log")
    return figure


# ------------------------------------------------------------------ rewards


def columns(run: Run) -> tuple[Floats, Floats]:
    """Rewards of the chosen and of the rejected answers, [N] each."""
    return np.array([pair["chosen"] for pair in run.pairs], float), np.array([p["rejected"] for p in run.pairs], float)


def _edges(values: Floats, num_pairs: int) -> Floats:
    bins = int(np.clip(np.sqrt(num_pairs) * 1.5, 8, 40))
    low, high = np.quantile(values, [0.002, 0.998]) if len(values) > 1000 else (values.min(), values.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, bins + 1)


def _through_zero(edges: Floats) -> Floats:
    """Moved so that one edge is zero: a bar is then right or wrong as a whole."""
    width = edges[1] - edges[0]
    return np.asarray(width * np.arange(np.floor(edges[0] / width), np.ceil(edges[-1] / width) + 1), dtype=np.float64)


def _rewards(run: Run) -> Figure | None:
    if not run.pairs:
        return None
    chosen, rejected = columns(run)
    edges = _edges(np.concatenate([chosen, rejected]), len(chosen))
    figure, axes = _figure()
    axes.hist(rejected.clip(edges[0], edges[-1]), edges, color=REJECTED, alpha=0.45, label="rejected")
    axes.hist(chosen.clip(edges[0], edges[-1]), edges, histtype="step", color=CHOSEN, linewidth=2.2, label="chosen")
    axes.set(title="Rewards", xlabel="reward", ylabel="answers")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left")
    axes.margins(y=0.22)
    return figure


def _margins(run: Run) -> Figure | None:
    if not run.pairs:
        return None
    chosen, rejected = columns(run)
    margins = chosen - rejected
    edges = _through_zero(_edges(margins, len(margins)))
    figure, axes = _figure()
    _, _, bars = axes.hist(margins.clip(edges[0], edges[-1]), edges, color=CHOSEN, edgecolor="white")
    for left, bar in zip(edges[:-1], bars, strict=True):
        if left < -1e-9 * edges[-1]:
            bar.set(color=REJECTED, hatch="//", edgecolor="white")
    axes.axvline(0, color=DARK, linewidth=1.2)
    right = metrics.accuracy(chosen, rejected)
    axes.set(title=f"Margins: {right:.1%} of the pairs right of zero", xlabel="chosen − rejected", ylabel="pairs")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _reliability(run: Run) -> Figure | None:
    if not run.pairs or run.record is None:
        return None
    chosen, rejected = columns(run)
    table = metrics.reliability(
        chosen,
        rejected,
        temperature=run.record.temperature,
        labels=[pair.get("label", 1.0) for pair in run.pairs],
        weights=[pair.get("weight", 1.0) for pair in run.pairs],
    )
    used = [
        (row.confidence, row.accuracy, row.pairs)
        for row in table
        if row.confidence is not None and row.accuracy is not None
    ]
    figure, axes = _figure(4.4)
    axes.plot([0.5, 1], [0.5, 1], color=NEUTRAL, linestyle="--", label="calibrated")
    x, y, pairs = np.array(used, float).T
    low, high = _wilson(y, pairs)
    axes.errorbar(
        x, y, yerr=[y - low, high - y], color=CHOSEN, marker="o", markersize=7, linewidth=1.8, elinewidth=1, capsize=3,
        label="this model, 95 % interval",
    )  # fmt: skip
    for confidence, accuracy, number in zip(x, y, pairs, strict=True):
        axes.annotate(f"{number:.0f}", (confidence, accuracy), (9, -4), textcoords="offset points", fontsize=10)
    axes.set(
        title=f"Calibration at temperature {run.record.temperature:.3g}",
        xlabel="confidence in the preferred answer (numbers: pairs)",
        ylabel="accuracy",
        xlim=(0.48, 1.04),
        ylim=(float(low.min()) - 0.05, 1.03),
    )
    axes.legend(loc="lower right")
    return figure


def _wilson(share: Floats, number: Floats) -> tuple[Floats, Floats]:
    """95 % interval of a share of so many pairs (Wilson), which stays between 0 and 1."""
    z = 1.96
    centre = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    half = z * np.sqrt(share * (1 - share) / number + z**2 / (4 * number**2)) / (1 + z**2 / number)
    return np.minimum(centre - half, share), np.maximum(centre + half, share)


# ------------------------------------------------------------------ groups, length


def by_group(run: Run, name: str) -> list[tuple[str, int, float, float, float | None]]:
    """(group, pairs, accuracy, longer wins, bag of words) for each value of ``category`` or ``source``."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for pair in run.pairs:
        if pair.get(name) is not None:
            groups.setdefault(str(pair[name]), []).append(pair)

    def share(pairs: list[dict[str, Any]], margin: Callable[[dict[str, Any]], float]) -> float:
        right = [0.5 if pair.get("label") == 0.5 else 0.5 * (1 + np.sign(margin(pair))) for pair in pairs]
        return float(np.average(right, weights=[pair.get("row_part", 1.0) for pair in pairs]))

    found = []
    for group, pairs in groups.items():
        words = share(pairs, lambda p: p["bag_of_words"]) if all("bag_of_words" in p for p in pairs) else None
        longer = share(pairs, lambda p: p["chosen_length"] - p["rejected_length"])
        found.append((group, len(pairs), share(pairs, lambda p: p["chosen"] - p["rejected"]), longer, words))
    return sorted(found, key=lambda row: (-row[1], row[0]))


def _categories(run: Run) -> Figure | None:
    name = "category" if len(by_group(run, "category")) > 1 else "source"
    rows = by_group(run, name)[:_MOST_GROUPS]
    if len(rows) < 2:
        return None
    figure, axes = _figure(1.5 + 0.55 * len(rows))
    places = np.arange(len(rows))[::-1]
    accuracy = np.array([row[2] for row in rows])
    axes.barh(places, accuracy, height=0.62, color=CHOSEN, alpha=0.85, label="this model")
    axes.plot([row[3] for row in rows], places, "D", color=DARK, markersize=7, label="longer wins")
    if all(row[4] is not None for row in rows):
        axes.plot([row[4] for row in rows], places, "o", color=REJECTED, markersize=8, label="bag of words")
    for place, row in zip(places, rows, strict=True):
        if row[2] > 0.1:  # else the bar is too short for its number
            axes.annotate(f"{row[2]:.2f}", (0.015, place), color="white", va="center", fontsize=11, fontweight="bold")
    axes.axvline(0.5, color=NEUTRAL, linestyle="--", linewidth=1.2)
    axes.set_yticks(places, [f"{_short(row[0])} ({row[1]})" for row in rows])
    axes.grid(axis="y", visible=False)
    axes.set(title=f"Accuracy by {name}", xlim=(0, 1), xlabel="accuracy (pairs in brackets)")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _short(text: str) -> str:
    # names of one set often begin alike
    return text if len(text) <= 22 else f"{text[:10]}…{text[-11:]}"


def _length(run: Run) -> Figure | None:
    if not run.pairs:
        return None
    pairs = run.pairs[:: -(-len(run.pairs) // 1500)]
    figure, axes = _figure(4.2)
    for name, colour, marker in (("chosen", CHOSEN, "o"), ("rejected", REJECTED, "x")):
        axes.scatter(
            [pair[f"{name}_length"] for pair in pairs],
            [pair[name] for pair in pairs],
            s=16,
            alpha=0.55,
            color=colour,
            marker=marker,
            linewidths=1 if marker == "x" else 0,
            label=name,
        )
    lengths = [pair[f"{name}_length"] for pair in run.pairs for name in ("chosen", "rejected")]
    rewards = [pair[name] for pair in run.pairs for name in ("chosen", "rejected")]
    found = metrics.correlation(rewards, lengths)
    if min(lengths) > 0 and max(lengths) > 50 * min(lengths):
        axes.set_xscale("log")
    title = "Reward against length" if found is None else f"Reward against length: correlation {found:.2f}"
    axes.set(title=title, xlabel="length of the answer, characters", ylabel="reward")
    axes.legend()
    return figure
