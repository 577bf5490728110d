"""Submitted programs: what passes, and what hostile ones can do. The sandbox tests need bubblewrap and say so."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rm_server.verifiers.answers import Answer, BadReferenceError
from rm_server.verifiers.code import (
    AssertTest,
    IoTest,
    check_code,
    extract_program,
    passes,
    read_tests,
)
from rm_server.verifiers.parts import CodePart, LengthPart
from rm_server.verifiers.pool import VerifierPool, VerifierSetupError
from rm_server.verifiers.sandbox import Limits, Sandbox, SandboxError

LIMITS = Limits(seconds=2)
SHORT = Limits(seconds=2, wall_seconds=2)
DOUBLE = "print(2 * int(input()))"


def working_sandbox() -> Sandbox:
    try:
        sandbox = Sandbox()
        sandbox.probe()
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error}")
    return sandbox


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return working_sandbox()


def programs_left() -> list[str]:
    """Command lines of every process that runs a submitted program."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"/box/main.py" in command:
            left.append(b" ".join(command).decode())
    return left


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    yield
    end = time.monotonic() + 10
    while programs_left() and time.monotonic() < end:
        pass
    assert programs_left() == []


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nand\n```python\nprint(2)\n```\nDone.", "print(2)\n"),
        ("```py\nprint(1)\n```\n```\nno\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```\n```bash\nls\n```", "print(1)\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("1. So:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)\n"),
        ("```python\r\nprint(1)\r\n```\r\nDone.", "print(1)\r\n"),
        ("```python title=x\nprint(1)\n```", "print(1)\n"),
        ("```bash\nls\n```", None),
        ("```python\nprint(1)", None),
        ("", None),
        (" \n", None),
    ],
)
def test_program_is_the_last_python_fence(answer: str, program: str | None) -> None:
    assert extract_program(answer) == program


def test_tests_are_read_in_every_form_of_the_data_sets() -> None:
    io = [IoTest("1\n", "2\n"), IoTest("3\n", "6\n")]
    assert read_tests([{"stdin": "1\n", "stdout": "2\n"}, {"input": "3\n", "output": "6\n"}]) == io
    assert read_tests({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "6\n"]}) == io
    assert read_tests('{"inputs": ["1\\n", "3\\n"], "outputs": ["2\\n", "6\\n"]}') == io
    assert read_tests({"stdin": "1\n", "stdout": "2\n"}) == io[:1]
    assert read_tests("assert f(1) == 2") == [AssertTest("assert f(1) == 2")]
    assert read_tests(["assert f(1) == 2", {"stdin": "1\n", "stdout": "2\n"}]) == [
        AssertTest("assert f(1) == 2"),
        io[0],
    ]
    assert read_tests('["assert f(1) == 2"]') == [AssertTest("assert f(1) == 2")]
    assert read_tests("[x for x in y]") == [AssertTest("[x for x in y]")]


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (None, "is required"),
        ([], "must hold one test at least"),
        (["assert True"] * 257, "257 tests are over the limit of 256"),
        ([3], r"\[0\]: must be a text of Python statements or"),
        (["assert True", {"stdin": 3, "stdout": "3"}], r"\[1\]: must be a text"),
        ({"inputs": ["1"], "outputs": []}, "lists of equal length"),
        ({"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}, "must have inputs and outputs and nothing else"),
        ("", "must be a text of Python statements"),
    ],
)
def test_tests_that_cannot_be_read_are_the_references_fault(reference: Any, says: str) -> None:
    with pytest.raises(BadReferenceError, match=says):
        read_tests(reference)


# ------------------------------------------------------------------ verdicts


def test_stdin_stdout_program_passes_and_fails(sandbox: Sandbox) -> None:
    tests = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2", "4\n", "6 \n\n"]}
    assert check_code(f"```python\n{DOUBLE}\n```", tests, sandbox, LIMITS) == 1.0
    wrong = "x = int(input())\nprint(2 if x == 1 else 0)"
    assert check_code(wrong, tests, sandbox, LIMITS) == 0.0
    assert check_code(wrong, tests, sandbox, LIMITS, fraction=True) == pytest.approx(1 / 3)
    assert check_code("I cannot. ```bash\nls\n```", tests, sandbox, LIMITS) == 0.0
    assert check_code("def f(:", tests, sandbox, LIMITS) == 0.0


def test_assert_program_passes_and_fails(sandbox: Sandbox) -> None:
    tests = ["assert f(1) == 2", "import math\nassert f(math.inf) == math.inf"]
    assert (
        check_code("def f(x):\n    return 2 * x\nif __name__ == '__main__':\n    input()", tests, sandbox, LIMITS)
        == 1.0
    )
    assert check_code("def f(x):\n    return 2", tests, sandbox, LIMITS) == 0.0
    assert check_code("def f(x):\n    return 2", tests, sandbox, LIMITS, fraction=True) == 0.5


