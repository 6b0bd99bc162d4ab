"""No public call can wait for ever: each of them, once with a dead peer, once with a missing one.

The rank that survives says what it saw in a file, for nobody helps it: where a peer was killed, the
parent of the ranks would stop the survivor at once, so that it ignores SIGTERM here.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

# DDP's constructor imports it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from ddpkit import (
    ShardedLoader,
    accumulate,
    all_ranks,
    any_rank,
    barrier,
    barrier_load,
    broadcast_value,
    ddp,
    distributed,
    gather,
    gather_cat,
    get_rank,
    latest_checkpoint,
    loss_weight,
    on_rank0,
    process_group,
    rank0_first,
    rank0_save,
    reduce_mean,
    reduce_sum,
    rendezvous,
    sharded_loader,
    stop_requested,
)
from ddpkit.accumulation import MicroBatch
from ddpkit.checkpoint import SaveHandle
from ddpkit.control import Channel
from ddpkit.errors import WorkerError
from ddpkit.testing import assert_replicas_equal, run_ranks
from ddpkit.topology import Topology
from tests.forking import needs_fork
from tests.multiproc.hand_set import with_hand_set_variables

PATIENCE = 30.0  # a test that takes this long has failed
SHORT = 0.8  # time-out of a group whose rank will be missed
LONG = 120.0  # time-out of a group whose rank dies; nothing here may wait for it


@dataclass(frozen=True)
class Case:
    """A call that cannot succeed without its peer, and what the rank that makes it must be told."""

    call: Callable[[Path], object]
    peer: int
    dead: str
    missing: str
    prepare: Callable[[], object] = lambda: None
    """What both ranks do first."""


def of_the_agree_family(
    name: str,
    call: Callable[[Path], object],
    peer: int,
    prepare: Callable[[], object] = lambda: None,
) -> Case:
    return Case(
        call,
        peer,
        dead=rf"PeerError: .*Rank {peer} \(process \d+ on .*\) has ended without a word",
        missing=rf"GroupError: .*rank {peer} did not reach {re.escape(name)} \(\S+:\d+\) within "
        rf"{SHORT} s\. Last seen: rank {peer}: barrier \(test_every_wait_ends\.py:\d+\), call \d\.",
        prepare=prepare,
    )


def of_torch(call: Callable[[Path], object], prepare: Callable[[], object] = lambda: None) -> Case:
    return Case(
        call,
        peer=1,
        dead=r"(RuntimeError|Dist\w+Error): .*(closed by peer|reset by peer|Broken pipe)",
        missing=r"(RuntimeError|Dist\w+Error): .*[Tt]im(ed )?out",
        prepare=prepare,
    )


def enter_rank0_first() -> None:
    with rank0_first():
        pass


class Step:
    """One training step of plain DistributedDataParallel, whose first one has gone well."""

    model: nn.Module

    def prepare(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        self.backward()

    def backward(self) -> None:
        self.model(torch.ones(3, 2)).sum().backward()


step = Step()


class OwnStep(Step):
    """The same with a model of `ddp()`."""

    def prepare(self) -> None:
        self.model = ddp(nn.Linear(2, 1))
        self.backward()


own_step = OwnStep()


class Windows:
    """Windows of batches whose size the ranks compare before the first one."""

    model: nn.Module

    def prepare(self) -> None:
        self.model = ddp(nn.Linear(2, 1))

    def begin(self) -> Iterator[tuple[int, MicroBatch]]:
        return accumulate(self.model, [1], every=1)


windows = Windows()


class Parts:
    """A pass over data that ranks have parts of, so that they have to agree on its end."""

    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    loader: ShardedLoader[int]

    def prepare(self) -> None:
        self.loader = sharded_loader(self.Numbers(), shard=False)

    def go_through(self) -> None:
        for _ in self.loader:
            pass


parts = Parts()

CASES = {
    "barrier": of_the_agree_family("barrier", lambda _: barrier(), 1),
    "on_rank0": of_the_agree_family("on_rank0", lambda _: on_rank0(int), 0),
    "rank0_first": of_the_agree_family("rank0_first", lambda _: enter_rank0_first(), 0),
    "broadcast_value": of_the_agree_family("broadcast_value", lambda _: broadcast_value(1), 0),
    "any_rank": of_the_agree_family("any_rank", lambda _: any_rank(True), 1),
    "all_ranks": of_the_agree_family("all_ranks", lambda _: all_ranks(True), 1),
    "rank0_save": of_the_agree_family(
        "rank0_save", lambda folder: rank0_save({}, folder / "saved.pt"), 0
    ),
    "SaveHandle.wait": of_the_agree_family(
        "SaveHandle.wait", lambda folder: SaveHandle(str(folder)).wait(), 0
    ),
    "latest_checkpoint": of_the_agree_family("latest_checkpoint", latest_checkpoint, 0),
    "barrier_load": of_the_agree_family(
        "barrier_load", lambda folder: barrier_load(folder / "there.pt"), 1
    ),
    "ddp": of_the_agree_family("ddp", lambda _: ddp(nn.Linear(2, 1)), 1),
    "sharded_loader": of_the_agree_family(
        "sharded_loader",
        lambda _: sharded_loader(TensorDataset(torch.ones(4, 1)), batch_size=1),
        1,
    ),
    "run_all inside a rank": of_the_agree_family(
        "run_all", lambda _: distributed(int).run_all(), 1
    ),
    "gather": of_the_agree_family("gather", lambda _: gather(1), 1),
    "gather_cat": of_the_agree_family("gather_cat", lambda _: gather_cat(torch.ones(2)), 1),
    "accumulate": of_the_agree_family(
        "accumulate", lambda _: next(windows.begin()), 1, windows.prepare
    ),
    "assert_replicas_equal": of_the_agree_family(
        "assert_replicas_equal", lambda _: assert_replicas_equal(nn.Linear(2, 1)), 1
    ),
    "stop_requested": of_the_agree_family("stop_requested", lambda _: stop_requested(), 1),
    "stop_requested, later": of_torch(lambda _: stop_requested(), stop_requested),
    "loss_weight": of_torch(lambda _: loss_weight(3)),
    "reduce_sum": of_torch(lambda _: reduce_sum(1)),
    "reduce_mean": of_torch(lambda _: reduce_mean(1.0)),
    "pass over parts": of_torch(lambda _: parts.go_through(), parts.prepare),
    "backward": of_torch(lambda _: step.backward(), step.prepare),
    "backward of ddp()": of_torch(lambda _: own_step.backward(), own_step.prepare),
}
OFTEN = ("barrier", "on_rank0", "rank0_save", "ddp", "gather", "reduce_sum", "backward of ddp()")
"""Those whose second of waiting for nobody is spent in each check; the others' in the drills."""
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save({}, tmp_path / "there.pt")
    return tmp_path


