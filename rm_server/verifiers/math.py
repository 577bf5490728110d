"""Mathematical equality of an answer and a reference, by the library ``math-verify``.

Invariant: True and False are what the library itself says. Its own time limits are switched off, because it reports
them as False, which looks like a wrong answer: whoever calls this sets a hard limit (``pool.py``), and an answer that
reaches it is neither right nor wrong.
"""

import re
from typing import Any, Literal

from rm_server.verifiers.answers import BadReferenceError, texts_of

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_WORD = re.compile(r"(?<!\S)([^\W\d_]{2,})[.,:;!?]*(?!\S)")
_NOTATION = frozenset(("sin", "cos", "tan", "cot", "log", "ln", "exp", "sqrt", "pi", "and", "or", "in", "mod", "div"))
"""Words between blanks that belong to an expression."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or whatever a backslash makes something else of."""


def check_math(answer: str, reference: Any, extract: Literal["last", "boxed"] = "last") -> float:
    """1.0 where the answer's final expression equals the reference, else 0.0.

    ``reference``: a number or text, LaTeX with or without dollar signs; or a list of them, any of which is right. A
    sentence is read as ``parse_reference`` says.
    ``extract``: ``last`` takes what math-verify takes from a text (a boxed answer first, then "the answer is …", then
    the last expression); ``boxed`` reads only the last ``\\boxed{…}`` and gives 0.0 where there is none.

    Fractions, decimals, percentages, sets, intervals, equations and units are compared as the library compares them:
    ``\\frac{1}{2}`` equals 0.5 and 50\\%, a set equals its permutations, a unit behind a number is dropped.
    Raises BadReferenceError for a reference in which there is no expression, MemoryError and RecursionError.
    """
    golds = [parse_reference(text) for text in texts_of(reference)]
    text = answer if extract == "last" else last_boxed(answer)
    if text is None:
        return 0.0
    found = _parse(text)
    return float(any(_equal(gold, target) for expressions in golds for gold in expressions for target in found))


def parse_reference(text: str) -> list[Any]:
    """The expressions of one reference. Raises BadReferenceError.

    Where nothing marks the expression and there are words beside it, it is what follows ``####`` (GSM8K), or all that
    is no word; where words stand in its midst, it is what the library takes from such a text.
    """
    if "$" in text or _BOXED.search(text) or "\\(" in text or "\\[" in text:
        found = _parse(text)
    else:
        found = _parse_unmarked(text.rpartition("####")[2].strip())
    if not found:
        raise BadReferenceError("has no mathematical expression in it")
    return found


def _parse_unmarked(text: str) -> list[Any]:
    words = [match for match in _WORD.finditer(text) if match[1].lower() not in _NOTATION]
    if len(words) < 2 and not any(len(word[1]) > 2 for word in words):
        return _parse(f"${text}$") or _parse(text)
    if len(text.split()) == 1:  # a name, which equals itself
        return _parse(text) or _parse(f"${text}$")
    between = [text[left:right].strip() for left, right in _gaps(words, len(text))]
    pieces = [piece.rstrip(".!?") for piece in between if piece.strip(" .,:;!?")]
    found = _parse(f"${pieces[0]}$" if len(pieces) == 1 else text)
    # Each letter of a word would be a symbol, and the text itself nothing that an answer equals.
    return found if any(not isinstance(expression, str) for expression in found) else []


def _gaps(words: list[re.Match[str]], end: int) -> list[tuple[int, int]]:
    """What lies before, between and behind the words."""
    return list(zip([0, *(word.end() for word in words)], [*(word.start() for word in words), end], strict=True))


def last_boxed(text: str) -> str | None:
    """The last ``\\boxed{…}`` whose braces close, as it stands; None where there is none."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 0
        for brace in _BRACE.finditer(text, match.end() - 1):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return text[match.start() : brace.end()]
    return None


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _equal(gold: Any, target: Any) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, target, timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy raises anything on expressions that it cannot compare; the library calls that unequal
        return False
