"""Arguments and options that several commands of ``rm-train`` have in common.

Invariant: an option has one name, one help text and one check, wherever it occurs.
"""

from typing import Annotated, Any

import typer

Data = Annotated[list[str], typer.Argument(help="Files, directories or hub datasets (org/name:split) of pairs.")]
MaxTokens = Annotated[int, typer.Option(min=16, help="Most tokens in one forward pass.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=8, help="Cut longer pairs to this many tokens.  [default: as in training, or else the model's context]"
    ),
]
Conservative = Annotated[
    float, typer.Option(min=0.0, metavar="K", help="Reward = mean - K * std over the heads (head.count above 1).")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Evaluate the first pairs of each source, this many at most.")]

Column = Annotated[
    list[str] | None, typer.Option("--column", metavar="OURS=THEIRS", help="Map a column, for instance prompt=q.")
]


def columns_of(texts: list[str] | None) -> dict[str, str | None] | None:
    """The values of ``--column``; ``OURS=`` hides the column. None where there are none."""
    from rm_train.config import CANONICAL_COLUMNS

    found: dict[str, str | None] = {}
    for text in texts or []:
        ours, equals, theirs = text.partition("=")
        if not equals or ours not in CANONICAL_COLUMNS:
            known = ", ".join(CANONICAL_COLUMNS)
            raise typer.BadParameter(f"{text}: write OURS=THEIRS; ours are {known}", param_hint="--column")
        found[ours] = theirs or None
    return found or None


def one_of(value: str, choices: tuple[str, ...], flag: str) -> Any:
    """The value, where it is one of the choices; wrong usage otherwise."""
    if value not in choices:
        raise typer.BadParameter(f"must be {', '.join(choices[:-1])} or {choices[-1]}", param_hint=flag)
    return value


def dtype_of(name: str) -> Any:
    """The value of ``--dtype``."""
    return one_of(name, ("auto", "float32", "bfloat16"), "--dtype")
