"""What the server imports: nothing it has no use for, and nothing is missing afterwards."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import save_classifier

CODE = """
import sys
from rm_server.loader import load_model
from rm_server.settings import ServerSettings
model = load_model(ServerSettings(checkpoint=sys.argv[1], device="cpu", dtype="float32"))
print(sorted({"sympy", "torch._dynamo", "torch.distributed.tensor", "datasets", "sklearn"} & set(sys.modules)))
import torch
assert torch.distributed.is_available()
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as real
from transformers.masking_utils import TransformGetItemToIndex as deferred
assert type(deferred()) is real
print(float(model.score_ids([[1, 2, 3]])[0]))
"""


@pytest.mark.parametrize("kind", ["classifier", "adapter"])
def test_loading_a_model_leaves_the_compiler_out_and_it_works_when_it_is_wanted(
    tmp_path: Path, tiny_checkpoint: Path, kind: str
) -> None:
    from rm_core.model import RewardModel

    checkpoint = tiny_checkpoint if kind == "adapter" else save_classifier(tmp_path / "classifier")
    done = subprocess.run([sys.executable, "-c", CODE, str(checkpoint)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported, reward = done.stdout.splitlines()
    assert imported == "[]"
    model = RewardModel.load(str(checkpoint), device="cpu", dtype="float32")
    assert abs(float(model.score_ids([[1, 2, 3]])[0]) - float(reward)) < 1e-5
