"""Measure what the side channel costs with hundreds of ranks that talk through one store.

The ranks are simulated: each is a thread with a connection of its own to one real store, whose
server has a process to itself, as rank 0 has. So all ranks share the cores of this machine; what is
to be seen is how the cost grows. See README.md for what the columns mean.

    python benchmarks/control.py --json control.json | tee control.txt
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from harness import (
    Target,
    describe_machine,
    median,
    print_machine,
    print_table,
    print_targets,
    show_time,
    tell,
    write_record,
)
from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.utils.store import barrier as torch_barrier

from ddpkit import agree
from ddpkit import store as stores
from ddpkit.control import Channel, Departure
from ddpkit.errors import PeerError
from ddpkit.rendezvous import await_members
from ddpkit.topology import Topology

SIZES = (10, 50, 100, 250, 500)
ROUNDS = 5
RANKS_PER_PROCESS = 50
"""At most; more threads of one interpreter would wait for each other. Rank 0 is on its own."""
FROM, TO = 50, 500
GROWTH = 1.2
"""What a rank's share may grow by from 50 to 500 ranks; 1 is linear growth of the whole."""
BOUND = 120.0

TORCH, BARRIER, RANK0, FAILURE, JOIN = (
    "torch's store barrier",
    "barrier()",
    "on_rank0()",
    "a failure",
    "to join",
)
WORKS = (TORCH, BARRIER, RANK0, FAILURE)

_current = threading.local()
"""The channel of the rank that this thread is."""


# ------------------------------------------------------------------------------- simulated ranks


@dataclass(frozen=True)
class Request:
    """What the ranks of a process are to do, all at once."""

    work: str
    label: str
    """Names the world; each request has its own."""
    world_size: int


@dataclass(frozen=True)
class Span:
    """When the ranks of a process began and ended, by the clock of the machine."""

    began: float
    ended: float


def call_barrier(channel: Channel) -> None:
    """Meet all ranks."""
    agree.barrier()


def call_on_rank0(channel: Channel) -> None:
    """Take a value from rank 0."""
    agree.on_rank0(int)


def fail_or_hear_of_it(channel: Channel) -> None:
    """Leave as the last rank, by an error; wait for that as another one."""
    if channel.rank == channel.world_size - 1:
        channel.leave(Departure(channel.rank, "host", failed=True, summary="ValueError: cause"))
        return
    with contextlib.suppress(PeerError):
        agree.barrier()
        raise AssertionError("nobody has heard of the failure")


CALLS: dict[str, Callable[[Channel], None]] = {
    BARRIER: call_barrier,
    RANK0: call_on_rank0,
    FAILURE: fail_or_hear_of_it,
}


def live_as_ranks(pipe: Connection, port: int, first: int, count: int) -> None:
    """Be some of the ranks: do what is asked for until nothing is."""
    clients = [stores.connect(stores.LOOPBACK, port, BOUND) for _ in range(count)]
    with (
        mock.patch("ddpkit.agree.require_group", return_value=True),
        mock.patch("ddpkit.agree.get_channel", side_effect=lambda: _current.channel),
        ThreadPoolExecutor(count) as pool,
        contextlib.suppress(EOFError),
    ):
        pipe.send("ready")
        while True:
            pipe.send(serve_request(pipe.recv(), clients, first, pool))


def serve_request(
    request: Request, clients: Sequence[Store], first: int, pool: ThreadPoolExecutor
) -> list[Span]:
    """Let the ranks that take part join a world, and then do the work.

    Returns:
        The time of each of the two.
    """
    ranks = range(first, min(first + len(clients), request.world_size))
    stores_of_world = [PrefixStore(request.label, client) for client in clients[: len(ranks)]]
    if request.work == TORCH:
        return [
            span(pool, [partial(wait_as_torch_does, store, request) for store in stores_of_world])
        ]
    channels: list[Channel] = []

    def join(rank: int, store: Store) -> None:
        channel = Channel(
            store,
            rank=rank,
            world_size=request.world_size,
            label=request.label,
            secret=b"secret",
            bound=BOUND,
        )
        channels.append(channel)
        place = Topology(rank, request.world_size, rank, request.world_size, source="simulated")
        await_members(channel, place, time.monotonic() + BOUND, BOUND)

    pairs = zip(ranks, stores_of_world, strict=True)
    joined = span(pool, [partial(join, rank, store) for rank, store in pairs])
    calls = [partial(work, request.work, channel) for channel in channels]
    if request.work != FAILURE:
        span(pool, calls)  # the first call of a world asks twice for what was never there
    worked = span(pool, calls)
    for channel in channels:
        channel.close()
    return [joined, worked]


def work(name: str, channel: Channel) -> None:
    """Make a call as one of the ranks."""
    _current.channel = channel
    CALLS[name](channel)


def wait_as_torch_does(store: Store, request: Request) -> None:
    """Meet all ranks by a counter and a key that each waits for."""
    torch_barrier(store, request.world_size, "barrier", BOUND)


def span(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], None]]) -> Span:
    """Run all calls at once, each in a thread, and time them."""
    began = time.monotonic()
    for future in [pool.submit(call) for call in calls]:
        future.result(BOUND)
    return Span(began, time.monotonic())


# ------------------------------------------------------------------------------------ the machine


