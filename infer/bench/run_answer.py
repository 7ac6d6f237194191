"""Python code that a model wrote, and tests -> whether the tests pass, found out in a process of its own.

The process is bounded, not locked in: it has a time limit, limits of memory and file size, an empty folder, no
standard input and no inherited environment, but the rights of the user who starts it. Where model-written code
must not be able to reach files or the network, run inside a container.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

TIME_LIMIT_S = 5.0
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
PASSED = 86  # an exit status that neither errors nor an exit() in the answer give
ENVIRONMENT = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# Arguments: seconds, bytes of memory, bytes of a file, the status that means success. Not named __main__, the answer's
# own demonstration does not run.
RUNNER = """
import contextlib, os, resource, sys
seconds, memory, file_size, passed = map(int, sys.argv[1:])
for limit, value in (("CPU", seconds), ("AS", memory), ("DATA", memory), ("FSIZE", file_size), ("CORE", 0)):
    with contextlib.suppress(OSError, ValueError):  # not every system has every limit
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
names = {"__name__": "answer"}
for file in ("answer.py", "tests.py"):
    with open(file, encoding="utf-8") as source:
        exec(compile(source.read(), file, "exec"), names)
os._exit(passed)
"""


def passes(code: str, tests: str, *, time_limit_s: float = TIME_LIMIT_S) -> bool:
    """Whether `code` followed by `tests` ends without an error and within the limits."""
    with tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True) as name:
        for file, text in (("answer.py", code), ("tests.py", tests)):
            (Path(name) / file).write_bytes(text.encode(errors="replace"))
        limits = (int(time_limit_s) + 1, MEMORY_BYTES, FILE_BYTES, PASSED)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", RUNNER, *map(str, limits)],
            cwd=name,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(time_limit_s) == PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it started
            process.wait()
