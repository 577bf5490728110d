"""What a worker does with one answer: the one place where a part's options meet the function they belong to."""

import re
from collections.abc import Callable

from rm_server.verifiers.answers import Answer, text_after
from rm_server.verifiers.code import check_code
from rm_server.verifiers.formats import check_exact, check_json, check_regex
from rm_server.verifiers.lengths import check_length, overlong_penalty
from rm_server.verifiers.math import check_math
from rm_server.verifiers.parts import (
    CodePart,
    ExactPart,
    JsonPart,
    LengthPart,
    MathPart,
    OverlongPart,
    RegexPart,
    RepetitionPart,
    VerifierPart,
)
from rm_server.verifiers.repetition import repetition_penalty
from rm_server.verifiers.sandbox import Limits, Sandbox

Verify = Callable[[Answer], float]


def prepare(part: VerifierPart) -> Verify:
    """The function of one answer that a part stands for.

    It raises BadReferenceError, SandboxError, MemoryError or RecursionError, and never gives a number that stands for
    one of these. Raises SandboxError itself where the part needs a sandbox and there is none.
    """
    match part:
        case MathPart():
            return lambda answer: check_math(text_after(answer.text, part.after), answer.reference, part.extract)
        case ExactPart():
            return lambda answer: check_exact(
                text_after(answer.text, part.after),
                answer.reference,
                ignore_case=part.ignore_case,
                ignore_space=part.ignore_space,
            )
        case RegexPart():
            pattern = re.compile(part.pattern)
            return lambda answer: check_regex(text_after(answer.text, part.after), pattern, whole=part.whole)
        case JsonPart():
            return lambda answer: check_json(text_after(answer.text, part.after), part.schema_)
        case LengthPart():
            return lambda answer: check_length(answer.text, part.minimum, part.maximum)
        case OverlongPart():
            return lambda answer: _overlong(answer, part)
        case RepetitionPart():
            return lambda answer: _repetition(answer, part)
        case CodePart():
            sandbox = Sandbox(part.python)
            limits = Limits(seconds=part.test_seconds, memory_mb=part.memory_mb, max_processes=part.max_processes)
            # Before the hard limit, so that a slow program gets its verdict and not an error.
            seconds = part.timeout_seconds - min(2.0, part.timeout_seconds / 10)
            return lambda answer: check_code(
                text_after(answer.text, part.after),
                answer.reference,
                sandbox,
                limits,
                fraction=part.fraction,
                seconds=seconds,
            )


def _overlong(answer: Answer, part: OverlongPart) -> float:
    if part.unfinished is not None and not answer.finished:
        return part.unfinished
    return overlong_penalty(len(answer.text), part.max_length, part.buffer)


def _repetition(answer: Answer, part: RepetitionPart) -> float:
    # An empty text has the best value, so leaving out the mark must not be a way to get it.
    mark = part.after if part.after is not None and part.after in answer.text else None
    return repetition_penalty(text_after(answer.text, mark), part.n, part.unit)
