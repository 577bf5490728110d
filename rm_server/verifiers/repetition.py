"""How much an answer repeats itself."""

from typing import Literal


def repetition_penalty(answer: str, n: int = 4, unit: Literal["words", "characters"] = "words") -> float:
    """Minus the share of n-grams that have occurred before: 0 where all differ, towards -1 the more are repeats.

    The measure of Yeo et al. (arXiv 2502.03373, appendix) and open-r1: ``-(1 - distinct / all)``. ``words`` are runs
    without white space, in lower case; take ``characters`` for writing without blanks between words. An answer with
    fewer than ``n`` units has no n-gram and gives 0.

    "a b a b a b" with n = 2: a b, b a, a b, b a, a b are 2 distinct of 5, so -0.6.
    """
    if n < 1:
        raise ValueError(f"n ({n}) must be at least 1")
    units = answer.lower().split() if unit == "words" else list(answer)
    count = len(units) - n + 1
    if count < 1:
        return 0.0
    distinct = len({tuple(units[i : i + n]) for i in range(count)})
    return -(count - distinct) / count if distinct < count else 0.0
