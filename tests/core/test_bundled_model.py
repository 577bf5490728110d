"""The bundled model's conversion when the disk does not play along. Nothing is converted here."""

from pathlib import Path

import pytest
from safetensors import SafetensorError

from rm_core import smollm2
from rm_core.smollm2 import BundledModelError, bundled_model_path


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_full_disk_during_conversion_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def convert(source: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setenv("BETTERTHAN_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "_find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(BundledModelError, match=r"No space left on device; set BETTERTHAN_CACHE"):
        bundled_model_path()
    assert list(tmp_path.iterdir()) == []


def test_cache_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BETTERTHAN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(smollm2, "_find_gguf", lambda: tmp_path / "x.gguf")
    with pytest.raises(BundledModelError, match="cannot be written there"):
        bundled_model_path()


async def test_swap_to_it_on_a_full_disk_is_refused_and_the_old_model_goes_on(
    tiny_model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rm_server.auth import Keys, hash_key
    from rm_server.loader import load_model, measure_model
    from tests.server.test_switch import KEY, switching

    def convert(source: Path, directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("BETTERTHAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(smollm2, "_convert", convert)
    (tmp_path / "admin.txt").write_text(hash_key(KEY))
    keys = Keys.from_files(None, str(tmp_path / "admin.txt"))
    async with switching(tiny_model, keys, load_model, measure_model, dtype="float32") as (client, _):
        body = {"checkpoint": smollm2.BUNDLED_NAME}
        response = await client.post("/admin/checkpoint", json=body)
        assert (response.status_code, response.json()["error"]["type"]) == (422, "checkpoint_refused")
        assert "No space left on device" in response.json()["error"]["message"]
        assert (await client.post("/score", json={"texts": ["a"]})).status_code == 200
