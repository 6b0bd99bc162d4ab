"""Several machines: torchrun, and variables set by hand, over hosts that share only a network."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddpkit.links import LOST_AFTER
from tests.launcher.counting import (
    PROGRAM,
    attempts_in,
    await_step,
    check_complete,
    check_repeated,
    read_notes,
)
from tests.launcher.counting_program import STEPS, main, read_options
from tests.launcher.hosts import PORT, Hosts, Program, opened_hosts

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(240)]

WAITING = str(Path(__file__).with_name("waiting_program.py"))
EPOCHS = 2
SOON_OVER = "last_call_timeout=1,keep_alive_interval=1"
# A dead link is noticed after LOST_AFTER seconds; what is left is for a busy machine.
SOON = LOST_AFTER + 15


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    with opened_hosts(tmp_path, 2) as hosts:
        yield hosts


def start_torchrun(
    hosts: Hosts, *arguments: str, options: tuple[str, ...] = (), **environment: str
) -> list[Program]:
    """Start the counting program on all hosts, by torchrun with its own rendezvous."""
    first = hosts.all[0]
    return [
        hosts.start(
            host,
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts.count)),
            *("--nproc-per-node", "1", "--monitor-interval", "0.1", "--local-addr", host.address),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{PORT}"),
            # Where its name stands for loopback, the first host does not know that it is meant.
            *("--rdzv-id", "counting", "--rdzv-conf", f"{SOON_OVER},is_host={host is first:d}"),
            *("--log-dir", str(hosts.folder / f"logs-{host.name}"), *options),
            *(PROGRAM, str(hosts.folder), *arguments),
            **environment,
        )
        for host in hosts.all
    ]


def start_static(hosts: Hosts, *arguments: str) -> list[Program]:
    """Start the counting program on all hosts, by torchrun, which is told who is which."""
    first = hosts.all[0]
    return [
        hosts.start(
            host,
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts.count)),
            *("--nproc-per-node", "1", "--monitor-interval", "0.1"),
            *("--node-rank", str(host.number), "--master-addr", first.address),
            *("--master-port", str(PORT), "--log-dir", str(hosts.folder / f"logs-{host.name}")),
            *(PROGRAM, str(hosts.folder), *arguments),
        )
        for host in hosts.all
    ]


def start_by_hand(hosts: Hosts, *arguments: str, program: str = PROGRAM) -> list[Program]:
    """Start a program on all hosts, without a launcher."""
    return [
        hosts.start(
            host,
            *(sys.executable, program, str(hosts.folder), *arguments),
            RANK=str(host.number),
            WORLD_SIZE=str(hosts.count),
            MASTER_ADDR=hosts.all[0].address,
            MASTER_PORT=str(PORT),
        )
        for host in hosts.all
    ]


WAYS = {"torchrun": start_torchrun, "static": start_static, "by hand": start_by_hand}


def final(folder: Path) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = torch.load(folder / "final.pt")
    return parameters


def check_same_as_on_one_machine(folder: Path, world_size: int, reference: Path) -> None:
    """Check that a training ended as one with as many ranks on this machine does, bit for bit."""
    reference.mkdir()
    folder_and_options = read_options([str(reference), "--epochs", str(EPOCHS)])
    steps = main.with_options(nproc_per_node=world_size)(*folder_and_options)
    assert steps == EPOCHS * STEPS
    ours, theirs = final(folder), final(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --------------------------------------------------------------------------------------- training


def test_two_hosts_train_as_two_ranks_of_one_machine_do(
    two: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for program in start_by_hand(two, "--epochs", str(EPOCHS)):
        program.succeed()
    notes = read_notes(two.folder)
    assert {(seen.host, seen.rank) for seen in notes} == {("host-0", 0), ("host-1", 1)}
    check_complete(notes, EPOCHS)
    check_same_as_on_one_machine(two.folder, 2, tmp_path_factory.mktemp("here") / "reference")


@pytest.mark.drill
def test_three_hosts(tmp_path: Path) -> None:
    with opened_hosts(tmp_path, 3) as three:
        # A global batch has to be divisible by the number of ranks.
        for program in start_torchrun(three, "--epochs", "1", "--global-batch", "9"):
            program.succeed()
    notes = read_notes(tmp_path)
    assert {seen.host for seen in notes} == {"host-0", "host-1", "host-2"}
    assert {len(seen.samples) for seen in notes[:30]} == {3}


@pytest.mark.drill
@pytest.mark.parametrize(("way", "own_name"), [("torchrun", "loopback"), ("by hand", "nothing")])
def test_a_host_whose_own_name_leads_nowhere(tmp_path: Path, way: str, own_name: str) -> None:
    """gloo looks its own name up, and would tell the others an address that is theirs."""
    with opened_hosts(tmp_path, 2, own_name) as hosts:
        for program in WAYS[way](hosts, "--epochs", "1"):
            program.succeed()
    check_complete(read_notes(tmp_path), 1)


# --------------------------------------------------------------------------------------- failures


@pytest.mark.drill
def test_a_killed_rank_is_started_again_and_the_epoch_goes_on(
    two: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = ("--max-restarts", "1")
    wrong = ("--how", "kill", "--at-step", "8", "--by-rank", "1", "--save-every", "3")
    for program in start_torchrun(two, "--epochs", str(EPOCHS), *wrong, options=options):
        program.succeed()
    notes = read_notes(two.folder)
    first, second = attempts_in(notes)
    assert max(seen.step for seen in first) >= 7
    assert second[0].first_step == 6  # the last that was saved
    assert {seen.step for seen in second} == set(range(6, EPOCHS * STEPS))
    check_complete(notes, EPOCHS)
    check_repeated(notes)
    check_same_as_on_one_machine(two.folder, 2, tmp_path_factory.mktemp("here") / "reference")


@pytest.mark.drill
def test_the_cause_is_in_the_reports_of_both_hosts(two: Hosts) -> None:
    wrong = ("--how", "raise", "--at-step", "4", "--by-rank", "1")
    here, there = (program.fail() for program in start_torchrun(two, *wrong))
    assert "KeyError: 'the cause'" in there[there.index("Root Cause") :]
    assert "KeyError: 'the cause'" in here[here.index("Root Cause") :]


@pytest.mark.drill
def test_a_host_that_is_killed_ends_the_other_with_the_cause(two: Hosts) -> None:
    here, there = start_training(two, "by hand")
    killed = time.monotonic()
    two.kill(two.all[1])
    text = here.fail()
    assert time.monotonic() - killed < SOON
    assert there.wait(5) != 0
    assert "10.77.0.2" in text or "Rank 1" in text


@pytest.mark.drill
@pytest.mark.parametrize("way", ["by hand", "static"])
def test_a_host_that_is_cut_off_ends_both_with_the_cause(two: Hosts, way: str) -> None:
    here, there = start_training(two, way)
    cut = time.monotonic()
    two.cut_off(two.all[1])
    texts = [program.fail() for program in (here, there)]
    assert time.monotonic() - cut < SOON
    for text, lost in zip(texts, reversed(two.all), strict=True):
        assert lost.address in text
        assert "timed out" in text or "No route to host" in text


@pytest.mark.drill
def test_a_host_that_is_cut_off_ends_a_rank_that_waits_at_a_barrier(two: Hosts) -> None:
    """No collective is waiting, so nothing but the connections and the silence tells of it."""
    waits, sleeps = start_by_hand(two, program=WAITING)
    await_file(two.folder / "asleep")
    cut = time.monotonic()
    two.cut_off(two.all[1])
    text = waits.fail()
    assert time.monotonic() - cut < SOON + 5
    assert "Rank 1 (process" in text
    assert "its machine cannot be reached" in text
    sleeps.fail()


@pytest.mark.drill
def test_an_outage_that_is_over_soon_is_survived(two: Hosts) -> None:
    programs = start_training(two, "by hand", "--epochs", "6", "--pause", "0.02")
    two.cut_off(two.all[1])
    time.sleep(3)
    two.join_again(two.all[1])
    for program in programs:
        program.succeed()
    check_complete(read_notes(two.folder), 6)


def start_training(hosts: Hosts, way: str, *arguments: str) -> list[Program]:
    """Start a training that would go on for minutes, and wait until it is on its way."""
    endless = arguments or ("--epochs", "300", "--pause", "0.05")
    programs = WAYS[way](hosts, *endless)
    await_step(hosts.folder, 3, hosts.count)
    return programs


def await_file(file: Path, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} has not come in {timeout} s"
        time.sleep(0.02)
