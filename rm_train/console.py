"""What the command line shows: progress bars with an estimate of the time left, tables, one-line errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_FRACTION = 10_000


class ConsoleReporter:
    """Progress on stderr, so that stdout stays for results."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """A bar; its function takes a count to add or, with ``total`` 1, the fraction reached, and a text to show."""
        by_fraction = total == 1
        columns = [TextColumn("{task.description}"), BarColumn(), *(() if by_fraction else (MofNCompleteColumn(),))]
        with Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=self.console,
        ) as progress:
            task = progress.add_task(title, total=_FRACTION if by_fraction else total, text="")

            def advance(amount: float, text: str = "") -> None:
                if by_fraction:
                    progress.update(task, completed=amount * _FRACTION, text=text)
                else:
                    progress.update(task, advance=amount, text=text)

            yield advance

    @contextmanager
    def count(self, title: str, about: int | None = None) -> Iterator[Callable[[int], None]]:
        """A counter for what has no known end, or ends after ``about`` so many."""
        columns = [TextColumn("{task.description}"), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn()]
        if about:
            columns[1:1] = [BarColumn()]
            columns += [TextColumn("of about {task.total:,.0f}"), TimeRemainingColumn()]
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(title, total=about)
            yield lambda amount: progress.advance(task, amount)


def report_table(report: dict[str, Any]) -> Table:
    """An evaluation report as a table for people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    if limit := report.get("max_length"):
        table.add_row("length limit", f"{limit} tokens")
    if report.get("conservative"):
        table.add_row("reward is", f"mean - {report['conservative']:g} std over the heads")
    if report.get("pairs"):
        _add_pairs(table, report)
    if best := report.get("best_of_n"):
        _add_best_of(table, best)
    return table


def _add_best_of(table: Table, best: dict[str, Any]) -> None:
    table.add_row("best-of-N prompts", f"{best['prompts']}{_cut(best)}")
    if accuracy := best.get("accuracy"):
        table.add_row("best-of-N accuracy", _interval(accuracy))
    for name, subset in best["by_subset"].items():
        table.add_row(f"subset {name}", f"{subset['score']:.3f}  ({subset['prompts']} prompts)")
    table.add_row("mean of the subsets", f"{best['mean_of_subsets']:.3f}")


def _cut(counted: dict[str, Any]) -> str:
    return f" ({counted['truncated']} cut to the length limit)" if counted["truncated"] else ""


def _interval(accuracy: dict[str, Any]) -> str:
    return f"{accuracy['value']:.3f}  (95 % interval {accuracy['low']:.3f}-{accuracy['high']:.3f})"


def _add_pairs(table: Table, report: dict[str, Any]) -> None:
    accuracy = report["accuracy"]
    is_kwise = report.get("rows", report["pairs"]) != report["pairs"]
    rows = [
        ("pairs", f"{report['pairs']}{_cut(report)}"),
        *([("rows", f"{report['rows']}, each counting one in an accuracy")] if is_kwise else []),
        ("accuracy", _interval(accuracy)),
        *([("accuracy of pairs", f"{report['accuracy_of_pairs']:.3f}")] if is_kwise else []),
        ("longer wins", f"{report['longer_wins']:.3f}"),
    ]
    if report.get("bag_of_words") is not None:
        rows.append(("bag of words", f"{report['bag_of_words']:.3f}"))
    calibration, length = report["calibration"], report["length"]
    rows += [
        ("log-loss", f"{report['log_loss']:.4f}  (ln 2 = 0.6931)"),
        ("temperature", f"{calibration['temperature']:.3g}  (calibrated log-loss {calibration['log_loss']:.4f}, "
                        f"expected calibration error {calibration['expected_error']:.3f})"),
        ("reward", f"mean {report['reward']['mean']:.4g}, std {report['reward']['std']:.4g}, "
                   f"mean margin {report['reward']['mean_margin']:.4g}"),
        ("reward ~ length", _number(length["reward_correlation"])),
        ("accuracy at equal length", _share(length["matched"])),
    ]  # fmt: skip
    for name, key in (("category", "by_category"), ("source", "by_source")):
        if len(report[key]) > 1:
            rows += [(f"{name} {value}", _share(share)) for value, share in report[key].items()]
    if heads := report.get("heads"):
        right, wrong = _number(heads["margin_std_right"]), _number(heads["margin_std_wrong"])
        rows += [
            ("heads' spread", f"{heads['mean_std']:.4g} a reward; a margin's {right} where right, {wrong} where wrong"),
            ("accuracy of the surer half", f"{heads['accuracy_of_surer_half']:.3f}"),
            ("accuracy of mean - std", f"{heads['accuracy_mean_minus_std']:.3f}"),
        ]  # fmt: skip
    rows += [(name, _share(share)) for name, share in report.get("by_length_difference", {}).items()]
    for name, value in rows:
        table.add_row(name, value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(share: dict[str, Any]) -> str:
    return f"{_number(share['accuracy'])}  ({share['pairs']} pairs)"