def survive(call: Callable[[], object], folder: Path) -> None:
    """Make a call that must raise, and say in a file what it raised."""
    text = "nothing was raised"
    try:
        call()
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
    (folder / "unfinished").write_text(text)
    (folder / "unfinished").rename(folder / "seen")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stay_away(folder: Path) -> None:
    """Live on, elsewhere, until the other rank has seen that this one does not come."""
    wait_for(folder / "seen")


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def run_with_a_death(function: Callable[[], object], folder: Path) -> str:
    """Run two ranks of which one is killed, and return what the other one saw."""

    def rank() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        function()
        os._exit(0)  # what is left of the group is not the subject here

    started = time.monotonic()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        run_ranks(rank, init_group=False, shutdown_grace=PATIENCE)
    assert time.monotonic() - started < PATIENCE
    return (folder / "seen").read_text()


@contextmanager
def patient_rendezvous() -> Iterator[None]:
    """Let ranks come late to a group of a short time-out, because the machine may be busy."""
    in_time = rendezvous.await_members

    def patiently(
        channel: Channel, place: Topology, deadline: float, *rest: Any, **more: Any
    ) -> None:
        in_time(channel, place, deadline + PATIENCE, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "await_members", patiently)
        yield


# --------------------------------------------------------------------------- within an open group


@each_case
def test_a_dead_peer_ends_the_call_with_the_cause(case: Case, folder: Path) -> None:
    def function() -> None:
        with process_group(timeout=LONG, device="cpu"):
            case.prepare()
            barrier()
            if get_rank() == case.peer:
                die()
            survive(lambda: case.call(folder), folder)

    assert re.search(case.dead, run_with_a_death(function, folder), re.DOTALL)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in OFTEN else pytest.mark.drill)
        for name, case in CASES.items()
    ],
)
def test_a_missing_peer_ends_the_call_within_the_time_out_of_the_group(
    case: Case, folder: Path
) -> None:
    def function() -> None:
        with patient_rendezvous(), process_group(timeout=SHORT, device="cpu"):
            case.prepare()
            barrier()
            if get_rank() == case.peer:
                stay_away(folder)
            else:
                survive(lambda: case.call(folder), folder)

    run_ranks(function, init_group=False)
    assert re.search(case.missing, (folder / "seen").read_text(), re.DOTALL)


