"""docs/scale.md: each command is run by a test, or the page's machines are not here and its files are at least read."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rm_server.settings import ServerSettings
from rm_train.config_file import load_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
SLURM = ROOT / "deploy" / "slurm" / "fit.sbatch"
COMMANDS = [
    line for block in re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]

RUN_BY = {
    "torchrun --standalone": "tests/train/test_processes.py::test_two_processes_equal_one",
    "torchrun --nnodes 2": "tests/train/test_processes.py::test_nodes_that_met_equal_one_process_and_resume_after_one_lost_its_process",
    "serve run": "tests/server/test_ray_commands.py::test_serve_run_with_arguments_serves_until_it_is_interrupted",
    "serve deploy": "tests/server/test_ray_commands.py::test_serve_deploy_hands_the_file_to_a_running_cluster",
    "sbatch": "tests/test_scale_page.py::test_the_slurm_script_starts_what_the_page_says",
}
"""Commands whose machines are here, in small: the test that runs them."""
NOT_HERE = {
    "docker compose": "no Docker: tests/test_compose.py reads what it would run",
    "MODEL_DIR=": "no Docker: tests/test_compose.py reads what it would run",
    "pip install": "the environment that runs the tests was installed so",
}


def test_every_command_is_run_by_a_test_or_it_is_known_why_not() -> None:
    assert len(COMMANDS) >= 10
    for command in COMMANDS:
        assert any(command.startswith(known) for known in (*RUN_BY, *NOT_HERE)), command
    for known in (*RUN_BY, *NOT_HERE):
        assert any(command.startswith(known) for command in COMMANDS), known
    for test in RUN_BY.values():
        file, _, name = test.partition("::")
        assert name.startswith("test_"), test
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_configs_of_the_commands_parse() -> None:
    named = {word for command in COMMANDS for word in command.split() if word.startswith("configs/")}
    assert len(named) >= 4
    configs = {name: load_config(ROOT / name) for name in named}
    assert configs["configs/sharded_gpu.yaml"].train.shard
    assert configs["configs/qlora_70b_gpu.yaml"].model.quantize == "4bit"


def test_flags_of_the_commands_are_torchruns() -> None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    for command in COMMANDS:
        if command.startswith("torchrun"):
            found = parser.parse_args(shlex.split(command)[1:])
            assert found.module
            assert [found.training_script, *found.training_script_args[:1]] == ["rm_train.cli", "fit"]


def test_the_slurm_script_starts_what_the_page_says(tmp_path: Path) -> None:
    """Run by bash, with programs in place of Slurm's and torchrun's that write down what they were called with."""
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    for name, script in {
        "scontrol": "echo node-a; seq -f node-%06g 20000",  # more than a pipe holds
        "srun": 'shift; exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "30007",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    called = []
    for restarts in ("0", "1"):
        done = subprocess.run(
            ["bash", str(SLURM), "configs/qwen3_gpu.yaml"],
            env={**environment, "SLURM_RESTART_COUNT": restarts},
            capture_output=True,
            text=True,
            check=True,
        )
        called.append(done.stdout.split())
    (wanted,) = [shlex.split(command) for command in COMMANDS if command.startswith("torchrun --nnodes 2")]
    options = ["--rdzv_id", "30007", "--rdzv_endpoint", "node-a:30007"]
    expected = " ".join(wanted[1:]).replace("job1", options[1]).replace("first-node:29500", options[3]).split()
    assert sorted(called[0]) == sorted(expected)
    assert called[1] == [*called[0], "--resume"]
    anew = ["bash", str(SLURM), "configs/qwen3_gpu.yaml", "--overwrite"]
    for restarts, options in (("0", ["--overwrite"]), ("1", ["--resume", "--resume"])):
        given = {**environment, "SLURM_RESTART_COUNT": restarts}
        done = subprocess.run(anew, env=given, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [*called[0], *options], "what was saved since must not be thrown away"
    missing = subprocess.run(["bash", str(SLURM)], env=environment, capture_output=True, text=True, check=False)
    assert missing.returncode != 0
    assert "CONFIG.yaml" in missing.stderr


def in_python_with_ray(code: str, *arguments: object) -> str:
    """Run code in a process of its own: warnings are errors in this one, and importing Ray gives some."""
    pytest.importorskip("ray", reason="the package ray[serve] is not installed")
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_arguments_for_ray_are_those_of_the_page_with_their_defaults() -> None:
    code = """
import json
from rm_server.ray_app import RaySettings
print(json.dumps({name: field.default for name, field in RaySettings.model_fields.items()}))
"""
    defaults = json.loads(in_python_with_ray(code))
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]*) ?\|", PAGE, re.MULTILINE))
    assert rows == {name: "" if value is None else f"{value:g}" for name, value in defaults.items()}
    assert not set(defaults) & set(ServerSettings.model_fields)


def test_the_ray_config_fits_rays_schema_and_our_arguments() -> None:
    code = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from rm_server.ray_app import app
config = ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[1])))
(application,) = config.applications
assert app(application.args)._bound_deployment.name == "Gate"
assert application.import_path == "rm_server.ray_app:app"
"""
    file = ROOT / "deploy" / "ray" / "serve.yaml"
    in_python_with_ray(code, file)
    (application,) = yaml.safe_load(file.read_text(encoding="utf-8"))["applications"]
    (scorer,) = application["deployments"]
    assert scorer == {"name": "Scorer", "user_config": {"checkpoint": application["args"]["checkpoint"]}}


def test_wrong_arguments_for_ray_are_named() -> None:
    wrong = {
        "CHECKPOINT: is required": {},
        "num_replicas: Input should be a valid integer": {"checkpoint": "x", "num_replicas": "no"},
        "--max-batch-token": {"checkpoint": "x", "max_batch_token": 64},
        "ssl_certfile: belongs to rm-server": {"checkpoint": "x", "ssl_certfile": "x.pem"},
    }
    code = """
import json, sys
from rm_server.ray_app import app
from rm_server.settings import SettingsError
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments)
    except SettingsError as error:
        print(error)
"""
    said = in_python_with_ray(code, json.dumps(list(wrong.values()))).splitlines()
    assert len(said) == len(wrong)
    for line, message in zip(said, wrong, strict=True):
        assert line.startswith(message)
