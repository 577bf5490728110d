"""The public API, and that importing it costs a policy trainer's environment nothing."""

import subprocess
import sys

import rm_client

PUBLIC = [
    "AdvantageReport",
    "AsleepError",
    "AsyncRewardClient",
    "AsyncRewardFunction",
    "ConnectionFailedError",
    "DeadlineExceededError",
    "DrainingError",
    "ForbiddenError",
    "GRPOStats",
    "GroupsResult",
    "InternalError",
    "InvalidAnswerError",
    "InvalidRequestError",
    "ItemError",
    "LoadingError",
    "ModelNotFoundError",
    "MsSwiftReward",
    "NonFiniteRewardError",
    "NotFoundError",
    "NotReadyError",
    "OpenRLHFReward",
    "OverloadedError",
    "PartialFailureError",
    "PinMismatchError",
    "RequestTimeoutError",
    "ResponseError",
    "RewardClient",
    "RewardClientError",
    "RewardIdMismatchError",
    "ScoreResult",
    "ServerInfo",
    "Timing",
    "TokenRewards",
    "TokenizerMismatchError",
    "TooLargeError",
    "TooLongError",
    "UnauthorizedError",
    "UnavailableError",
    "Usage",
    "VerifierFailedError",
    "VerifierTimeoutError",
    "bradley_terry_loss",
    "combine_rewards",
    "grpo_advantage_report",
    "grpo_advantages",
    "grpo_loss",
    "k3_kl",
    "trl_reward_function",
    "verl_compute_score",
    "verl_compute_score_batch",
]


def test_the_public_api_is_this() -> None:
    assert sorted(rm_client.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(rm_client, name).__doc__, f"{name} has no docstring"


def test_importing_the_client_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "pydantic", "fastapi", "datasets", "peft", "trl", "verl"]
    code = f"import sys, rm_client; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