def test_a_rank_0_that_dies_at_its_work_ends_the_wait_of_the_others(folder: Path) -> None:
    def block() -> None:
        with rank0_first():
            (folder / "working").touch()
            time.sleep(0.2)  # so that the other rank has seen it begin
            die()

    def function() -> None:
        with process_group(timeout=LONG, device="cpu"):
            if get_rank() == 1:
                wait_for(folder / "working")
            survive(block, folder)

    seen = run_with_a_death(function, folder)
    assert re.search(r"PeerError: .*Rank 0 \(process \d+ on .*\) has ended without a word", seen)


# --------------------------------------------------------------------------------- entering a group


@needs_fork
def test_a_peer_that_died_when_it_had_joined_ends_the_entering(folder: Path) -> None:
    def die_here(*args: object, **options: object) -> None:
        (folder / "dying").touch()
        die()

    def function() -> None:
        if os.environ["RANK"] == "1":
            rendezvous.await_members = die_here
        else:
            wait_for(folder / "dying")
            time.sleep(0.1)
        survive(process_group(timeout=LONG, device="cpu").__enter__, folder)

    seen = run_with_a_death(function, folder)
    assert re.search(r"PeerError: .*Rank 1 \(process \d+ on .*\) has ended without a word", seen)


def test_a_peer_that_dies_while_a_third_is_awaited_ends_the_entering(folder: Path) -> None:
    def die_here(*args: object, **options: object) -> None:
        time.sleep(0.2)
        die()

    def function() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank = os.environ["RANK"]
        if rank == "1":
            rendezvous.await_members = die_here
        if rank == "2":
            stay_away(folder)
        else:
            survive(process_group(timeout=LONG, device="cpu").__enter__, folder)
        os._exit(0)

    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        run_ranks(function, 3, init_group=False, shutdown_grace=PATIENCE)
    seen = (folder / "seen").read_text()
    assert re.search(r"PeerError: .*Rank 1 \(process \d+ on .*\) has ended without a word", seen)


def test_a_missing_peer_ends_the_entering_within_the_time_out(folder: Path) -> None:
    def function() -> None:
        if os.environ["RANK"] == "1":
            stay_away(folder)
        else:
            survive(process_group(timeout=SHORT, device="cpu").__enter__, folder)

    run_ranks(function, init_group=False)
    assert "GroupError: [rank 0/2] rank 1 did not join within" in (folder / "seen").read_text()


# --------------------------------------------------------------------------------- under a launcher


def by_hand(function: Callable[[], object]) -> Callable[[], None]:
    """Set the variables by hand; a rank 0 that serves the store then ends sooner than it would."""

    def rank() -> None:
        rendezvous.LAST_WORDS_BOUND = 0.1
        function()

    return with_hand_set_variables(rank)


def run_all_under_a_launcher(job: Callable[[], Any], folder: Path, timeout: float) -> None:
    launched = distributed(job, timeout=timeout, device="cpu")
    with patient_rendezvous():
        survive(launched.run_all, folder)


def test_a_dead_peer_ends_run_all_under_a_launcher(folder: Path) -> None:
    def job() -> None:
        barrier()
        if get_rank() == 1:
            die()

    function = by_hand(lambda: run_all_under_a_launcher(job, folder, LONG))
    seen = run_with_a_death(function, folder)
    assert re.search(r"PeerError: .*Rank 1 \(process \d+ on .*\) has ended without a word", seen)


def test_a_missing_peer_ends_run_all_under_a_launcher(folder: Path) -> None:
    def job() -> None:
        barrier()
        if get_rank() == 1:
            stay_away(folder)
            os._exit(0)

    function = by_hand(lambda: run_all_under_a_launcher(job, folder, SHORT))
    with pytest.raises(WorkerError, match=r"rank 1/2\] ended with exit code 0 without returning"):
        run_ranks(function, init_group=False)
    seen = (folder / "seen").read_text()
    assert re.search(rf"GroupError: .*rank 1 did not reach run_all \(\S+\) within {SHORT} s", seen)


@pytest.mark.parametrize("name", ["barrier", "rank0_first"])
def test_a_dead_rank_0_that_served_the_store_ends_the_call(name: str, folder: Path) -> None:
    def function() -> None:
        with process_group(timeout=LONG, device="cpu"):
            barrier()
            if get_rank() == 0:
                wait_for(folder / "ready")  # what it has not read is lost with the store
                die()
            (folder / "ready").touch()
            survive(lambda: CASES[name].call(folder), folder)

    seen = run_with_a_death(by_hand(function), folder)
    assert re.search(r"The store that the ranks talk through has gone.*or rank 0\) has ended", seen)
