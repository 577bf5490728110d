"""The data doctor behind ``rm-train check``: what is wrong with these pairs, found before the GPU hours are spent.

Invariant: every finding counts pairs and says where they are; a pair that is broken in a known way is in a finding.
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rm_train.baselines import answer_length, bag_of_words_accuracy, longer_wins
from rm_train.data import content_text, find_leaks, normalise, prompt_key, split_by_prompt
from rm_train.doctor_report import KINDS, DoctorReport, Example, Finding, LengthStatistics, Severity
from rm_train.pairs import Pair
from rm_train.row_reader import Content
from rm_train.rows import DataError

if TYPE_CHECKING:
    from rm_core.chat import Renderer
    from rm_train.encode import EncodedPair

_BOW_PAIRS = 10_000
"""The bag of words sees at most this many training pairs: more change its accuracy little and its time much."""
_BOW_MINIMUM = 50


class _Findings:
    """Collects the pairs of each kind of fault."""

    def __init__(self) -> None:
        self._found: dict[str, list[Example]] = {}

    def add(self, kind: str, pair: Pair, note: str = "") -> None:
        self._found.setdefault(kind, []).append(Example(pair.where, note, _snippet(pair)))

    def finding(self, kind: str, severity: Severity, meaning: str, total: int) -> Finding | None:
        examples = self._found.get(kind)
        return Finding(kind, severity, meaning, tuple(examples), total) if examples else None


def check_pairs(
    pairs: Sequence[Pair],
    evaluation: Sequence[Pair] = (),
    *,
    renderer: "Renderer | None" = None,
    max_length: int | None = None,
    broken: Sequence[DataError] = (),
    tied_rows: int = 0,
    baselines: Literal["all", "length", "none"] = "all",
) -> DoctorReport:
    """Examine training pairs, and evaluation pairs where given.

    With a ``renderer``, pairs are also rendered: token lengths (over ``max_length`` tokens is a finding), template
    faults, BOS and end, answers whose tokens are the same. ``broken`` are the rows that could not be read and
    ``tied_rows`` the K-wise rows without a winner; both are passed on into the report. ``baselines="length"`` leaves
    out the bag of words, the slow part.
    """
    everything = [*pairs, *evaluation]
    findings = _Findings()
    _compare(pairs, findings)
    _compare(evaluation, findings)
    for leak in find_leaks(pairs, evaluation):
        findings.add("leaked", leak.eval, f"trained on in {leak.train.where}")
    tokens = _render_all(everything, renderer, max_length, findings) if renderer is not None else None
    found = [findings.finding(kind, *KINDS[kind], len(everything)) for kind in KINDS]
    if broken:
        examples = tuple(Example(error.where, error.problem, "") for error in broken)
        found.insert(0, Finding("broken", *KINDS["broken"], examples, len(everything) + len(broken)))
    return DoctorReport(
        train_pairs=len(pairs),
        eval_pairs=len(evaluation),
        prompts=len({prompt_key(pair) for pair in everything}),
        tied_rows=tied_rows,
        max_length=max_length if renderer is not None else None,
        findings=tuple(finding for finding in found if finding is not None),
        characters=_statistics(answer_length(pair) for pair in everything),
        tokens=_statistics(tokens) if tokens is not None else None,
        longer_wins=longer_wins(everything) if everything and baselines != "none" else None,
        bag_of_words=_bag_of_words(pairs, evaluation) if baselines == "all" else None,
    )


def _compare(pairs: Iterable[Pair], findings: _Findings) -> None:
    """Faults that show in a pair itself or in its likeness to an earlier one."""
    seen: dict[tuple[str, str, str], Pair] = {}
    for pair in pairs:
        chosen, rejected = _comparable(pair.chosen), _comparable(pair.rejected)
        if pair.turned:
            findings.add("doubtful_label", pair, f"label {1 - (pair.label or 0.0):g}")
        blank = [name for name, text in (("chosen", chosen), ("rejected", rejected)) if not text]
        if blank:
            findings.add("empty", pair, " and ".join(blank))
        elif chosen == rejected:
            findings.add("identical", pair)
        key = prompt_key(pair)
        earlier, reverse = seen.get((key, chosen, rejected)), seen.get((key, rejected, chosen))
        if earlier is not None:
            findings.add("duplicate", pair, f"repeats {earlier.where}")
        elif reverse is not None and chosen != rejected:
            findings.add("contradictory", pair, f"reverses {reverse.where}")
        seen.setdefault((key, chosen, rejected), pair)


def _comparable(answer: Content) -> str:
    """The answer as it is compared: blanks at the ends aside, and what calls a tool is not blank."""
    text = content_text(answer).strip()
    if isinstance(answer, str):
        return text
    calls = [message["tool_calls"] for message in answer if message.get("tool_calls")]
    return f"{text}\n{calls!r}" if calls else text


def _snippet(pair: Pair) -> str:
    text = normalise(content_text(pair.prompt)) if pair.prompt else normalise(content_text(pair.chosen))
    return text if len(text) <= 80 else text[:79] + "…"


# ------------------------------------------------------------------ rendering


def _render_all(
    pairs: Sequence[Pair], renderer: "Renderer", max_length: int | None, findings: _Findings
) -> list[tuple[int, int]]:
    """Render every answer with its prompt; returns the lengths in tokens of those that could be rendered."""
    from rm_core.chat import RenderError

    faults = _RenderedFaults(renderer, findings)
    lengths = []
    for pair in pairs:
        try:
            chosen = renderer.render(pair.prompt, pair.chosen)
            rejected = renderer.render(pair.prompt, pair.rejected)
        except RenderError as error:
            findings.add("template", pair, str(error))
            continue
        lengths.append((len(chosen), len(rejected)))
        if chosen == rejected and _comparable(pair.chosen) != _comparable(pair.rejected):
            findings.add("identical_ids", pair)
        if max_length is not None and max(len(chosen), len(rejected)) > max_length:
            findings.add("over_long", pair, f"{max(len(chosen), len(rejected))} tokens")
        faults.find(pair, chosen, rejected)
    return lengths


def check_encoded(
    report: DoctorReport, encoded: "Iterable[EncodedPair]", renderer: "Renderer", max_length: int
) -> DoctorReport:
    """The report with what shows in pairs that are rendered already, cut to ``max_length`` tokens; each counts once."""
    findings = _Findings()
    faults = _RenderedFaults(renderer, findings)
    for item in {id(item.pair): item for item in encoded}.values():
        if item.truncated:
            findings.add("over_long", item.pair)
        faults.find(item.pair, item.chosen, item.rejected)
    total = report.train_pairs + report.eval_pairs
    both = [report.finding(kind) or findings.finding(kind, *KINDS[kind], total) for kind in KINDS]
    return replace(report, max_length=max_length, findings=tuple(finding for finding in both if finding is not None))


class _RenderedFaults:
    """Faults that show in the tokens of a pair, and control tokens in its texts."""

    def __init__(self, renderer: "Renderer", findings: _Findings) -> None:
        rules, tokenizer = renderer.rules, renderer.tokenizer
        self._findings = findings
        self._bos = tokenizer.bos_token_id
        ends = [token for token in (rules.end_of_turn, rules.end_of_text) if token is not None]
        self._ends = {tokenizer.convert_tokens_to_ids(token) for token in ends} if rules.end == "token" else set()
        self._control = _control_tokens(tokenizer)
        # one search where a tokenizer has hundreds of them and a text nearly always none
        self._any_control = re.compile("|".join(map(re.escape, self._control)) or "(?!)")

    def find(self, pair: Pair, chosen: list[int], rejected: list[int]) -> None:
        """Add what is wrong with a pair and its two sequences."""
        if self._bos is not None and any(ids[:2] == [self._bos, self._bos] for ids in (chosen, rejected)):
            self._findings.add("double_bos", pair)
        if self._ends and not (chosen[-1] in self._ends and rejected[-1] in self._ends):
            self._findings.add("missing_end", pair)
        texts = [text for text in _texts(pair) if self._any_control.search(text)]
        if texts:
            written = [token for token in self._control if any(token in text for text in texts)]
            self._findings.add("control_tokens", pair, ", ".join(written))


def _control_tokens(tokenizer: object) -> list[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", []))
    return sorted(token for token in special if len(token) > 1)


def _texts(pair: Pair) -> list[str]:
    return [content_text(content) for content in (pair.prompt, pair.chosen, pair.rejected) if content is not None]


# ------------------------------------------------------------------ numbers


def _statistics(lengths: Iterable[tuple[int, int]]) -> LengthStatistics | None:
    both = list(lengths)
    if not both:
        return None
    longest = sorted(max(pair) for pair in both)
    return LengthStatistics(
        chosen_mean=statistics.fmean(chosen for chosen, _ in both),
        rejected_mean=statistics.fmean(rejected for _, rejected in both),
        median=longest[len(longest) // 2],
        p90=longest[int(0.90 * (len(longest) - 1))],
        p99=longest[int(0.99 * (len(longest) - 1))],
        longest=longest[-1],
    )


def _bag_of_words(pairs: Sequence[Pair], evaluation: Sequence[Pair]) -> float | None:
    """Held-out accuracy: on the evaluation pairs, or on a fifth of the prompts where there are none."""
    if len(pairs) < _BOW_MINIMUM:
        return None
    train, heldout = list(pairs), list(evaluation)
    if not heldout:
        if len({prompt_key(pair) for pair in pairs}) < 2:
            return None
        train, heldout = split_by_prompt(pairs, 0.2, seed=0)
    # every n-th, so that a file sorted by source is seen whole
    step = -(-len(train) // _BOW_PAIRS)
    return bag_of_words_accuracy(train[::step], heldout[:: -(-len(heldout) // _BOW_PAIRS)])
