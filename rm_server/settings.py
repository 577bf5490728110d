"""The server's settings: one declaration gives the flag, the environment variable, the YAML key and the documentation.

Invariant: default < YAML < environment < flag, and a setting that cannot be understood is an error that names where it
was given.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ENV_PREFIX = "RM_SERVER_"


class SettingsError(ValueError):
    """Settings that cannot be used; one line for the user."""


class ServerSettings(BaseModel):
    """Everything that can be set, in tokens, items, bytes and seconds as the names say."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    checkpoint: str | None = Field(default=None, min_length=1)
    """What to serve: a checkpoint folder, a one-label classifier or adapter folder, or a hub id. Required, unless a
    recipe of verifiers only is given."""
    recipe: str | None = Field(default=None, min_length=1)
    """YAML file that says how model and verifiers make one reward (docs/verifiers.md)."""
    num_verifier_workers: int = Field(default=0, ge=0, le=256)
    """Processes in which verifiers run; 0 takes one for each CPU core."""
    host: str = "127.0.0.1"
    """Address to listen on. The default is reachable from this machine alone."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and prints it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the backbone computes in; the reward head is always float32."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1 and so on."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of a forward; 0 leaves it to torch."""
    max_length: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens; null takes the model's context."""
    conservative: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """K: the reward is mean - K * std over the heads of a checkpoint that has several (`head.count`), under another
    `reward_id`; 0 is their mean."""
    max_batch_tokens: int = Field(default=12288, ge=16)
    """Tokens of one forward, after prefix sharing. A longer sequence is computed in pieces of this size; alone and
    whole by a model that pads."""
    prefix_cache_mb: int = Field(default=1024, ge=0)
    """MiB for the keys and values of beginnings that were computed before: an answer to a known prompt then pays for
    itself alone. 0 keeps none."""
    exact: bool = False
    """Score every sequence in a forward of its own, without sharing or cache: the same reward to the last bit whatever
    is asked beside it or before it. Every prompt is then computed again for every answer."""
    memory_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the GPU's memory, or on a CPU of the machine's, that the process may take: a bound for torch on CUDA,
    and a checkpoint that does not fit under it beside the present one is refused."""
    max_queued_tokens: int = Field(default=4_194_304, ge=16)
    """Tokens that may be admitted and not yet answered."""
    max_queued_items: int = Field(default=65_536, ge=1)
    """Items that may be admitted and not yet answered."""
    max_queue_seconds: float = Field(default=20.0, gt=0)
    """Work that may be admitted, in seconds at the measured rate: what is admitted is answered in about this time."""
    max_request_items: int = Field(default=32_768, ge=1)
    """Items of one request."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Bytes of one request body."""
    max_waiting_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Bytes of all request bodies held at once, as they were sent (decoded they take several times as much); beyond it
    requests are refused without waiting. At least `max_body_bytes`."""
    default_deadline_ms: float = Field(default=100_000, gt=0)
    """How long a caller waits at most, where the request does not say: below the patience of the trainers."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections open at once; one more is answered 503 and closed."""
    receive_seconds: float = Field(default=30.0, gt=0)
    """How long a request's headers, and after them its body, may take to arrive; also how long an answer may wait for
    a caller who does not read it."""
    num_tokenizer_threads: int = Field(default=1, ge=1, le=2)
    """Threads that turn text into tokens."""
    ready_seconds: float = Field(default=60.0, gt=0)
    """`/ready` is true while a forward succeeded within this time."""
    probe_seconds: float = Field(default=20.0, gt=0)
    """An idle server scores one token this often, to know that it still can."""
    stall_seconds: float = Field(default=300.0, gt=0)
    """A forward that takes longer, or a tokenizer over one part of a request, is stuck: the server is not ready. A
    device on which no forward has succeeded for so long is lost."""
    exit_on_stall: bool = False
    """End the process (exit 70) when a forward or the tokenizer is stuck, or the device is lost, for a supervisor that
    restarts it."""
    grace_seconds: float = Field(default=30.0, ge=0)
    """After SIGTERM: how long admitted requests may take to finish."""
    api_keys_file: str | None = None
    """File of API keys, `sha256:HEX NAME` a line; made with `python -m rm_server.auth NAME`. Without it no key is asked
    for."""
    admin_keys_file: str | None = None
    """File of admin keys, in the same form. An admin key opens every route. Without it `/admin` is closed."""
    ui: bool = True
    """Show the page at `/`: playground, checkpoint, live numbers (docs/playground.md)."""
    metrics_need_key: bool = False
    """Ask for a key on `/metrics` too."""
    ssl_certfile: str | None = None
    """Certificate chain (PEM) to serve HTTPS with."""
    ssl_keyfile: str | None = None
    """Private key (PEM) of the certificate, where its file does not hold it."""
    access_log: bool = False
    """Log one line for every HTTP request (method, route, status, seconds, name of the key)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged to stderr. Prompts and keys never are."""
    log_format: Literal["text", "json"] = "text"
    """Log lines as text, or as one JSON object each."""
    audit_log: str | None = None
    """File to which one line is appended for every reward answered, without any text (docs/security.md)."""
    audit_max_bytes: int = Field(default=256 * 1024 * 1024, ge=4096)
    """Size at which the audit log is moved to `FILE.1`, `FILE.2` and so on, and begun anew. None is ever deleted."""


