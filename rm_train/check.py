"""``rm-train check``: from files and limits to a report of the data doctor and an exit code.

Invariant: nothing is dropped on the way; a row that cannot be read is a finding with its place, not an error.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rm_train.config import Columns, SourceConfig, parse_source
from rm_train.data import draw, read_pairs
from rm_train.doctor import check_pairs
from rm_train.doctor_report import KINDS, DoctorReport, Finding
from rm_train.pairs import Pair
from rm_train.rows import DataError

if TYPE_CHECKING:
    from rm_core.chat import Renderer

Level = Literal["error", "warning", "never"]


@dataclass(frozen=True)
class CheckInput:
    """What is examined and against which limits."""

    train: list[SourceConfig]
    eval: list[SourceConfig] = field(default_factory=list)
    columns: Columns = field(default_factory=dict)
    model: str | None = None
    """Whose tokenizer and template the pairs are rendered with; None leaves rendering out."""
    revision: str | None = None
    max_length: int | None = None
    """Longest sequence in tokens; None for the model's context."""
    text_as: Literal["raw", "chat"] | None = None
    """How strings are rendered; None as the model's record says, or else raw."""


def input_of(data: Sequence[str], evaluation: Sequence[str], **given: Any) -> CheckInput:
    """What the command line names: sources, or one training config whose data, model and limits are meant.

    Options that are given (not None) go before those of the config. Raises DataError or ConfigError.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    configs = [name for name in data if name.lower().endswith((".yaml", ".yml"))]
    if not configs:
        return CheckInput(_sources(data), _sources(evaluation), **chosen)
    if len(data) > 1:
        raise DataError(configs[0], "a training config is examined alone; name either one config or data files")
    from rm_train.config_file import load_config

    config = load_config(configs[0])
    values: dict[str, Any] = {
        "columns": config.data.columns,
        "model": config.model.base,
        "revision": config.model.revision,
        "max_length": config.model.max_length,
        "text_as": config.model.text_as,
    }
    held_out = _sources(evaluation) if evaluation else list(config.data.eval or [])
    return CheckInput(list(config.data.train), held_out, **{**values, **chosen})


def _sources(texts: Sequence[str]) -> list[SourceConfig]:
    return [SourceConfig.model_validate(parse_source(text)) for text in texts]


def examine(
    given: CheckInput,
    *,
    limit: int | None = None,
    fast: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> DoctorReport:
    """Read, render and examine. ``limit`` draws that many pairs of each source, ``fast`` leaves out the bag of words.

    ``progress`` is called with the number of pairs read since the last call. Raises DataError where a source cannot
    be read at all, and CheckpointError or LoadError where the model's tokenizer cannot.
    """
    renderer, context = _renderer(given) if given.model is not None else (None, None)
    broken: list[DataError] = []
    tally: Counter[str] = Counter()

    def read(sources: list[SourceConfig]) -> list[Pair]:
        found: list[Pair] = []
        for source in sources:
            pairs = []
            for pair in read_pairs(source, given.columns, on_error=broken.append, tally=tally):
                pairs.append(pair)
                progress(1)
            found += draw(pairs, limit, "check")
        return found

    train, evaluation = read(given.train), read(given.eval)
    if not train and not broken:
        raise DataError(", ".join(source.path for source in given.train), "holds no pairs")
    limits = [length for length in (given.max_length, context) if length is not None]
    return check_pairs(
        train,
        evaluation,
        renderer=renderer,
        max_length=min(limits, default=None),
        broken=broken,
        tied_rows=tally["tied_rows"],
        baselines="length" if fast else "all",
    )


def _renderer(given: CheckInput) -> tuple["Renderer", int | None]:
    """The renderer of the model's tokenizer, and its context in tokens where tokenizer or config know it."""
    from rm_core.checkpoint import read_record, renderer_for
    from rm_core.loading import load_tokenizer, locate

    assert given.model is not None, "this is a bug: rendering needs a model"
    directory = locate(given.model, given.revision).directory
    tokenizer = load_tokenizer(directory)
    renderer = renderer_for(tokenizer, read_record(directory), given.model, text_as=given.text_as)
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}  # an adapter has none of its own
    lengths = (tokenizer.model_max_length, config.get("max_position_embeddings"), config.get("n_positions"))
    return renderer, min((int(length) for length in lengths if length and length < 1e9), default=None)


# ------------------------------------------------------------------ limits


@dataclass(frozen=True)
class Allowance:
    """How much of one kind of fault is put up with."""

    kind: str
    count: int | None = None
    share: float | None = None

    def covers(self, finding: Finding) -> bool:
        """Whether the finding stays within it."""
        if self.count is not None:
            return finding.count <= self.count
        return finding.count <= (self.share or 0.0) * finding.total


def parse_allowance(text: str) -> Allowance:
    """Read ``KIND=COUNT`` or ``KIND=SHARE%``. Raises ValueError saying what is wrong."""
    kind, equals, amount = text.partition("=")
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of finding; known: {', '.join(KINDS)}")
    try:
        if not equals:
            raise ValueError
        allowance = (
            Allowance(kind, share=float(amount[:-1]) / 100) if amount.endswith("%") else Allowance(kind, int(amount))
        )
    except ValueError:
        raise ValueError(f"{text}: write a count or a share, for instance {kind}=10 or {kind}=0.5%") from None
    if (allowance.count or 0) < 0 or not 0 <= (allowance.share or 0.0) <= 1:
        raise ValueError(f"{text}: a count is not negative and a share lies between 0% and 100%")
    return allowance


def too_many(report: DoctorReport, level: Level, allowances: Sequence[Allowance] = ()) -> list[Finding]:
    """The findings that fail a check: as bad as ``level`` or worse, and over what is allowed of their kind."""
    bad = {"error": {"error"}, "warning": {"error", "warning"}, "never": set()}[level]
    within = {
        finding.kind
        for finding in report.findings
        if any(allowance.kind == finding.kind and allowance.covers(finding) for allowance in allowances)
    }
    return [finding for finding in report.findings if finding.severity in bad and finding.kind not in within]


def lines_of(report: DoctorReport, *, besides: DoctorReport | None = None) -> list[str]:
    """Each finding as one line, for ``fit``; without those that ``besides`` has too."""
    return [
        f"check: {finding.severity}: {finding.kind} ({finding.count:,} of {finding.total:,}): {finding.meaning}; "
        f"first {finding.examples[0].where}"
        for finding in report.findings
        if besides is None or finding not in besides.findings
    ]


def json_of(report: DoctorReport) -> str:
    """The report as JSON text, without any word of the data."""
    return json.dumps(report.to_json(text=False), indent=2) + "\n"