def serve_store(pipe: Connection) -> None:
    """Serve the store, and tell on request how much time of a core that has taken."""
    listener = stores.listen()
    port = listener.getsockname()[1]
    store = stores.serve(listener, timeout=BOUND)
    pipe.send(port)
    with contextlib.suppress(EOFError):
        while pipe.recv():
            pipe.send(time.process_time())
    del store


@dataclass(frozen=True)
class Sample:
    """What one request has taken, in seconds."""

    seconds: float
    join: float
    server: float
    """Time of a core that the server of the store has used, for both."""


class Machine:
    """The processes of the server and of the ranks."""

    def __init__(self, server: Connection, ranks: Sequence[Connection]) -> None:
        self._server = server
        self._ranks = ranks
        self._requests = 0

    def measure(self, work: str, world_size: int) -> Sample:
        """Have a world of ranks do something once."""
        self._requests += 1
        request = Request(work, f"world-{self._requests}", world_size)
        before = self._server_time()
        for pipe in self._ranks:
            pipe.send(request)
        spans = [pipe.recv() for pipe in self._ranks]
        server = self._server_time() - before
        join = together([first for first, *_ in spans])
        return Sample(together([last for *_, last in spans]), join, server)

    def _server_time(self) -> float:
        self._server.send(True)
        seconds: float = self._server.recv()
        return seconds


def together(spans: Sequence[Span]) -> float:
    """Return the seconds from the first begin to the last end."""
    return max(part.ended for part in spans) - min(part.began for part in spans)


@contextlib.contextmanager
def open_machine(ranks: int) -> Iterator[Machine]:
    """Start all processes, and end them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "ddpkit.agree", "ddpkit.rendezvous"])
    processes = []

    def start(target: Callable[..., None], *arguments: Any) -> Connection:
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        return mine

    server = start(serve_store)
    port = server.recv()
    firsts = [0, *range(1, ranks, RANKS_PER_PROCESS)]
    parts = zip(firsts, [*firsts[1:], ranks], strict=True)
    pipes = [start(live_as_ranks, port, first, end - first) for first, end in parts]
    try:
        for pipe in pipes:
            pipe.recv()
        yield Machine(server, pipes)
    finally:
        for pipe in (*pipes, server):
            pipe.close()
        for process in processes:
            process.join(10.0)
            process.kill()


# --------------------------------------------------------------------------------- the measuring

Samples = dict[int, dict[str, list[Sample]]]


def measure(sizes: Sequence[int], rounds: int) -> Samples:
    """Measure worlds of each size, the works in turn; a first round warms up."""
    samples: Samples = {}
    for size in sizes:
        taken: dict[str, list[Sample]] = {work: [] for work in WORKS}
        with open_machine(size) as machine:
            for number in range(rounds + 1):
                for work in WORKS:
                    sample = machine.measure(work, size)
                    if number:
                        taken[work].append(sample)
        samples[size] = taken
        tell(f"{size} ranks measured")
    return samples


def seconds_of(samples: Samples, size: int, work: str) -> float:
    """Return the median time of one work, or of joining a world."""
    by_work = samples[size]
    if work == JOIN:
        return statistics.median(s.join for name in CALLS for s in by_work[name])
    return statistics.median(s.seconds for s in by_work[work])


def server_of(samples: Samples, size: int, work: str) -> float:
    """Return the median time of a core that the server has used for a work and for joining."""
    middle = median([sample.server for sample in samples[size][work]])
    assert middle is not None
    return middle


def print_times(samples: Samples) -> None:
    """Print how long everything takes, and the share of one rank."""
    shown = (JOIN, *WORKS)
    rows = [
        [str(size), *(show_time(seconds_of(samples, size, work)) for work in shown)]
        for size in samples
    ]
    print_table("Until all ranks have it behind them", ["ranks", *shown], rows)
    rows = [
        [str(size), *(f"{1e6 * seconds_of(samples, size, work) / size:.0f} us" for work in shown)]
        for size in samples
    ]
    print_table("The same, divided by the number of ranks", ["ranks", *shown], rows)
    rows = [
        [str(size), *(show_time(server_of(samples, size, work)) for work in WORKS)]
        for size in samples
    ]
    print_table("Time of a core that the server needs, joining included", ["ranks", *WORKS], rows)


def judge(samples: Samples) -> list[Target]:
    """Compare the growth with a linear one."""
    if not {FROM, TO} <= samples.keys():
        return []
    return [judge_one(samples, work) for work in (JOIN, BARRIER, RANK0, FAILURE)]


def judge_one(samples: Samples, work: str) -> Target:
    """Tell whether one rank's share of a work stays the same."""
    few, many = (seconds_of(samples, size, work) / size for size in (FROM, TO))
    return Target(
        f"{work}: with {TO} ranks at most {GROWTH:.1f}x the share of a rank with {FROM}:",
        f"{many / few:.2f}x",
        many / few <= GROWTH,
    )


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="numbers of ranks")
    args = parser.parse_args()
    machine = describe_machine()
    samples = measure(args.sizes, args.rounds)
    print_machine(machine)
    print_times(samples)
    targets = judge(samples)
    print_targets(targets)
    record = {
        "benchmark": "control",
        "machine": machine,
        "rounds": args.rounds,
        "samples": {
            size: {work: [asdict(sample) for sample in taken] for work, taken in by_work.items()}
            for size, by_work in samples.items()
        },
        "targets": [asdict(target) for target in targets],
    }
    write_record(args.json, record)


if __name__ == "__main__":
    main()
