"""``rm-train eval`` and ``rm-train compare``. ``cli.py`` registers them.

Invariant: results go to stdout, progress to stderr; with ``--json`` stdout is one JSON document.
"""

import json
from typing import Annotated, Any

import typer

from rm_train.options import Column, Conservative, Data, Dtype, Limit, MaxLength, MaxTokens, columns_of, dtype_of

AsJson = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint, local model folder or hub id.")],
    data: Data,
    dtype: Dtype = "auto",
    max_tokens: MaxTokens = 4096,
    max_length: MaxLength = None,
    conservative: Conservative = 0.0,
    limit: Limit = None,
    column: Column = None,
    as_json: AsJson = False,
) -> None:
    """Accuracy with interval, calibration and length bias of a model on pairs and best-of-N sets."""
    from rich.console import Console

    from rm_core.model import RewardModel
    from rm_train.console import ConsoleReporter, report_table
    from rm_train.evaluate import evaluate_data, report_of

    columns = columns_of(column)
    model = RewardModel.load(checkpoint, dtype=dtype_of(dtype))
    found = evaluate_data(
        model,
        data,
        columns=columns,
        max_tokens=max_tokens,
        max_length=max_length,
        conservative=conservative,
        limit=limit,
        reporter=ConsoleReporter(),
    )
    report = report_of(model, found)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        Console(highlight=False).print(report_table(report))


def compare(
    old: Annotated[str, typer.Argument(help="Checkpoint, local model folder or hub id.")],
    new: Annotated[str, typer.Argument(help="What it is compared with.")],
    data: Data,
    also: Annotated[list[str] | None, typer.Option(metavar="CHECKPOINT", help="A further model.")] = None,
    dtype: Dtype = "auto",
    max_tokens: MaxTokens = 4096,
    max_length: MaxLength = None,
    limit: Limit = None,
    column: Column = None,
    as_json: AsJson = False,
) -> None:
    """Two or more models on the same rows: paired differences, and the map between their rewards."""
    from rich.console import Console

    from rm_train import evaluate as evaluation
    from rm_train.console import ConsoleReporter

    result = evaluation.compare(
        [old, new, *(also or [])],
        data,
        dtype=dtype_of(dtype),
        columns=columns_of(column),
        max_tokens=max_tokens,
        max_length=max_length,
        limit=limit,
        reporter=ConsoleReporter(),
    )
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        Console(highlight=False).print(_table(result))


def _table(result: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for model in result["models"]:
        table.add_row(model["model"], model["reward_id"])
        if model.get("pairs"):
            cut = f" ({model['truncated']} cut to {model['max_length']} tokens)" if model["truncated"] else ""
            table.add_row("  accuracy", f"{_with_interval(model['accuracy'])}, {model['pairs']} pairs{cut}")
        if best := model.get("best_of_n"):
            table.add_row("  best-of-N", f"{best['mean_of_subsets']:.3f} (mean of subsets), {best['prompts']} prompts")
    for item in result["comparisons"]:
        table.add_row(f"{item['old']} → {item['new']}", "")
        for name, key in (("accuracy", "pairs"), ("best-of-N", "best_of_n")):
            if found := item.get(key):
                table.add_row(
                    f"  difference in {name}",
                    f"{_with_interval(found['difference'], '+')}, p = {found['p_value']:.2g}; better on "
                    f"{found['only_second_right']}, worse on {found['only_first_right']}",
                )
        rewards = item["rewards"]
        correlation = "-" if rewards["correlation"] is None else f"{rewards['correlation']:.4f}"
        table.add_row(
            "  new reward ≈", f"{rewards['scale']:.4g} · old + {rewards['offset']:.4g}  (correlation {correlation})"
        )
    return table


def _with_interval(interval: dict[str, Any], sign: str = "") -> str:
    return f"{interval['value']:{sign}.3f} (95 % interval {interval['low']:{sign}.3f} to {interval['high']:{sign}.3f})"
