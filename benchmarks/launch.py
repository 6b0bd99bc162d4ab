"""Time what it takes to start two CPU ranks and get the sum of an all-reduce back.

Every way runs once per round, one after the other, so that whatever else the machine does hits them
all. Each is warmed up first: what counts is the second launch of a program and every later one.

    python benchmarks/launch.py --rounds 7 --json launch.json
"""

import argparse
import functools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
EXPECTED = sum(range(1, RANKS + 1))
REFERENCES = ("bare fork", "mp.spawn", "torchrun")


def all_reduce_once() -> float:
    """Sum 1 + rank over the ranks, in an open group."""
    value = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(value)
    return value.item()


# --------------------------------------------------------------------------------- the contestants


def launch_bare_fork() -> float:
    """Fork with os.fork and open gloo by hand: the least that any launcher has to do."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reader, writer = os.pipe()
    pids = [_fork_rank(rank, server.port, writer) for rank in range(RANKS)]
    os.close(writer)
    with os.fdopen(reader) as results:
        value = float(results.readline())
    for pid in pids:
        os.waitpid(pid, 0)
    return value


def _fork_rank(rank: int, port: int, writer: int) -> int:
    with warnings.catch_warnings():
        # Newer Pythons warn about the store's thread in the parent, which no rank needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
            value = all_reduce_once()
            if rank == 0:
                os.write(writer, f"{value}\n".encode())
            dist.destroy_process_group()
        finally:
            os._exit(0)
    return pid


def launch_ddpkit(start_method: str) -> float:
    """Call a decorated function."""
    # Imported here, so that what mp.spawn imports anew in every rank is torch alone.
    from ddpkit import distributed

    run = distributed(
        all_reduce_once, nproc_per_node=RANKS, device="cpu", start_method=start_method
    )
    return run()


def launch_mp_spawn() -> float:
    """Use torch.multiprocessing.spawn, with a queue for the value."""
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_spawned_rank, args=(_free_port(), results), nprocs=RANKS)
    return float(results.get())


def _spawned_rank(rank: int, port: int, results: Any) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    value = all_reduce_once()
    if rank == 0:
        results.put(value)
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def launch_torchrun() -> float:
    """Run this file under torchrun, as a rank that prints the value."""
    options = ["--standalone", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, "--as-rank"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(result.stdout)


def run_as_rank() -> None:
    """Be a rank that torchrun started."""
    dist.init_process_group("gloo")
    value = all_reduce_once()
    if dist.get_rank() == 0:
        print(value)
    dist.destroy_process_group()


CONTESTANTS: dict[str, Callable[[], float]] = {
    "bare fork": launch_bare_fork,
    "ddpkit auto": functools.partial(launch_ddpkit, "auto"),
    "ddpkit forkserver": functools.partial(launch_ddpkit, "forkserver"),
    "ddpkit spawn": functools.partial(launch_ddpkit, "spawn"),
    "mp.spawn": launch_mp_spawn,
    "torchrun": launch_torchrun,
}


# ----------------------------------------------------------------------------------- the measuring


def time_launch(launch: Callable[[], float]) -> float:
    """Return the seconds of one launch, whose value must be right."""
    start = time.perf_counter()
    value = launch()
    seconds = time.perf_counter() - start
    if value != EXPECTED:
        raise RuntimeError(f"the all-reduce returned {value}, not {EXPECTED}")
    return seconds


def measure(rounds: int) -> dict[str, list[float]]:
    """Time every contestant `rounds` times, in turn, after one launch that does not count."""
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for round_number in range(rounds + 1):
        for name, launch in CONTESTANTS.items():
            seconds = time_launch(launch)
            if round_number > 0:
                times[name].append(seconds)
    return times


def summarize(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Compute median, range, and how many times faster than each reference."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        name: {
            "median": medians[name],
            "min": min(values),
            "max": max(values),
            **{f"vs {other}": medians[other] / medians[name] for other in REFERENCES},
        }
        for name, values in times.items()
    }


def why_auto_does_not_fork() -> str | None:
    """Ask ddpkit whether its `auto` forks here; None means that it does."""
    from ddpkit.launch import forksafe

    return forksafe.prepare_fork()


def describe_machine() -> dict[str, str | int | None]:
    """Name what the numbers depend on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "auto_does_not_fork_because": why_auto_does_not_fork(),
    }


def print_table(summary: dict[str, dict[str, float]]) -> None:
    """Print one line for each contestant; the last columns say how many times faster it is."""
    ratios = "".join(f"{'vs ' + name:>14}" for name in REFERENCES)
    print(f"{'':<20}{'median':>10}{'range':>22}{ratios}")
    for name, row in summary.items():
        spread = f"{1000 * row['min']:.0f} .. {1000 * row['max']:.0f} ms"
        ratios = "".join(f"{row[f'vs {other}']:>13.2f}x" for other in REFERENCES)
        print(f"{name:<20}{1000 * row['median']:>7.0f} ms{spread:>22}{ratios}")


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        run_as_rank()
        return
    machine = describe_machine()
    times = measure(args.rounds)
    summary = summarize(times)
    print(", ".join(f"{key}: {value}" for key, value in machine.items()))
    print_table(summary)
    if args.json is not None:
        record = {"machine": machine, "rounds": args.rounds, "times": times, "summary": summary}
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