def test_slow_program_fails_the_tests_that_do_not_get_their_turn(sandbox: Sandbox) -> None:
    tests = ["assert True"] * 2 + ["while True: pass"] + ["assert True"] * 200
    begin = time.monotonic()
    value = check_code("x = 1", tests, sandbox, Limits(seconds=60), fraction=True, seconds=2)
    assert value == 2 / 203
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "program", ["import os\nos._exit(0)", "raise SystemExit(0)", "import os\nprint(4)\nos._exit(3)"]
)
def test_leaving_early_passes_nothing(sandbox: Sandbox, program: str) -> None:
    assert not passes(program, AssertTest("assert True"), sandbox, LIMITS)
    assert not passes(program, IoTest("", "3"), sandbox, LIMITS)


LOOT = """
import os, re
def leave(texts):
    found = re.findall("[0-9a-f]{32}", " ".join(texts))
    os.write(1, b"read " + str(len(" ".join(texts))).encode() + b"\\n" + (found or ["nothing"])[-1].encode() + b"\\n")
    os._exit(0)
"""
STEAL = {
    "the callers' variables": "import sys\ntexts, frame = [], sys._getframe()\nwhile frame:\n"
    "    texts += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]\n    frame = frame.f_back\nleave(texts)",
    "stdin from its beginning": "texts = []\nfor _ in range(2):\n    texts.append(repr(os.read(0, 10**6)))\n"
    "    try: os.lseek(0, 0, 0)\n    except OSError: pass\nleave(texts)",
    "every open file": "texts = []\nfor fd in [0, *range(3, 64)]:\n    for seek in (0, 1):\n        try:\n"
    "            os.set_blocking(fd, False)\n            seek and os.lseek(fd, 0, 0)\n            texts.append(repr(os.read(fd, 10**6)))\n"
    "        except OSError: pass\nleave(texts)",
    "every object": "import gc\nleave([repr(x) for x in gc.get_objects() if type(x) in (dict, list, tuple)])",
}  # fmt: skip


@pytest.mark.parametrize("where", STEAL)
def test_secret_that_proves_the_end_of_a_test_is_not_in_the_programs_reach(sandbox: Sandbox, where: str) -> None:
    """The loot is printed as the harness would print the secret."""
    assert not passes(LOOT + STEAL[where], AssertTest("assert False"), sandbox, LIMITS)
    inside = "def f(): pass\n" + LOOT + "def f():\n    " + STEAL[where].replace("\n", "\n    ")
    assert not passes(inside, AssertTest("f()\nassert False"), sandbox, LIMITS)


def test_test_runs_in_the_programs_interpreter_with_its_output_and_its_exit_code(sandbox: Sandbox) -> None:
    program = "import sys, os\nprint('noise')\nx = sys.stdin.read()"
    assert passes(program, AssertTest("assert x == ''\nprint('more')"), sandbox, LIMITS)
    assert not passes("import atexit, os\natexit.register(os._exit, 3)", AssertTest("assert True"), sandbox, LIMITS)
    assert not passes("import os\nos.kill(os.getppid(), 9)", AssertTest("assert True"), sandbox, LIMITS)


def test_expected_output_is_not_in_the_sandbox(sandbox: Sandbox) -> None:
    program = "import glob\nfor f in glob.glob('/box/*') + glob.glob('/tmp/*'): print(f)"
    assert sandbox.run(program, "", LIMITS).stdout == "/box/main.py\n"


# ------------------------------------------------------------------ hostile programs

HOSTILE = {
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nfor _ in range(1000): threading.Thread(target=time.sleep, args=(1000,)).start()",
    "memory hog": "x = []\nwhile True: x.append(bytearray(10**7))",
    "endless output": "while True: print('x' * 1000)",
    "full disk": "for i in range(1000): open(f'/tmp/{i}', 'wb').write(b'x' * 10**6)",
    "large file": "open('/tmp/x', 'wb').write(b'x' * 10**8)",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "kill all": "import os\nos.kill(-1, 9)",
    "os._exit": "import os\nos._exit(7)",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "orphan": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)\nraise SystemExit(3)",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_does_not_pass_and_ends(sandbox: Sandbox, name: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = HOSTILE[name].replace("PORT", str(listener.getsockname()[1]))
        begin = time.monotonic()
        assert not passes(program, IoTest("", ""), sandbox, SHORT)
        assert time.monotonic() - begin < 20
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_memory_that_no_process_limit_binds_is_refused(sandbox: Sandbox) -> None:
    """System V's segments stay when they are detached, so a program could fill the machine with them."""
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno())\nprint(libc.msgget(0, 0o1600), ctypes.get_errno())"
    )
    result = sandbox.run(program, "", LIMITS)
    assert (result.exit_code, result.stdout) == (0, "-1 1\n-1 1\n")


