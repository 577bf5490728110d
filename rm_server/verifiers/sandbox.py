"""Run a Python program that nobody has read: no network, no writable disk, no other processes, hard limits.

Bubblewrap makes the walls: every namespace is new, ``/usr`` and the library folders are read-only, everything else but
a ``/tmp`` of bounded size is read-only and empty. ``prlimit`` inside sets the limits of processes, memory, CPU time and
file size; a filter of system calls refuses System V's shared memory and queues, which none of these limits binds.
Started by root, it first becomes a plain user with no new privileges: limits on processes do not bind root.

Invariant: when ``run`` returns or its own process dies, no process of the program is left: the program's process
namespace dies with its first process, and that one with us.
"""

import math
import os
import platform
import shutil
import signal
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PLAIN_USER = 65534
_ROOT_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program gives the same output each time
    "PYTHONIOENCODING": "utf-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


_SYSTEM_CALLS = {  # the architecture's number, shmget, msgget
    "x86_64": (0xC000003E, 29, 68),
    "aarch64": (0xC00000B7, 194, 186),
}


class SandboxError(RuntimeError):
    """There is no sandbox, or it did not start; one line that says what to do."""


class LateStartError(SandboxError):
    """The time was up before the program had been started."""


@dataclass(frozen=True)
class Limits:
    """Of one run. ``seconds`` of processor time of each process, and ``wall_seconds`` by the clock, three times as many
    unless given: on a busy machine a right program takes longer. ``memory_mb`` of address space of each process,
    ``disk_mb`` of files together; ``output_kb`` of standard output, and of any one file."""

    seconds: float = 5.0
    wall_seconds: float | None = None
    memory_mb: int = 512
    max_processes: int = 8
    disk_mb: int = 16
    output_kb: int = 1024

    @property
    def until(self) -> float:
        """Seconds by the clock after which the program is ended."""
        return 3 * self.seconds if self.wall_seconds is None else self.wall_seconds


@dataclass(frozen=True)
class RunResult:
    """``exit_code``: 0 is success; None where the time was up. ``stdout`` holds at most ``output_kb``. ``has_run`` is
    False where the sandbox did not come so far."""

    exit_code: int | None
    stdout: str
    has_run: bool = True


class Sandbox:
    """The command that holds a program. ``python``: the interpreter inside, below ``/usr``."""

    def __init__(self, python: str | None = None) -> None:
        """Raises SandboxError where a tool is missing. ``probe`` says whether it works."""
        self.bwrap, self.prlimit = _tool("bwrap", "bubblewrap"), _tool("prlimit", "util-linux")
        self.python = python or _interpreter()
        if not Path(self.python).resolve().is_relative_to("/usr") or not os.access(self.python, os.X_OK):
            raise SandboxError(f"the sandbox's Python must be a program below /usr; {self.python} is not")
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            user = str(_PLAIN_USER)
            self._prefix = [_tool("setpriv", "util-linux"), "--reuid", user, "--regid", user, "--clear-groups"]
            self._prefix += ["--no-new-privs", "--"]

    def probe(self) -> str:
        """Run a small program; returns the version of the interpreter. Raises SandboxError."""
        result = self._execute(
            "import platform; print(platform.python_version())", "", Limits(seconds=30), want_why=True
        )
        version = result.stdout.strip()
        if result.exit_code != 0 or not version[:1].isdigit():
            why = " ".join(version.split())[:200] or f"exit code {result.exit_code}"
            raise SandboxError(f"bubblewrap does not work here ({why}); it needs unprivileged user namespaces")
        return version

    def run(self, program: str, stdin: str, limits: Limits) -> RunResult:
        """Run a program as a script with this standard input.

        Raises SandboxError where the sandbox itself did not start; LateStartError where it had no time to.
        """
        result = self._execute(program, stdin, limits)
        if not result.has_run and result.exit_code is None:
            raise LateStartError(f"the sandbox did not start within {limits.until:g} s; the machine is too busy")
        if not result.has_run:
            raise SandboxError("the sandbox did not start")
        return result

    def _execute(self, program: str, stdin: str, limits: Limits, *, want_why: bool = False) -> RunResult:
        with _memory_file(program) as source, _memory_file(stdin) as given, _memory_file("") as output:
            with _memory_file("") as status, _memory_file(_call_filter()) as calls:
                inherited = (source.fileno(), status.fileno(), calls.fileno())
                process = subprocess.Popen(
                    self._command(*inherited, limits),
                    stdin=given,
                    stdout=output,
                    stderr=output if want_why else subprocess.DEVNULL,
                    pass_fds=inherited,
                    env=_ENVIRONMENT,
                    cwd="/",
                )
                exit_code = _wait(process, limits.until)
                status.seek(0)
                # bubblewrap tells its child's number when there are walls around it, and an exit code of the program's
                # only where the program was started
                has_run = (b'"child-pid"' if exit_code is None else b'"exit-code"') in status.read()
            output.seek(0)
            text = output.read(limits.output_kb * 1024).decode("utf-8", "replace")
            return RunResult(exit_code, text, has_run)

    def _command(self, source: int, status: int, calls: int, limits: Limits) -> list[str]:
        command = [*self._prefix, self.bwrap]
        command += ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
        command += ["--cap-drop", "ALL", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
        for name in _ROOT_FOLDERS:
            path = Path("/", name)
            if path.is_symlink():
                command += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                command += ["--ro-bind", str(path), str(path)]
        for device in ("/dev/null", "/dev/zero", "/dev/urandom"):  # all of /dev would bring an unbounded /dev/shm
            command += ["--dev-bind", device, device]
        command += ["--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp"]
        command += ["--ro-bind-data", str(source), "/box/main.py", "--remount-ro", "/", "--chdir", "/tmp"]
        if _call_filter():
            command += ["--seccomp", str(calls)]
        command += ["--json-status-fd", str(status), "--", self.prlimit, "--core=0", "--nofile=64"]
        command += [f"--nproc={limits.max_processes}", f"--as={limits.memory_mb << 20}"]
        command += [f"--cpu={math.ceil(limits.seconds)}", f"--fsize={limits.output_kb << 10}"]
        return [*command, self.python, "-sB", "/box/main.py"]


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The outer process: the namespace inside dies with it.
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _call_filter() -> bytes:
    """A seccomp program: EPERM for shmget and msgget, and for every call of another architecture's (32 bits on 64),
    which would be the way round it. What they make outlives a process's limits until the namespace ends. Empty where
    the numbers are not known."""
    if platform.machine() not in _SYSTEM_CALLS:
        return b""
    architecture, shmget, msgget = _SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06  # of struct sock_filter: code, then, else, value
    steps = [
        (load, 0, 0, 4),  # seccomp_data.arch
        (equal, 0, 5, architecture),
        (load, 0, 0, 0),  # seccomp_data.nr
        (at_least, 3, 0, 0x40000000),  # x32
        (equal, 2, 0, shmget),
        (equal, 1, 0, msgget),
        (answer, 0, 0, 0x7FFF0000),  # allow
        (answer, 0, 0, 0x00050001),  # EPERM
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _memory_file(content: str | bytes) -> IO[bytes]:
    """An unnamed file in memory. As a standard stream it cannot block, and the limit on file size binds it."""
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
    file.seek(0)
    return file


def _tool(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"{name} is not installed (Debian: apt-get install {package})")
    return path


def _interpreter() -> str:
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path
    raise SandboxError("there is no Python below /usr (Debian: apt-get install python3-minimal)")
