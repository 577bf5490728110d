"""Python programs in answers, and the tests they must pass.

Two styles of test. ``stdin``/``stdout``: the program is run as a script, and what it prints must be what is expected.
``assert``: the program is run as a module, then the statement is executed beside it.

Invariant: a script must exit with 0 and print what only the server knows. A module must reach the end of the test: only
then a process beside it prints a secret made for this run, which the program's own process never held. So
``os._exit(0)`` passes nothing, nor does reading stdin again or the callers' variables. It is no proof: the interpreter
that reports the end of the test runs the program too, and one written against this very harness can report it itself.
"""

import json
import math
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from rm_server.verifiers.answers import BadReferenceError
from rm_server.verifiers.formats import fenced_blocks
from rm_server.verifiers.sandbox import LateStartError, Limits, Sandbox

MAX_TESTS = 256

_HARNESS = """\
import json, os, sys
def _keep(pid, task, end):
    os.close(task[0]); os.close(end[1])
    given = json.loads(sys.stdin.read())
    with open(task[1], "w") as pipe:
        json.dump([given["program"], given["test"]], pipe)
    _, status = os.waitpid(pid, 0)
    os.set_blocking(end[0], False)
    if status != 0 or os.read(end[0], 2) != b"1":
        os._exit(1)
    sys.stdout.write("\\n" + given["secret"] + "\\n")
def _run(task, end):
    os.close(task[1]); os.close(end[0])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open(task[0]) as pipe:
        program, test = json.load(pipe)
    scope = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(program, "solution.py", "exec"), scope)
    exec(compile(test, "test.py", "exec"), scope)
    sys.stdout.flush()
    os.write(end[1], b"1")
def _main():
    task, end = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        try:
            import ctypes
            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # not dumpable: the program cannot look into this process
        except (ImportError, OSError, AttributeError):
            pass
        _keep(pid, task, end)
    else:
        _run(task, end)
_main()
"""


@dataclass(frozen=True)
class IoTest:
    """The program gets ``stdin`` and must print ``stdout``."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class AssertTest:
    """``code`` runs after the program, with its names, and must not raise."""

    code: str


Test = IoTest | AssertTest


def check_code(
    answer: str,
    reference: Any,
    sandbox: Sandbox,
    limits: Limits,
    *,
    fraction: bool = False,
    seconds: float = math.inf,
) -> float:
    """1.0 where the answer's program passes all tests, else 0.0; with ``fraction`` the share of tests that pass.

    A program that fails, hangs, is stopped by a limit or is not there does not pass: that is a verdict, not an error.
    So is a test that does not get its turn within ``seconds`` for all of them. Each test is a start of its own (about
    50 ms), so none sees another's traces.
    Raises BadReferenceError for tests that cannot be read, SandboxError where the sandbox does not work.
    """
    tests = read_tests(reference)
    program = extract_program(answer)
    if program is None:
        return 0.0
    passed, end = 0, time.monotonic() + seconds
    for test in tests:
        left = end - time.monotonic()
        good = left > 0 and _passes_within(left, program, test, sandbox, limits)
        if not good and not fraction:
            return 0.0
        passed += good
    return passed / len(tests)


def _passes_within(seconds: float, program: str, test: Test, sandbox: Sandbox, limits: Limits) -> bool:
    if limits.until <= seconds:
        return passes(program, test, sandbox, limits)
    try:
        return passes(program, test, sandbox, replace(limits, wall_seconds=seconds))
    except LateStartError:  # its turn came too late: the time of all tests was up, not the machine too busy for one
        return False


def passes(program: str, test: Test, sandbox: Sandbox, limits: Limits) -> bool:
    """Run one test in the sandbox."""
    if isinstance(test, IoTest):
        result = sandbox.run(program, test.stdin, limits)
        return result.exit_code == 0 and _lines(result.stdout) == _lines(test.stdout)
    secret = secrets.token_hex(16)
    task = {"program": program, "test": test.code, "secret": secret}
    result = sandbox.run(_HARNESS, json.dumps(task), limits)
    return result.exit_code == 0 and result.stdout.endswith(f"\n{secret}\n")


def extract_program(answer: str) -> str | None:
    """The last fenced block marked python or py; else the last unmarked one; else, where there is no fence, the answer
    itself. None where that is blank."""
    blocks = fenced_blocks(answer)
    python = [content for language, content in blocks if language in ("python", "python3", "py")]
    unmarked = [content for language, content in blocks if language == ""]
    program = answer if "```" not in answer and not blocks else (python or unmarked or [""])[-1]
    return program if program.strip() else None


def read_tests(reference: Any) -> list[Test]:
    """Tests in any of the forms that data sets use (also as a text of JSON):

    - ``["assert f(1) == 2", …]``, or one such text
    - ``[{"stdin": "1\\n", "stdout": "2\\n"}, …]``, or with ``input`` and ``output``
    - ``{"inputs": ["1\\n", …], "outputs": ["2\\n", …]}``

    Raises BadReferenceError.
    """
    if reference is None:
        raise BadReferenceError("is required")
    value = _decoded(reference)
    if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
        value = _paired(value)
    tests = value if isinstance(value, list) else [value]
    if not tests:
        raise BadReferenceError("must hold one test at least")
    if len(tests) > MAX_TESTS:
        raise BadReferenceError(f"{len(tests)} tests are over the limit of {MAX_TESTS}")
    return [_read_test(test, f"[{i}]" if isinstance(value, list) else "") for i, test in enumerate(tests)]


def _read_test(test: Any, place: str) -> Test:
    if isinstance(test, str) and test.strip():
        return AssertTest(test)
    if isinstance(test, dict):
        for given, expected in (("stdin", "stdout"), ("input", "output")):
            if test.keys() == {given, expected} and all(isinstance(text, str) for text in test.values()):
                return IoTest(test[given], test[expected])
    where = f"{place}: " if place else ""
    raise BadReferenceError(f'{where}must be a text of Python statements or {{"stdin": text, "stdout": text}}')


def _paired(value: dict[str, Any]) -> list[Any]:
    if value.keys() != {"inputs", "outputs"}:
        # a fn_name beside them asks for calls, not for stdin: reading it as stdin would fail every program
        raise BadReferenceError("must have inputs and outputs and nothing else")
    inputs, outputs = value["inputs"], value["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadReferenceError("inputs and outputs must be lists of equal length")
    return [{"stdin": given, "stdout": expected} for given, expected in zip(inputs, outputs, strict=True)]


def _decoded(reference: Any) -> Any:
    if isinstance(reference, str) and reference.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(reference)
        except ValueError:
            return reference
    return reference


def _lines(text: str) -> list[str]:
    """Lines without the blanks at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
