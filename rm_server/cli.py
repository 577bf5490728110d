"""``rm-server CHECKPOINT``: read the settings, open the socket, load the model, serve until SIGTERM.

The socket opens before the model is loaded: `/health` answers at once, everything else says 503 ``loading``. The last
start-up line on stdout is ``rm-server ready on http://HOST:PORT``, printed when the first real forward has succeeded.

Invariant: what the user got wrong is one line on stderr and exit 2, never a traceback. SIGTERM ends with exit 0.
"""

import asyncio
import gc
import importlib.metadata
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, get_args

import click
import uvicorn
import uvloop

from rm_server.app import create_app
from rm_server.auth import Keys
from rm_server.connections import check_tls, raise_file_limit, uvicorn_config
from rm_server.loader import load_model
from rm_server.logs import configure_logging, log_loop_problem
from rm_server.service import ScoringService
from rm_server.settings import ServerSettings, SettingsError, env_of, flag_of, load_settings

logger = logging.getLogger("rm_server")

EXIT_USER_ERROR = 2
EXIT_STALLED = 70
BACKLOG = 2048
COLLECT_SECONDS, COLLECT_AT_LEAST_SECONDS = 60.0, 600.0


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    try:
        given = _command().main(args=argv, prog_name="rm-server", standalone_mode=False)
        if not isinstance(given, dict):  # --help and --version have printed
            return
        settings = load_settings(given["flags"], os.environ, given["config"])
        keys = Keys.from_files(settings.api_keys_file, settings.admin_keys_file)
        check_tls(settings)
        listener = _listen(settings.host, settings.port)
        # Read when torch is loaded: a thread that waits sleeps, and leaves its core to others. Not at once: between two
        # operations it waits less than waking it takes.
        if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
            os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="10000")
    except click.ClickException as error:
        _die(error.format_message())
    except SettingsError as error:
        _die(str(error))
    # What comes before uvicorn listens to signals is kept for it. It raises the signal again after its own clean
    # shutdown; that must not kill the process.
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda sig, _: asked_to_end.append(sig))
    code, is_busy = uvloop.run(_serve(settings, keys, listener, asked_to_end))
    if is_busy:
        # A load or a forward that nobody waits for: its thread would keep the interpreter from ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