def flag_of(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], config_file: str | None = None
) -> ServerSettings:
    """Merge file, environment and flags. ``flags`` holds only what was given. Raises SettingsError."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    config_file = config_file or environment.get(env_of("config")) or None
    if config_file is not None:
        for name, value in _read_yaml(Path(config_file)).items():
            values[name], origins[name] = value, f"{config_file}: {name}"
    for variable, text in environment.items():
        setting = _setting_of(variable)
        if setting is not None:
            values[setting], origins[setting] = text, variable
    for name, value in flags.items():
        values[name], origins[name] = value, "CHECKPOINT" if name == "checkpoint" else flag_of(name)
    if "checkpoint" not in values and "recipe" not in values:
        raise SettingsError(
            f"CHECKPOINT: is required, for instance rm-server runs/demo/checkpoint (or {env_of('checkpoint')})"
        )
    try:
        settings = ServerSettings.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        message = problem["msg"].replace("Input should", "must")
        where = origins.get(name, name)
        raise SettingsError(f"{where}: {message}, not {problem['input']!r}{_hint(where)}") from None
    _check_together(settings)
    return settings


def _check_together(settings: ServerSettings) -> None:
    if settings.conservative and settings.checkpoint is None:
        raise SettingsError("conservative: needs a CHECKPOINT; verifiers have no heads that could disagree")
    if settings.probe_seconds >= settings.ready_seconds:
        raise SettingsError(
            f"probe_seconds ({settings.probe_seconds:g}) must be below ready_seconds ({settings.ready_seconds:g}), "
            "or an idle server would not be ready"
        )
    if settings.max_waiting_bytes < settings.max_body_bytes:
        raise SettingsError(
            f"max_waiting_bytes ({settings.max_waiting_bytes}) must be at least max_body_bytes "
            f"({settings.max_body_bytes}), or the largest body could never be taken in"
        )
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        raise SettingsError("ssl_keyfile: belongs to ssl_certfile, which is not given")
    if settings.max_length is not None and settings.max_length > settings.max_queued_tokens:
        raise SettingsError(
            f"max_queued_tokens ({settings.max_queued_tokens}) must be at least max_length ({settings.max_length}), "
            "or the longest sequence could never be admitted"
        )


def _hint(where: str) -> str:
    if where == env_of("port"):
        return " (Kubernetes sets this variable for a Service called rm-server: set enableServiceLinks: false)"
    return ""


def _setting_of(variable: str) -> str | None:
    """The setting that an environment variable gives; None for variables that are not ours."""
    if not variable.startswith(ENV_PREFIX) or variable == env_of("config"):
        return None
    name = variable.removeprefix(ENV_PREFIX).lower()
    if name in ServerSettings.model_fields:
        return name
    # Kubernetes announces a Service called rm-server to every pod in this form.
    if name.startswith(("service_", "port_")):
        return None
    raise SettingsError(f"{variable}: no such setting{_nearest(name, env_of)}")


def _nearest(name: str, write: Any = str) -> str:
    close = difflib.get_close_matches(name, ServerSettings.model_fields, n=1, cutoff=0.5)
    return f"; did you mean {write(close[0])}?" if close else ""


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: must be a mapping of settings, not a {type(values).__name__}")
    for name in values:
        if name not in ServerSettings.model_fields:
            raise SettingsError(f"{path}: {name}: unknown key{_nearest(str(name))}")
    return values
