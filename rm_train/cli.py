"""``rm-train``: the commands and their options. What they do lives in the modules they call.

Invariant: a user's error is one line on stderr and exit code 2, never a traceback.
"""

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Annotated, Literal

import typer

from rm_core.smollm2 import BundledModelError
from rm_train import eval_commands, inspect_commands
from rm_train.options import Column, Conservative, Data, Dtype, Limit, MaxTokens, columns_of, dtype_of, one_of

app = typer.Typer(
    name="rm-train",
    help="Train, evaluate and convert Bradley-Terry reward models.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def fit(
    config: Annotated[Path, typer.Argument(help="YAML file; docs/configuration.md lists its keys.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last saved state.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again where an unfinished run left a saved state.")
    ] = False,
) -> None:
    """Train a reward model and write runs/NAME/checkpoint."""
    from rm_train.config_file import load_config
    from rm_train.console import ConsoleReporter, report_table

    if resume and overwrite:
        raise typer.BadParameter(
            "goes on with what --overwrite would throw away; give one of them", param_hint="--resume"
        )
    loaded = load_config(config, overrides or [])
    from rm_train.fit import fit as run_fit

    reporter = ConsoleReporter()
    result = run_fit(loaded, reporter, resume=resume, overwrite=overwrite)
    if result.record is not None:
        from rich.console import Console

        Console(highlight=False).print(report_table(result.record.metrics))
        typer.echo(f"checkpoint: {result.directory / 'checkpoint'}  ({result.record.reward_id})")


app.command()(inspect_commands.check)
app.command()(inspect_commands.report)
app.command()(inspect_commands.replay)


app.command(name="eval")(eval_commands.evaluate)
app.command()(eval_commands.compare)


@app.command()
def score(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint, local model folder or hub id.")],
    file: Annotated[str, typer.Argument(help="JSONL file, or - for standard input.")],
    dtype: Dtype = "auto",
    max_tokens: MaxTokens = 4096,
    components: Annotated[
        bool, typer.Option("--components", help="Add mean, std and min over the heads (head.count above 1).")
    ] = False,
    conservative: Conservative = 0.0,
) -> None:
    """Score rows {"prompt", "completions"}, {"prompt", "completion"}, {"text"} or {"messages"}; JSON lines out."""
    from rm_core.model import RewardModel
    from rm_train.rows import DataError
    from rm_train.score_file import score_lines

    try:
        opened: AbstractContextManager[IO[bytes]] = (
            nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb")  # noqa: SIM115 - closed below
        )
    except OSError as error:
        raise DataError(file, f"cannot be read: {error.strerror or error}") from None
    failed = False
    with opened as lines:
        model = RewardModel.load(checkpoint, dtype=dtype_of(dtype))
        for answer in score_lines(
            model, lines, max_tokens=max_tokens, components=components, conservative=conservative
        ):
            failed |= "error" in answer
            typer.echo(json.dumps(answer))
    if failed:
        raise typer.Exit(1)


@app.command()
def merge(
    checkpoint: Annotated[str, typer.Argument(help="Adapter checkpoint.")],
    output: Annotated[Path, typer.Argument(help="New directory.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Turn an adapter into a plain sequence-classification model, proved the same by the golden scores."""
    from rm_train.adopt import merge as run_merge

    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter("must be float32 or bfloat16", param_hint="--dtype")
    name: Literal["float32", "bfloat16"] = "float32" if dtype == "float32" else "bfloat16"
    record, largest = run_merge(checkpoint, output, name)
    typer.echo(f"{output}: {record.reward_id}, golden scores differ by at most {largest:.3g}")


@app.command()
def push(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder.")],
    repository: Annotated[str, typer.Argument(help="Hub repository, owner/name; made where it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private where it is new.")] = False,
    branch: Annotated[str | None, typer.Option(help="Push to this branch.  [default: main]")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
) -> None:
    """Verify a checkpoint and upload it to a model hub, with its model card."""
    from rm_train.push import push as run_push

    typer.echo(run_push(checkpoint, repository, private=private, branch=branch, message=message))


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Reward model trained elsewhere: a folder or hub id.")],
    data: Data,
    output: Annotated[
        Path | None, typer.Option(help="Write a copy here instead of adding the record in place.")
    ] = None,
    text_as: Annotated[
        str | None, typer.Option(help="How strings are scored: raw or chat.  [default: raw, or what its record says]")
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(
            help="token, or template when it was trained on the template's whole output.  "
            "[default: template, or what its record says]"
        ),
    ] = None,
    training_length: Annotated[int | None, typer.Option(min=1, help="Longest sequence it was trained on.")] = None,
    max_tokens: MaxTokens = 4096,
    limit: Limit = None,
    column: Column = None,
) -> None:
    """Adopt a model trained elsewhere: write its rules, reward scale and golden scores (reward_model.json)."""
    from rich.console import Console

    from rm_core.checkpoint import Measured
    from rm_core.model import RewardModel
    from rm_train.adopt import calibrate as run_calibrate
    from rm_train.console import ConsoleReporter, report_table
    from rm_train.eval_table import measured
    from rm_train.evaluate import evaluate_data
    from rm_train.rows import DataError

    as_ = None if text_as is None else one_of(text_as, ("raw", "chat"), "--text-as")
    columns = columns_of(column)
    end_ = None if end is None else one_of(end, ("token", "template"), "--end")

    def measure(loaded: RewardModel) -> Measured:
        found = evaluate_data(
            loaded,
            data,
            columns=columns,
            max_tokens=max_tokens,
            max_length=min(training_length, loaded.max_length) if training_length is not None else None,
            limit=limit,
            reporter=ConsoleReporter(),
        )
        if not len(found.table):
            raise DataError(", ".join(data), "holds no pairs, only best-of-N rows")
        return measured(found.table, {"max_length": found.max_length})

    record, directory = run_calibrate(
        model, measure, {"sources": data}, output=output, text_as=as_, end=end_, training_length=training_length
    )
    Console(highlight=False).print(report_table(record.metrics))
    typer.echo(f"{directory}: {record.reward_id}")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command, turn users' errors into one line and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    given = sys.argv[1:] if arguments is None else arguments
    try:
        # outside its stand-alone mode typer answers with the code of an Exit instead of raising it
        code = app(args=given or ["--help"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except Exception as error:
        message = _message_for_user(error)
        if message is None:
            raise
        print(f"rm-train: error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    if code:
        sys.exit(code)


def _message_for_user(error: Exception) -> str | None:
    """What to tell about an error that is the user's to mend; None for a bug of ours, which keeps its trace."""
    from rm_core.chat import RenderError
    from rm_train.config_file import ConfigError
    from rm_train.rows import DataError

    if hasattr(error, "format_message"):  # wrong usage: click's exceptions, which typer brings along under other names
        return str(error.format_message())
    if isinstance(error, OSError):  # a full disk, a directory that may not be written
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    known: tuple[type[Exception], ...] = (ConfigError, DataError, BundledModelError, RenderError)
    if "torch" in sys.modules:
        from rm_core.checkpoint import CheckpointError
        from rm_core.loading import LoadError
        from rm_train.loop import DivergedError
        from rm_train.run_directory import RunError
        from rm_train.state import ResumeError

        known = (*known, CheckpointError, LoadError, DivergedError, ResumeError, RunError)
    if isinstance(error, known) or (isinstance(error, ValueError) and str(error).startswith("device:")):
        return str(error)
    return None


if __name__ == "__main__":
    main()
