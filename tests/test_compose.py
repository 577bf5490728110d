"""The compose stack without Docker: what each file names exists, Prometheus' checker accepts config and rules, and the
image's steps make a server in a folder of their own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rm_server import ServerSettings

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS = ROOT / "deploy" / "prometheus"
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
INTERPOLATED = re.compile(r"\$\{(\w+)(?:(:[-+])([^}]*))?\}")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def interpolated(value: str, **variables: str) -> str:
    """What compose makes of ``${NAME:-default}`` and ``${NAME:+replacement}``."""

    def replace(match: re.Match[str]) -> str:
        given = variables.get(match[1], "")
        if match[2] == ":+":
            return match[3] if given else ""
        return given or match[3] or ""

    return INTERPOLATED.sub(replace, value)


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=PROMETHEUS)


def test_compose_file_fits_the_compose_schema() -> None:
    from check_jsonschema.builtin_schemas import get_builtin_schema

    jsonschema.validate(COMPOSE, get_builtin_schema("vendor.compose-spec"))


def test_plain_up_starts_server_prometheus_and_grafana() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {
        "server",
        "prometheus",
        "grafana",
    }
    assert SERVICES["train"]["profiles"] == ["train"]
    assert SERVICES["server-gpu"]["profiles"] == ["gpu"]
    (gpu,) = SERVICES["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (gpu["driver"], gpu["capabilities"]) == ("nvidia", ["gpu"])
    assert SERVICES["server-gpu"]["environment"]["RM_SERVER_DEVICE"] == "cuda"


def test_images_are_built_here_or_pinned_to_a_version() -> None:
    for name, service in SERVICES.items():
        assert "build" in service or re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), name
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^FROM python:\d+\.\d+\.\d+-slim-bookworm$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.long
def test_steps_of_the_dockerfile_make_a_server_in_an_empty_environment(tmp_path: Path) -> None:
    """Its COPY and pip lines, with this interpreter: needs an index (or wheels in PIP_FIND_LINKS), and gigabytes."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    app, venv = tmp_path / "app", tmp_path / "venv"
    app.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{venv / 'bin'}:{environment['PATH']}", "VIRTUAL_ENV": str(venv)}
    environment |= dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))

    def run(command: str, directory: Path) -> str:
        done = subprocess.run(
            ["sh", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    steps = re.findall(r"^(COPY|RUN) (.*)$", text, re.MULTILINE)
    assert [step for step, words in steps if "pip install" in words] == ["RUN"] * 3
    for step, words in steps:
        if step == "COPY":
            *sources, target = words.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, app / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, app / target)
        elif "pip install" in words:
            run(words, app)
    assert "--max-batch-tokens" in run("rm-server --help", tmp_path)
    place = run("python -c 'import rm_server.ui_routes as page; page.ui_router; print(page.__file__)'", tmp_path)
    assert Path(place.strip()).is_relative_to(venv), "it is installed, not found beside"


def test_ports_are_for_this_machine_alone_and_differ() -> None:
    ports = [interpolated(port) for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.split(":")[1] for port in ports}) == len(ports) == 4


def test_volumes_and_secrets_are_declared_and_their_files_exist() -> None:
    for name, service in SERVICES.items():
        for volume in service["volumes"]:
            source = interpolated(volume).split(":")[0]
            assert source in COMPOSE["volumes"] or source.startswith("./"), name
            if source.startswith("./deploy"):
                assert (ROOT / source).exists(), source
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
    assert set(COMPOSE["volumes"]) <= {volume.split(":")[0] for s in SERVICES.values() for volume in s["volumes"]}


def test_secrets_are_files_and_a_server_without_them_asks_for_no_key() -> None:
    assert all(set(secret) == {"file"} for secret in COMPOSE["secrets"].values())
    environment = SERVICES["server"]["environment"]
    for setting, secret in (("api_keys_file", "api_keys"), ("admin_keys_file", "admin_keys")):
        variable, file = f"RM_SERVER_{setting.upper()}", COMPOSE["secrets"][secret]["file"]
        assert setting in ServerSettings.model_fields
        assert interpolated(environment[variable]) == ""
        assert interpolated(file) == "/dev/null"
        (name,) = {match[1] for match in INTERPOLATED.finditer(file)}
        assert interpolated(environment[variable], **{name: "./keys.txt"}) == f"/run/secrets/{secret}"
        assert interpolated(file, **{name: "./keys.txt"}) == "./keys.txt"


def test_no_service_can_gain_privileges() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_services_wait_for_services_with_a_health_check() -> None:
    for service in SERVICES.values():
        for name, needed in service.get("depends_on", {}).items():
            assert needed["condition"] == "service_healthy"
            assert "test" in SERVICES[name]["healthcheck"]


# ------------------------------------------------------------------ Prometheus


def test_prometheus_scrapes_the_servers_under_their_names_and_port() -> None:
    jobs = {job["job_name"]: job for job in read(PROMETHEUS / "prometheus.yml")["scrape_configs"]}
    (servers,) = jobs["betterthan"]["dns_sd_configs"]
    assert set(servers["names"]) == {name for name, service in SERVICES.items() if "MODEL_DIR" in str(service)}
    inside = {interpolated(port).split(":")[-1] for name in servers["names"] for port in SERVICES[name]["ports"]}
    assert inside == {str(servers["port"])}


def test_promtool_accepts_the_config_and_the_rules() -> None:
    done = promtool("check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rule files found" in done.stdout


def test_alerts_fire_when_they_should() -> None:
    done = promtool("test", "rules", "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_severity_and_says_where() -> None:
    rules = [rule for group in read(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert "$labels.instance" in rule["annotations"]["summary"], rule["alert"]


# ------------------------------------------------------------------ Grafana


def test_grafana_is_given_its_data_source_and_the_dashboard() -> None:
    (source,) = read(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    assert source["isDefault"]
    assert source["type"] == "prometheus"
    (port,) = SERVICES["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.split(':')[-1]}"
    (provider,) = read(PROVISIONING / "dashboards" / "betterthan.yml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    assert Path(mounts["./deploy/grafana/betterthan.json"]).parent == Path(provider["options"]["path"])


def test_nobody_can_log_in_to_grafana() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
