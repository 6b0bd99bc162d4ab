"""Ways to start ranks: ddpkit's, torch's, the peers', and a fork by hand as the least of all.

This file also is the program that a contestant runs in, one process for each, so that what one of
them leaves behind (signal handlers, variables, threads) cannot disturb another:

    contestants.py serve NAME                      launch on request, see `harness.Contestant`
    contestants.py hold NAME WORKLOAD RANKS DIR    launch once, as a user's script does

Fresh interpreters that a launcher starts import this file again as their main module, so it imports
nothing that a rank would not need anyway.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from task import REASON, STEP, Task, TrainingError

LOOPBACK = "127.0.0.1"


# ------------------------------------------------------------------------------------- by hand


def launch_bare_fork(task: Task) -> Any:
    """Fork with os.fork and open gloo by hand: the least that any launcher has to do.

    The server of the store starts after the forks. With its thread running before them, ranks hung
    in a lock that it held, most of the launches of 8 ranks and some of 2.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=128)
    pids = [_fork_rank(rank, listener, task) for rank in range(task.ranks)]
    server = _serve_store(listener)
    for rank, pid in enumerate(pids):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != 0:
            raise RuntimeError(f"rank {rank} ended with exit code {code}")
    del server
    return task.read_result()


def _serve_store(listener: socket.socket) -> Any:
    import torch.distributed as dist

    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


def _fork_rank(rank: int, listener: socket.socket, task: Task) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            port = listener.getsockname()[1]
            listener.close()
            _be_forked_rank(rank, port, task)
            code = 0
        except BaseException:  # noqa: BLE001  # whatever it is, it must not reach the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def _be_forked_rank(rank: int, port: int, task: Task) -> None:
    import torch.distributed as dist
    import workloads

    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.ranks)
    workloads.perform_and_write(task)
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------- ddpkit


def launch_ddpkit(start_method: str, task: Task) -> Any:
    """Call a decorated function."""
    import workloads

    from ddpkit import distributed

    run = distributed(
        workloads.perform, nproc_per_node=task.ranks, device="cpu", start_method=start_method
    )
    return run(task)


def why_auto_does_not_fork() -> str | None:
    """Ask ddpkit whether its `auto` forks here; None means that it does."""
    from ddpkit.launch import forksafe

    reason = forksafe.prepare_fork()
    return None if reason is None else f"auto does not fork: {reason}"


# --------------------------------------------------------------------------------------- torch


def launch_mp_spawn(task: Task) -> Any:
    """Use torch.multiprocessing.spawn; the group and the way back are left to the user."""
    import torch.multiprocessing as mp
    import workloads

    mp.spawn(workloads.perform_as_rank, args=(task, free_port()), nprocs=task.ranks)
    return task.read_result()


def launch_elastic(task: Task) -> Any:
    """Use the function interface of torchrun, as `torchrun --standalone` sets it up."""
    import workloads
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=task.ranks,
        run_id=os.urandom(8).hex(),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    return elastic_launch(config, workloads.perform_in_group)(task)[0]


def torchrun_command(task: Task) -> list[str]:
    """Build the command line that runs `workloads.py` under torchrun."""
    options = ["--standalone", "--nproc-per-node", str(task.ranks)]
    script = str(Path(__file__).with_name("workloads.py"))
    arguments = [task.workload, str(task.ranks), task.folder]
    return [sys.executable, "-m", "torch.distributed.run", *options, script, *arguments]


def launch_torchrun(task: Task) -> Any:
    """Run a script under torchrun, the way a shell does."""
    command = torchrun_command(task)
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    return task.read_result()


# --------------------------------------------------------------------------------------- peers


def launch_torchrunx(task: Task) -> Any:
    """Use torchrunx on this machine."""
    import torchrunx
    import workloads

    launcher = torchrunx.Launcher(
        hostnames=["localhost"], workers_per_host=task.ranks, backend="gloo"
    )
    return launcher.run(workloads.perform, task).rank(0)


def launch_accelerate_notebook(task: Task) -> Any:
    """Use accelerate's launcher for notebooks; without a port of its own it takes 29500."""
    import workloads
    from accelerate import notebook_launcher

    notebook_launcher(
        workloads.perform_in_group_and_write,
        args=(task,),
        num_processes=task.ranks,
        use_port=str(free_port()),
    )
    return task.read_result()


def launch_accelerate_debug(task: Task) -> Any:
    """Use accelerate's launcher for tests on CPU."""
    import workloads
    from accelerate import debug_launcher

    debug_launcher(workloads.perform_and_write, args=(task,), num_processes=task.ranks)
    return task.read_result()


def launch_fabric(strategy: str, task: Task) -> Any:
    """Use Lightning Fabric with a strategy that calls a function."""
    import workloads
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=task.ranks, strategy=strategy)
    return fabric.launch(workloads.perform_after, task)


