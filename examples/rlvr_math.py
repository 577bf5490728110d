"""Reinforcement learning with verifiable rewards: sums, checked by the server's math verifier; no reward model at all.

    rm-server --recipe examples/rlvr_math.yaml &          # verifiers only: no checkpoint, no torch in the server
    python examples/rlvr_math.py                          # needs trl, peft and datasets beside betterthan
    python examples/rlvr_math.py --quick --model FOLDER

The same GRPOTrainer, model and evaluation as trl_grpo.py. Only the reward differs: a program that compares the answer
with the ``reference`` column. Sums that are held out for the evaluation are never trained on.
"""

import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

from trl_grpo import Rows, trl_command


def sums(args: Any) -> tuple[Rows, Rows]:
    """Questions with their answers: for training, and --eval-prompts of them held out."""
    pairs = list(itertools.product(range(1, 13), repeat=2))
    random.Random(0).shuffle(pairs)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
            "reference": str(a + b),
        }
        for a, b in pairs
    ]
    return rows[args.eval_prompts :], rows[: args.eval_prompts]


def main(argv: Sequence[str] | None = None) -> int:
    return trl_command("rlvr_math", __doc__ or "", argv, sums, reference_column="reference")


if __name__ == "__main__":
    sys.exit(main())
