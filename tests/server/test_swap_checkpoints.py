"""Swaps between real (tiny) checkpoints: the right scores, memory given back, and damaged ones refused by name."""

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rm_core.model import RewardModel
from rm_server.auth import Keys, hash_key
from rm_server.loader import load_model, measure_model
from rm_server.settings import ServerSettings
from tests.conftest import make_checkpoint, save_base, save_classifier
from tests.server.test_switch import KEY, switching

TEXTS = ["a b c d e f g h", "another text", "a b c d e f g h i"]


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    return make_checkpoint(directory / "checkpoint", save_base(directory / "base", intermediate_size=48))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    (tmp_path / "admin.txt").write_text(hash_key(KEY))
    return Keys.from_files(None, str(tmp_path / "admin.txt"))


def served(checkpoint: Path) -> Any:
    return RewardModel.load(str(checkpoint), dtype="float32", device="cpu")


async def test_after_a_swap_the_new_checkpoint_scores_the_old_one_is_gone_and_the_way_back_works(
    tiny_checkpoint: Path, other_checkpoint: Path, keys: Keys
) -> None:
    expected = {}
    for path in (tiny_checkpoint, other_checkpoint):
        model = served(path)
        ids = [model.renderer.render_text(text) for text in TEXTS]
        expected[model.reward_id] = model.score_ids(ids)
    old = weakref.ref(model := served(tiny_checkpoint))
    async with switching(model, keys, load_model, measure_model, dtype="float32", device="cpu") as (client, _):
        del model
        first = (await client.post("/score", json={"texts": TEXTS})).json()
        swap = (await client.post("/admin/checkpoint", json={"checkpoint": str(other_checkpoint)})).json()
        second = (await client.post("/score", json={"texts": TEXTS})).json()
        gc.collect()
        assert swap["is_freed"] is True
        assert old() is None, "something holds the old model"
        info = (await client.get("/info")).json()
        back = {"checkpoint": str(tiny_checkpoint), "reward_id": swap["previous_reward_id"]}
        assert (await client.post("/admin/checkpoint", json=back)).status_code == 200
        third = (await client.post("/score", json={"texts": TEXTS})).json()
    assert first["reward_id"] == third["reward_id"] == swap["previous_reward_id"] != swap["reward_id"]
    assert second["reward_id"] == info["reward_id"] == swap["reward_id"]
    for answer in (first, second, third):
        np.testing.assert_allclose(answer["rewards"], expected[answer["reward_id"]], atol=1e-4, rtol=0)


def flip_a_bit(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def cut_off(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change_golden_score(directory: Path) -> None:
    file = directory / "reward_model.json"
    record = json.loads(file.read_text())
    record["golden"]["scores"][0]["reward"] += 1.0
    file.write_text(json.dumps(record))


def remove_record(directory: Path) -> None:
    (directory / "reward_model.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip_a_bit, "changed since this checkpoint was written"),
        (cut_off, "is truncated"),
        (change_golden_score, "golden conversation"),
        (remove_record, "not readable JSON"),
        (shutil.rmtree, "no such folder"),
    ],
)
async def test_damaged_checkpoint_is_refused_by_name_and_the_served_one_goes_on(
    tiny_checkpoint: Path, keys: Keys, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, copy)
    damage(copy)
    async with switching(served(tiny_checkpoint), keys, load_model, measure_model, dtype="float32", device="cpu") as (
        client,
        service,
    ):
        before = (await client.post("/score", json={"texts": TEXTS})).json()
        response = await client.post("/admin/checkpoint", json={"checkpoint": str(copy)})
        assert (response.status_code, response.json()["error"]["type"]) == (422, "checkpoint_refused"), response.text
        assert says in response.json()["error"]["message"]
        after = (await client.post("/score", json={"texts": TEXTS})).json()
        assert (await client.get("/ready")).status_code == 200
        assert service.is_loading_beside is False
    assert after["reward_id"] == before["reward_id"]
    np.testing.assert_allclose(after["rewards"], before["rewards"], atol=1e-4, rtol=0)


def test_memory_that_a_checkpoint_needs_is_known_from_its_headers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = served(tiny_checkpoint)
    num_weights = sum(p.numel() for p in model.network.parameters())
    settings = ServerSettings(checkpoint="x", device="cpu", dtype="float32")
    need = measure_model(settings, str(tiny_checkpoint))
    assert num_weights * 4 <= need.device <= num_weights * 4 * 1.6, "the adapter, and the head of the language model"
    assert need.host == need.device
    plain = save_classifier(tmp_path / "plain")
    in_bf16 = measure_model(settings.model_copy(update={"dtype": "bfloat16"}), str(plain))
    assert in_bf16.device == 2 * sum(p.numel() for p in served(plain).network.parameters())