def test_time_is_the_processors_and_only_three_times_as_much_by_the_clock(sandbox: Sandbox) -> None:
    wait = IoTest("", "done")
    assert passes("import time\ntime.sleep(1.5)\nprint('done')", wait, sandbox, Limits(seconds=1))
    assert not passes("import time\ntime.sleep(60)\nprint('done')", wait, sandbox, Limits(seconds=0.5))
    begin = time.monotonic()
    assert not passes("while True: pass", wait, sandbox, Limits(seconds=1, wall_seconds=60))
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("folder", ["/", "/box", "/usr/lib", "/usr/bin", "/dev"])
def test_nothing_but_tmp_can_be_written(sandbox: Sandbox, folder: str) -> None:
    program = f"import os\nopen(os.path.join({folder!r}, 'betterthan-was-here'), 'w').write('x')"
    assert sandbox.run(program, "", LIMITS).exit_code == 1
    assert not (Path(folder) / "betterthan-was-here").exists()


def test_program_is_a_plain_user_with_nothing_of_ours(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    os.environ["BETTERTHAN_SECRET"] = "x"
    try:
        result = sandbox.run(
            f"import os\nprint(os.getuid() != 0, 'BETTERTHAN_SECRET' in os.environ, os.path.exists({str(secret)!r}), "
            "os.path.exists('/proc'), os.path.exists('/etc/passwd'))\n"
            "for fd in range(3, 64):\n    try: os.fstat(fd)\n    except OSError: continue\n    print(fd)",
            "",
            LIMITS,
        )
    finally:
        del os.environ["BETTERTHAN_SECRET"]
    is_plain = "True" if os.geteuid() == 0 else str(os.geteuid() != 0)
    assert result.stdout == f"{is_plain} False False False False\n"


def test_same_program_gives_the_same_output(sandbox: Sandbox) -> None:
    program = "print({'a', 'b', 'c', 'd'}, hash('x'))"
    assert len({sandbox.run(program, "", LIMITS).stdout for _ in range(3)}) == 1


def test_output_is_cut_at_its_limit(sandbox: Sandbox) -> None:
    result = sandbox.run("print('é' * 10**6)", "", Limits(seconds=10, output_kb=4))
    assert result.exit_code != 0
    assert len(result.stdout) <= 4096


def test_hostile_programs_in_the_pool_cost_only_their_items(sandbox: Sandbox) -> None:
    pool = VerifierPool({"tests": CodePart(kind="code", test_seconds=1.5)}, num_workers=2)
    pool.start()
    try:
        assert pool.versions["python of the sandbox"] == sandbox.probe()
        tests = [{"stdin": "4\n", "stdout": "8\n"}]
        hostile = [HOSTILE[name] for name in ("endless loop", "fork bomb", "memory hog", "os._exit", "orphan")]
        bad = [pool.submit("tests", Answer(program, tests)) for program in hostile]
        good = [pool.submit("tests", Answer(DOUBLE, tests)) for _ in range(5)]
        assert [future.result(120) for future in good] == [1.0] * 5
        assert [future.result(120) for future in bad] == [0.0] * 5
        assert pool.num_replaced == 0
    finally:
        pool.close()


def test_closing_the_pool_ends_the_programs_that_run(sandbox: Sandbox) -> None:
    pool = VerifierPool({"tests": CodePart(kind="code", test_seconds=600, timeout_seconds=3600)}, num_workers=1)
    pool.start()
    pool.submit("tests", Answer("while True: pass", "assert True"))
    while not programs_left():
        pass
    pool.close()


def test_code_verifier_refuses_to_start_without_its_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"bwrap is not installed \(Debian: apt-get install bubblewrap\)"):
        Sandbox()
    pool = VerifierPool({"size": LengthPart(kind="length"), "tests": CodePart(kind="code")}, num_workers=1)
    with pytest.raises(VerifierSetupError, match="the verifiers cannot be started: bwrap is not installed"):
        pool.start()
    pool.close()


def test_sandbox_that_does_not_work_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    for folder in (tmp_path, broken):
        folder.chmod(0o755)
    real = shutil.which
    monkeypatch.setattr(
        shutil,
        "which",
        lambda name: str(broken) if name == "bwrap" else real(name) or f"/usr/bin/{name}",
    )
    box = Sandbox()
    box._prefix = []  # a plain user could not read this test's folder
    with pytest.raises(SandboxError, match=r"does not work here \(bwrap: No permissions to create new namespace\)"):
        box.probe()
    with pytest.raises(SandboxError, match="the sandbox did not start"):
        box.run("print(1)", "", LIMITS)


def test_time_that_was_up_before_the_program_began_is_no_verdict(sandbox: Sandbox, tmp_path: Path) -> None:
    slow = tmp_path / "bwrap"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    box = Sandbox()
    box._prefix, box.bwrap = [], str(slow)
    with pytest.raises(SandboxError, match=r"the sandbox did not start within 0\.3 s"):
        check_code("x = 1", "assert True", box, Limits(seconds=0.1))
    assert check_code("x = 1", "assert True", box, Limits(seconds=60), seconds=0.3) == 0.0


def test_interpreter_outside_usr_is_refused() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with pytest.raises(SandboxError, match="must be a program below /usr"):
        Sandbox("/opt/python/bin/python3")
