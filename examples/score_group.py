"""Score a GRPO group, several answers to one prompt, on a running server and print rewards and advantages.

    python examples/score_group.py [URL]          the default is http://127.0.0.1:8000

The prompt is in none of the demo pairs. Half of the answers help; one belongs to another question, two are evasive.
"""

import sys

from rich.console import Console
from rich.table import Table

from rm_client import RewardClient, RewardClientError, ScoreResult

PROMPT = [{"role": "user", "content": "How do I look after a cactus?"}]
ANSWERS = [
    "Give it bright light, and water only when the soil is dry.",
    "Plant it in gritty soil, in a pot with a hole.",
    "Keep it by a sunny window and let it rest in winter.",
    "Fold the paper twice, then cut along the line.",
    "That is hard to say, it depends on many things.",
    "Everybody has to find that out for themselves.",
]


def table_of(result: ScoreResult) -> Table:
    """The group, best answer first."""
    table = Table(title=str(PROMPT[0]["content"]))
    table.add_column("reward", justify="right")
    table.add_column("advantage", justify="right")
    table.add_column("answer")
    rows = zip(result.rewards, result.advantages or [], ANSWERS, strict=True)
    for reward, advantage, answer in sorted(rows, key=lambda row: -(row[0] or 0.0)):
        table.add_row(f"{reward:+.3f}", f"{advantage:+.3f}", answer)
    return table


def main(url: str = "http://127.0.0.1:8000") -> int:
    try:
        with RewardClient(url, max_retries=2) as client:
            result = client.score(PROMPT, ANSWERS, advantages=True)
    except (RewardClientError, ValueError) as error:
        print(f"score_group: error: {error}", file=sys.stderr)
        return 2
    Console(highlight=False).print(table_of(result))
    print(f"{result.usage.tokens} tokens, {result.usage.computed_tokens} computed; reward model {result.reward_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
