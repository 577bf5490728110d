"""The process in which workers are born, and the workers themselves. Started by ``pool.py``.

Loading math-verify takes seconds, a fork milliseconds: this process loads the libraries once, has one thread, and forks
a worker whenever the server hands it a socket. A worker answers tasks, one at a time, until its socket closes.

Invariant: none of these processes outlives the server. The control socket's end ends this process; its end kills the
workers, whatever they are doing (PR_SET_PDEATHSIG); and a worker that overruns its task's time is killed by the kernel.
"""

import ctypes
import importlib.metadata
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from pydantic import TypeAdapter

from rm_server.verifiers.answers import Answer, BadReferenceError
from rm_server.verifiers.formats import validator_of
from rm_server.verifiers.math import check_math
from rm_server.verifiers.parts import CodePart, JsonPart, MathPart, VerifierPart
from rm_server.verifiers.sandbox import Sandbox, SandboxError
from rm_server.verifiers.work import Verify, prepare

BACKSTOP_SECONDS = 2.0
"""The server ends a worker at the limit; if the server cannot, the kernel does it so much later."""
MAX_TASKS = 2000
"""A worker is replaced after so many: libraries keep caches."""
MEMORY_SHARE = 0.8
"""math-verify calls unequal what it had no memory to compare. A 0 that was found with more than this share of the limit
in use is therefore an error; the worker is replaced, for its peak would be held against later answers."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
NEW, END = b"n", b"e"


def main() -> None:
    """The first argument is the socket's number. ``{"parts", "memory_mb"}`` comes on stdin, the rest on the socket.

    The answer is one line of JSON, ``{"versions"}`` or ``{"problem"}``; then, one at a time: a NEW with a socket is
    answered with the number of the worker that got it, an END of a worker's number with that number.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # these two reach the whole group, while the server still answers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # libraries log what they were given; no answer may reach the server's log
    setup = json.load(sys.stdin)
    try:
        parts = TypeAdapter(dict[str, VerifierPart]).validate_python(setup["parts"])
        verifiers = {name: prepare(part) for name, part in parts.items()}
        versions = _warm_up(parts)
    except (ImportError, SandboxError) as error:
        control.sendall(json.dumps({"problem": str(error)}).encode() + b"\n")
        return
    _silence()
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)  # what a killed worker was running is ours to reap
    control.sendall(json.dumps({"versions": versions}).encode() + b"\n")
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 5, 1)
        if not message:
            break
        number = int.from_bytes(message[1:], "big")
        if message[:1] == NEW:
            number = _give_birth(control, descriptors[0], verifiers, setup["memory_mb"] << 20)
            children.add(number)
        else:
            _end(children, number)
        control.sendall(number.to_bytes(4, "big"))
    for child in tuple(children):
        _end(children, child)


def _give_birth(control: socket.socket, descriptor: int, verifiers: dict[str, Verify], memory_bytes: int) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work(Connection(descriptor), verifiers, memory_bytes)
    finally:
        os._exit(0)


def _end(children: set[int], number: int) -> None:
    """Kill a worker that still lives, and bury the dead. Nobody else does, so a number is never another process's."""
    _reap(children)
    if number in children:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        children.discard(number)
    _reap(children)


def _reap(children: set[int]) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children.discard(pid)


def work(connection: "Connection[Any, Any]", verifiers: dict[str, Verify], memory_bytes: int) -> None:
    """Answer tasks until the other side closes, or until this process should be replaced."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(1, MAX_TASKS + 1):
        try:
            task = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        signal.setitimer(signal.ITIMER_REAL, task["seconds"] + BACKSTOP_SECONDS)
        reply = answer(verifiers[task["part"]], task)
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_used_up = 0 < memory_bytes * MEMORY_SHARE < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if is_used_up and reply.get("value") == 0.0:
            reply = {"error": "memory", "message": ""}
        reply["last"] = number == MAX_TASKS or is_used_up or reply.get("error") == "memory"
        try:
            connection.send_bytes(json.dumps(reply).encode())
        except ConnectionError:
            return
        if reply["last"]:
            return


def answer(verify: Verify, task: dict[str, Any]) -> dict[str, Any]:
    """``{"value": number}`` or ``{"error": kind, "message": what to say}``; no message quotes the answer."""
    try:
        return {"value": float(verify(Answer(task["text"], task["reference"], task["finished"])))}
    except BadReferenceError as error:
        return {"error": "reference", "message": f"reference: {error}"}
    except SandboxError as error:
        return {"error": "sandbox", "message": str(error)}
    except MemoryError:
        return {"error": "memory", "message": ""}
    except RecursionError:
        return {"error": "recursion", "message": ""}
    except Exception as error:  # a library may raise anything; it must cost this answer alone
        return {"error": "raised", "message": type(error).__name__}


def _warm_up(parts: Mapping[str, VerifierPart]) -> dict[str, str]:
    """Load what the parts need, once for all workers; returns the versions of what a value depends on."""
    versions: dict[str, str] = {}
    for part in parts.values():
        if isinstance(part, MathPart):
            check_math("\\boxed{\\frac{1}{2}}", "$0.5$")
            versions |= _versions("math-verify", "latex2sympy2_extended", "sympy")
        elif isinstance(part, JsonPart):
            validator_of(part.schema_)
            versions |= _versions("jsonschema")
        elif isinstance(part, CodePart):
            versions["python of the sandbox"] = Sandbox(part.python).probe()
    return versions


def _versions(*distributions: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in distributions}


def _control_process(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _silence() -> None:
    """Libraries print what they were given, too."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