def launch_ignite(task: Task) -> Any:
    """Use ignite's context manager; without a port of its own it takes 2222."""
    import ignite.distributed as idist
    import workloads

    options = {"master_addr": LOOPBACK, "master_port": free_port()}
    with idist.Parallel(backend="gloo", nproc_per_node=task.ranks, **options) as parallel:
        parallel.run(workloads.perform_after_and_write, task)
    return task.read_result()


def free_port() -> int:
    """Find a port that nobody uses now, which is what users of these launchers do."""
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


# ----------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Way:
    """One way to start ranks."""

    launch: Callable[[Task], Any]
    modules: tuple[str, ...]
    """What a script that launches this way imports at its top."""
    fresh: bool = False
    """Whether every rank is a fresh interpreter, which takes seconds."""
    note: Callable[[], str | None] | None = None
    """Says what a reader has to know about the figures of this process."""
    command: Callable[[Task], list[str]] | None = None
    """Where no Python function launches, the command that does."""

    def missing(self) -> str | None:
        """Name the first module that is not installed, None when all are."""
        names = (module.split(".")[0] for module in self.modules)
        return next((name for name in names if importlib.util.find_spec(name) is None), None)


_TORCH = ("torch", "torch.distributed", "torch.multiprocessing", "workloads")
_ELASTIC = (*_TORCH, "torch.distributed.launcher.api")
_ACCELERATE = (*_TORCH, "accelerate")
_FABRIC = (*_TORCH, "lightning_fabric")


def _ddpkit(method: str, **fields: Any) -> Way:
    return Way(functools.partial(launch_ddpkit, method), (*_TORCH, "ddpkit"), **fields)


WAYS: dict[str, Way] = {
    "bare fork": Way(launch_bare_fork, _TORCH),
    "ddpkit auto": _ddpkit("auto", note=why_auto_does_not_fork),
    "ddpkit forkserver": _ddpkit("forkserver"),
    "ddpkit spawn": _ddpkit("spawn", fresh=True),
    "mp.spawn": Way(launch_mp_spawn, _TORCH, fresh=True),
    "elastic_launch": Way(launch_elastic, _ELASTIC, fresh=True),
    "torchrun": Way(launch_torchrun, (), fresh=True, command=torchrun_command),
    "torchrunx": Way(launch_torchrunx, (*_TORCH, "torchrunx"), fresh=True),
    "accelerate notebook": Way(launch_accelerate_notebook, _ACCELERATE),
    "accelerate debug": Way(launch_accelerate_debug, _ACCELERATE),
    "fabric ddp_spawn": Way(functools.partial(launch_fabric, "ddp_spawn"), _FABRIC, fresh=True),
    "fabric ddp_fork": Way(functools.partial(launch_fabric, "ddp_fork"), _FABRIC),
    "ignite": Way(launch_ignite, (*_TORCH, "ignite.distributed"), fresh=True),
}


# ---------------------------------------------------------------------- the contestant's program


def serve(name: str) -> None:
    """Import what the launcher needs, then launch once for every line that asks for it."""
    requests, replies = _take_standard_streams()
    way = WAYS[name]
    began = time.monotonic()
    for module in way.modules:
        importlib.import_module(module)
    imports = time.monotonic() - began
    _answer(replies, {"imports": imports, "note": way.note() if way.note else None})
    for line in requests:
        _answer(replies, _launch(way, json.loads(line)))


def _take_standard_streams() -> tuple[TextIO, TextIO]:
    """Keep requests and replies apart from what launchers and ranks read and print."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _answer(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _launch(way: Way, request: dict[str, Any]) -> dict[str, Any]:
    """Launch once, and take down the time and what came of it."""
    task = Task(**request)
    result: dict[str, float] | None = None
    caught: BaseException | None = None
    began = time.monotonic()
    try:
        result = way.launch(task)
    except BaseException as error:  # noqa: BLE001  # what the caller gets is what is measured
        caught = error
    ended = time.monotonic()
    description = None if caught is None else describe(caught)
    return {"began": began, "ended": ended, "result": result, "error": description}


def describe(error: BaseException) -> dict[str, Any]:
    """Say what a program that caught this exception has in its hands, and what would be printed."""
    if isinstance(error, subprocess.CalledProcessError):  # all that a shell gets
        return {
            "type": f"exit code {error.returncode}",
            "same_type": False,
            "same_attributes": False,
            "text": error.stderr,
        }
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "same_type": type(error) in (TrainingError, ValueError),
        "same_attributes": _attributes(error) == (STEP, REASON),
        "text": "".join(traceback.format_exception(error)),
    }


def _attributes(error: BaseException) -> tuple[Any, Any]:
    return getattr(error, "step", None), getattr(error, "reason", None)


def hold(name: str, workload: str, ranks: str, folder: str) -> None:
    """Launch once, in the way of a script that knows nothing of a benchmark."""
    way = WAYS[name]
    for module in way.modules:
        importlib.import_module(module)
    task = Task(workload, int(ranks), folder)
    if way.command is not None:
        command = way.command(task)
        os.execv(command[0], command)
    way.launch(task)


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "serve":
        serve(*arguments)
    else:
        hold(*arguments)
