"""Run by test_real_clients in verl's environment: verl's own functions beside ours on random inputs.

Writes the largest difference of each pair of functions, in float64, over 50 draws.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla, kl_penalty_forward

from rm_client import grpo_advantages, grpo_loss, k3_kl

P, G, T = 3, 4, 7
MODES = {"grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm", "dapo": "token-mean"}


class Actor(SimpleNamespace):
    """What compute_policy_loss_vanilla reads of verl's ActorConfig. The dual clip, which we do not have, is out of reach."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def main() -> None:
    json.load(sys.stdin)
    generator = torch.Generator().manual_seed(0)
    worst: dict[str, float] = {}

    def note(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        worst[name] = max(worst.get(name, 0.0), float((ours - theirs).abs().max()))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for _ in range(50):
        rewards = draw(P, G) * 3
        lengths = torch.randint(1, T + 1, (P * G, 1), generator=generator)
        mask = torch.arange(T) < lengths
        spread = torch.zeros(P * G, T, dtype=torch.float64)
        spread[:, 0] = rewards.flatten()
        index = np.repeat(np.arange(P), G)
        for scale in ("std", "none"):
            theirs, _ = compute_grpo_outcome_advantage(
                spread, torch.ones(P * G, T, dtype=torch.float64), index, norm_adv_by_std_in_grpo=scale == "std"
            )
            note(f"advantages {scale}", grpo_advantages(rewards, scale, 1, 1e-6), theirs[:, 0].view(P, G))

        old = -draw(P * G, T).abs()
        new, ref = old + 0.3 * draw(P * G, T), old + 0.3 * draw(P * G, T)
        note("k3", k3_kl(new, ref), kl_penalty_forward(new, ref, "k3"))
        advantages = draw(P, G)
        for ours, theirs_mode in MODES.items():
            config = Actor(
                clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e9, global_batch_info={}
            )
            theirs, _ = compute_policy_loss_vanilla(
                old, new, advantages.view(-1, 1).expand(-1, T), mask.double(), theirs_mode, config
            )
            loss, _ = grpo_loss(
                new.view(P, G, T),
                old.view(P, G, T),
                advantages=advantages,
                kl_coeff=0.0,
                clip_eps=0.2,
                clip_eps_high=0.28,
                aggregation=ours,
                mask=mask.view(P, G, T),
            )
            note(f"loss {ours}", loss, theirs)
    print("RESULT " + json.dumps(worst))


main()
