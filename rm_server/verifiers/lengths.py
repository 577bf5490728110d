"""The length of an answer, in characters (Unicode code points).

Characters, not tokens: they mean the same for every policy's tokenizer, and a server with verifiers only has none.
English and code have about four to a token, so a limit of L tokens is about 4·L here.
"""


def check_length(answer: str, minimum: int = 0, maximum: int | None = None) -> float:
    """1.0 where the answer has at least ``minimum`` and at most ``maximum`` characters, else 0.0."""
    return float(len(answer) >= minimum and (maximum is None or len(answer) <= maximum))


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft over-long punishment, from 0 down to -1 (arXiv 2503.14476, equation 13; there in tokens).

    0 up to ``max_length - buffer``; then falling in a straight line; -1 beyond ``max_length``::

        0                                          length <= max_length - buffer
        ((max_length - buffer) - length) / buffer   in between
        -1                                         length > max_length

    With max_length 20 and buffer 4: 16 gives 0, 17 gives -0.25, 20 gives -1, 21 gives -1. Without a buffer (0) it is a
    step. Raises ValueError unless 0 <= buffer <= max_length.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer ({buffer}) must be between 0 and max_length ({max_length})")
    if length <= max_length - buffer:
        return 0.0
    return -1.0 if length > max_length else ((max_length - buffer) - length) / buffer
