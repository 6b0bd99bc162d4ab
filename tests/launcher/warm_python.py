"""A python that has imported torch already: it forks for each program that it is asked to run.

Each line of standard input is a request in JSON: `argv` (without "python"), `folder`, `environment`
and `output`, a file. The answer is a line with the exit status of the program.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import sys
import traceback
from typing import Any

import sklearn.datasets
import torch._dynamo
import tqdm

PRELOADED = (sklearn.datasets, torch._dynamo, tqdm)  # before any of them has started a thread


def serve() -> dict[str, Any] | None:
    """Answer requests; return one in the process that is to run it."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            return dict(json.loads(line))
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return None


def become(request: dict[str, Any]) -> None:
    """Make this process look as if it had been started for the request."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def end(status: object) -> None:
    """End as an interpreter does, without the second that it takes to take all modules apart."""
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def run(arguments: list[str]) -> None:
    """Run a script, or a module after `-m`."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()  # noqa: PTH109  (as python itself does it)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))  # noqa: PTH100, PTH120
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    gc.freeze()
    wanted = serve()
    if wanted is not None:
        become(wanted)
        try:
            run(wanted["argv"])
            end(None)
        except SystemExit as exit_:
            end(exit_.code)
        except BaseException:  # noqa: BLE001  (as an interpreter)
            traceback.print_exc()
            end(1)
