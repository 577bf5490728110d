"""The commands that look at data, runs and logs and change none: ``check``, ``report``, ``replay``.

Invariant: results go to stdout, progress to stderr; with ``--json`` stdout is one JSON document.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from rm_train.options import Column, Dtype, MaxTokens, columns_of, dtype_of, one_of

Sources = Annotated[
    list[str], typer.Argument(help="Files, directories or hub datasets (org/name:split) of pairs, or one config.yaml.")
]


def check(
    data: Sources,
    evaluation: Annotated[
        list[str] | None, typer.Option("--eval", metavar="DATA", help="Evaluation pairs: looked through for leaks too.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Render with the tokenizer of this model: lengths, template, control tokens."),
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=8, help="Longest sequence in tokens (with --model).")] = None,
    text_as: Annotated[str | None, typer.Option(help="How strings are rendered: raw or chat.")] = None,
    column: Column = None,
    fail_on: Annotated[str, typer.Option(help="Exit with 1 on: error, warning or never.")] = "error",
    allow: Annotated[
        list[str] | None, typer.Option(metavar="KIND=LIMIT", help="Put up with so many pairs (10) or a share (0.5%).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examine at most this many pairs of each source.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Leave out the bag of words, the slow part.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    examples: Annotated[int, typer.Option(min=0, help="Examples of each kind in the JSON.")] = 5,
    no_text: Annotated[bool, typer.Option("--no-text", help="Leave every word of the data out of the JSON.")] = False,
) -> None:
    """Find what is wrong with preference pairs, before training on them; exit code 1 where there is too much."""
    from rich.console import Console

    from rm_train.check import examine, input_of, parse_allowance, too_many
    from rm_train.console import ConsoleReporter

    level = one_of(fail_on, ("error", "warning", "never"), "--fail-on")
    try:
        allowances = [parse_allowance(text) for text in allow or []]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--allow") from None
    given = input_of(
        data,
        evaluation or [],
        model=model,
        max_length=max_length,
        text_as=None if text_as is None else one_of(text_as, ("raw", "chat"), "--text-as"),
        columns=columns_of(column),
    )
    for flag, value in (("--max-length", max_length), ("--text-as", text_as)):
        if value is not None and given.model is None:
            raise typer.BadParameter("has no effect without --model: pairs are not rendered", param_hint=flag)
    with ConsoleReporter().count("reading pairs") as advance:
        report = examine(given, limit=limit, fast=fast, progress=advance)
    failing = too_many(report, level, allowances)
    if as_json:
        values = {**report.to_json(examples=examples, text=not no_text), "failing": [item.kind for item in failing]}
        typer.echo(json.dumps(values, indent=2))
    else:
        Console(highlight=False).print(report)
        if failing:
            typer.echo(f"not fit for training: {', '.join(item.kind for item in failing)}")
    if failing:
        raise typer.Exit(1)


def report(
    run: Annotated[Path, typer.Argument(help="Directory of a run: runs/NAME.")],
    output: Annotated[Path | None, typer.Option(help="Write the page here.  [default: RUN/report.html]")] = None,
    no_text: Annotated[bool, typer.Option("--no-text", help="Leave out every word of prompts and answers.")] = False,
) -> None:
    """Write one self-contained HTML page about a run, with its plots also as PNG files."""
    from rm_train.report import write_run_report

    page, pictures = write_run_report(run, output, text=not no_text)
    typer.echo(f"{page}  ({len(pictures)} plots in {page.with_suffix('')})")


def replay(
    log: Annotated[Path, typer.Argument(metavar="AUDIT_LOG", help="A server's audit log; LOG.1, … are read with it.")],
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint that the server had.")],
    data: Annotated[list[str], typer.Argument(help="Files of the rows that were scored: texts, completions or pairs.")],
    dtype: Dtype = "float32",
    max_tokens: MaxTokens = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compute the rewards of an audit log again; exit code 1 where one differs or belongs to another model."""
    from rm_core.model import RewardModel
    from rm_train.console import ConsoleReporter
    from rm_train.replay import replay as run_replay

    model = RewardModel.load(checkpoint, dtype=dtype_of(dtype))
    with ConsoleReporter().count("scoring") as advance:
        found = run_replay(log, model, data, max_tokens=max_tokens, progress=advance)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(
            f"{found['lines']:,} lines: {found['confirmed']:,} confirmed, {found['different']:,} different, "
            f"{found['not_in_data']:,} not in the data, {found['other_reward_id']:,} of another reward id; "
            f"largest difference {found['largest_difference']:.3g}"
        )
        for item in found["examples"]:
            typer.echo(f"{item['where']}: logged {item['logged']:.6g}, computed {item['computed']:.6g}")
    if found["different"] or found["other_reward_id"]:
        raise typer.Exit(1)