async def _serve(
    settings: ServerSettings, keys: Keys, listener: socket.socket, asked_to_end: Sequence[int]
) -> tuple[int, bool]:
    """Returns the exit code, and whether the worker thread is still busy. ``asked_to_end``: signals up to now."""
    host, port = listener.getsockname()[:2]
    try:
        service = ScoringService(settings)
    except SettingsError as unusable:
        _complain(str(unusable))
        return EXIT_USER_ERROR, False
    if settings.exit_on_stall:
        service.exit_on_stall = lambda: os._exit(EXIT_STALLED)
    configure_logging(settings)
    asyncio.get_running_loop().set_exception_handler(log_loop_problem)
    raise_file_limit(settings.max_connections)
    if keys.api is None and not _is_loopback(host):
        logger.warning("listening on %s without API keys: whoever reaches the port can score (docs/security.md)", host)
    server = _Server(
        uvicorn_config(create_app(service, settings, keys), settings, service.metrics.count_refused),
        service,
        asked_to_end,
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(service.start(lambda: load_model(settings) if settings.checkpoint else None))
    await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
    code, is_busy, complaint = 0, not starting.done(), ""
    if is_busy:
        starting.cancel()
    elif (error := starting.exception()) is not None:
        server.should_exit = True
        # ValueError is how a checkpoint, a setting or a device that cannot be used is reported.
        code = EXIT_USER_ERROR if isinstance(error, ValueError | OSError) else 1
        lines = str(error).splitlines() or [type(error).__name__]
        complaint = lines[0] if code == EXIT_USER_ERROR else f"the model cannot be started: {lines[0]}"
    elif not server.should_exit:
        collect_rarely(asyncio.get_running_loop(), lambda: service.num_open == 0)
        scheme = "http" if settings.ssl_certfile is None else "https"
        print(f"rm-server ready on {scheme}://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    try:
        await serving
    except Exception as failure:  # what uvicorn or the system raises: one line, like all that keeps it from serving
        code = EXIT_USER_ERROR if isinstance(failure, ValueError | OSError) else 1
        complaint = f"cannot serve on {host}:{port}: {str(failure) or type(failure).__name__}"
    if complaint:
        _complain(complaint)
    return code, is_busy or service.is_busy


def collect_rarely(loop: asyncio.AbstractEventLoop, is_idle: Callable[[], bool]) -> None:
    """Run the garbage collector once a minute while idle, else every ten, and not on what is there by now: it stays.

    Left to itself it visits what waits in the queue as often as requests come in: almost half of the event loop's time
    under overload, and 0.2 s for one long list or one full queue. Requests leave it nothing
    (tests/server/test_garbage.py).
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    last = loop.time()

    def again() -> None:
        nonlocal last
        if is_idle() or loop.time() >= last + COLLECT_AT_LEAST_SECONDS:
            gc.collect()
            last = loop.time()
        loop.call_later(COLLECT_SECONDS, again)

    loop.call_later(COLLECT_SECONDS, again)


class _Server(uvicorn.Server):
    """uvicorn, which tells the engine when the process is asked to end, or was before it listened."""

    def __init__(self, config: uvicorn.Config, service: ScoringService, asked_to_end: Sequence[int]) -> None:
        super().__init__(config)
        self._service = service
        self._asked_to_end = asked_to_end
        self._loop = asyncio.get_running_loop()
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with super().capture_signals():
            for sig in self._asked_to_end[:1]:
                self.handle_exit(sig, None)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain is None:
            logger.info("shutting down: finishing %d requests", self._service.num_open)
            self._drain = self._loop.create_task(self._service.drain(self._service.settings.grace_seconds))


def _listen(host: str, port: int) -> socket.socket:
    """Listen before anything is loaded, so that a port in use is known at once.

    Two sockets may be bound to one port (``SO_REUSEADDR``), but one alone listens.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.set_inheritable(False)
    return listener


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _command() -> click.Command:
    """The command line, one option for each setting."""
    params: list[click.Parameter] = [click.Argument(["checkpoint"], required=False)]
    for name, field in ServerSettings.model_fields.items():
        if name == "checkpoint":
            continue
        default = "model's context" if name == "max_length" else field.default
        text = f"{' '.join((field.description or '').split())} [{env_of(name)}; default: {default}]"
        if field.annotation is bool:
            switch = f"{flag_of(name)}/--no-{flag_of(name)[2:]}"
            params.append(click.Option([switch], default=None, help=text))
        else:
            params.append(click.Option([flag_of(name)], metavar=_metavar(field.annotation), help=text))
    params.append(click.Option(["--config"], metavar="FILE", help=f"YAML file of settings [{env_of('config')}]"))

    def collect(config: str | None, **flags: Any) -> dict[str, Any]:
        return {"config": config, "flags": {name: value for name, value in flags.items() if value is not None}}

    command = click.Command(
        "rm-server",
        params=params,
        callback=collect,
        help="Serve a frozen reward model. A setting is a flag, an environment variable, or a key of --config FILE; "
        "the flag wins, then the variable, then the file.",
    )
    return click.version_option(importlib.metadata.version("betterthan"), prog_name="rm-server")(command)


def _metavar(annotation: Any) -> str:
    kinds = get_args(annotation) or (annotation,)
    if all(isinstance(kind, str) for kind in kinds):
        return "|".join(kinds)
    return {int: "INTEGER", float: "NUMBER"}.get(kinds[0], "TEXT")


def _complain(message: str) -> None:
    print(f"rm-server: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _die(message: str) -> Any:
    _complain(message)
    sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
