import os
import subprocess
import sys
from pathlib import Path

import pytest

from rm_server.settings import ServerSettings, SettingsError, env_of, flag_of, load_settings


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\nhost: file\nmax_batch_tokens: 100\n")
    environment = {"RM_SERVER_PORT": "2", "RM_SERVER_HOST": "environment", "RM_SERVER_CONFIG": str(file)}
    settings = load_settings({"checkpoint": "c", "port": "3"}, environment)
    assert (settings.port, settings.host, settings.max_batch_tokens) == (3, "environment", 100)
    assert settings.max_queued_items == ServerSettings.model_fields["max_queued_items"].default


def test_booleans_and_the_checkpoint_come_from_the_environment() -> None:
    settings = load_settings({}, {"RM_SERVER_CHECKPOINT": "runs/x", "RM_SERVER_EXIT_ON_STALL": "true"})
    assert (settings.checkpoint, settings.exit_on_stall) == ("runs/x", True)


@pytest.mark.parametrize(
    ("flags", "environment", "yaml", "says"),
    [
        ({}, {}, None, "CHECKPOINT: is required"),
        ({"port": "x"}, {}, None, "--port: must be a valid integer"),
        ({"port": "70000"}, {}, None, "--port: must be less than or equal to 65535, not '70000'"),
        ({"max_batch_tokens": "0"}, {}, None, "--max-batch-tokens: must be greater than or equal to 16"),
        ({"dtype": "float16"}, {}, None, "--dtype: must be 'auto', 'float32' or 'bfloat16', not 'float16'"),
        ({}, {"RM_SERVER_PROT": "1"}, None, "RM_SERVER_PROT: no such setting; did you mean RM_SERVER_PORT?"),
        ({}, {"RM_SERVER_PORT": "tcp://10.0.0.1:80"}, None, "enableServiceLinks"),
        ({}, {}, "prot: 1", "server.yaml: prot: unknown key; did you mean port?"),
        ({}, {}, "port: x", "server.yaml: port: must be a valid integer"),
        ({}, {}, "- 1", "must be a mapping"),
        ({}, {}, "a: [", "is not valid YAML"),
        ({"conservative": "-1"}, {}, None, "--conservative: must be greater than or equal to 0"),
        ({}, {"RM_SERVER_CONSERVATIVE": "nan"}, None, "RM_SERVER_CONSERVATIVE: must be "),
        ({}, {}, "conservative: much", "server.yaml: conservative: must be a valid number"),
        ({"probe_seconds": "90"}, {}, None, "probe_seconds (90) must be below ready_seconds (60)"),
        ({"max_length": "9000", "max_queued_tokens": "8000"}, {}, None, "could never be admitted"),
        ({"max_waiting_bytes": "1000000"}, {}, None, "max_waiting_bytes (1000000) must be at least max_body_bytes"),
    ],
)
def test_wrong_setting_is_one_line_that_says_where(
    tmp_path: Path, flags: dict[str, str], environment: dict[str, str], yaml: str | None, says: str
) -> None:
    config = None
    if yaml is not None:
        config = tmp_path / "server.yaml"
        config.write_text(yaml)
    given = flags if says.startswith("CHECKPOINT") else {"checkpoint": "c", **flags}
    with pytest.raises(SettingsError) as raised:
        load_settings(given, environment, str(config) if config else None)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_verifiers_alone_have_no_conservative_reward() -> None:
    with pytest.raises(SettingsError, match="conservative: needs a CHECKPOINT"):
        load_settings({"recipe": "recipe.yaml", "conservative": "1"}, {})


def test_variables_that_kubernetes_sets_for_a_service_are_not_ours() -> None:
    load_settings({"checkpoint": "c"}, {"RM_SERVER_SERVICE_HOST": "10.0.0.1", "RM_SERVER_PORT_80_TCP": "tcp://x"})


def test_every_setting_is_in_the_help() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rm_server.cli", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=True,
    )
    words = result.stdout.split()
    for name in ServerSettings.model_fields:
        if name != "checkpoint":
            assert any(word.startswith(flag_of(name)) for word in words), flag_of(name)
            assert f"[{env_of(name)};" in words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "x", "c"], "--port: must be a valid integer"),
        (["--prt", "1"], "No such option"),
        ([], "CHECKPOINT: is required"),
        (["a", "b"], "unexpected extra argument"),
        (["--host", "256.1.1.1", "c"], "cannot listen on 256.1.1.1:8000"),
    ],
)
def test_mistake_on_the_command_line_is_one_line_and_exit_2(arguments: list[str], says: str) -> None:
    result = subprocess.run([sys.executable, "-m", "rm_server.cli", *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("rm-server: error: ")


def test_importing_the_server_loads_neither_torch_nor_datasets() -> None:
    code = "import rm_server, rm_server.cli, sys; print([m for m in ('torch','transformers','datasets') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
