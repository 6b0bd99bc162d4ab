"""Checkpoints when things go wrong around them: killed writers, full disks, damaged files.

Failures are injected from outside (signals, limits, mounts, files), so that they hold for whatever
the package looks like inside. What is on disk afterwards must be one of the saves, whole, and which
one it is can be read from every byte of it.
"""

import ctypes
import itertools
import json
import os
import pickle
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from ddpkit import barrier_load, get_rank, is_rank0, rank0_save
from ddpkit.errors import CheckpointError, WorkerError
from ddpkit.testing import run_ranks

ROOT = Path(__file__).parents[2]
KILLS = 200
SAVES_EACH = 30
LOADS = 100
PAGE = 4096

# From <linux/sched.h> and <sys/mount.h>; Python has unshare() from 3.12 on, and never mount().
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x4000, 0x40000


# ---------------------------------------------------------------------------------- numbered saves


def state_of(number: int, floats: int = 20_000) -> dict[str, Any]:
    return {"number": number, "tensors": [torch.full((floats,), float(number)) for _ in range(4)]}


def number_of(state: dict[str, Any]) -> int:
    """Tell which save a state is, after a look at every value of it."""
    number = state["number"]
    assert isinstance(number, int)
    assert len(state["tensors"]) == 4
    assert all(bool((tensor == number).all()) for tensor in state["tensors"]), "torn"
    return number


def number_in(path: Path) -> int:
    return number_of(torch.load(path))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------------------- inside ranks


def check_group_works() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def refusal(action: Callable[[], object]) -> tuple[str, str]:
    """Return message and cause of the error that an action must raise, with a group that works."""
    with pytest.raises(CheckpointError) as caught:
        action()
    check_group_works()
    return str(caught.value), repr(caught.value.__cause__)


def outcome_of(load: Callable[[], dict[str, Any]]) -> tuple[object, str]:
    """Return the save that a load gives, or the error that it raises, with the cause."""
    try:
        state = load()
    except Exception as error:  # noqa: BLE001  # torch raises anything for a damaged file
        return f"{type(error).__name__}: {error}", repr(error.__cause__)
    try:
        return number_of(state), ""
    except AssertionError:
        return "torn", ""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def before_sync(of: Callable[[int], bool], action: Callable[[], object]) -> None:
    """From now on do something just before this process syncs a file, or a folder, to disk."""
    original = os.fsync

    def act_and_sync(descriptor: int) -> None:
        if of(os.fstat(descriptor).st_mode):
            action()
        original(descriptor)

    os.fsync = act_and_sync  # type: ignore[assignment]


# ---------------------------------------------------------------------------------- own programs


def run_program(call: str, folder: Path) -> Any:
    """Run a function of this file in a program of its own, which has no threads and may fork."""
    code = (
        "import json, pathlib, sys; from tests.multiproc import test_checkpoint_drills as drills; "
        f"print(json.dumps(drills.{call}(pathlib.Path(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fork(function: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  # nothing may run on into the parent's code
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return pid


def exit_code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_writers(folder: Path) -> list[tuple[int, int, int]]:
    """Kill one writer after another; return the reported and the found save, and what was left."""
    torch.set_num_threads(1)
    target, chance, tries = folder / "x.pt", random.Random(0), 10
    started = time.monotonic()
    for number in range(tries):
        rank0_save(state_of(number), target)
    usual = (time.monotonic() - started) / tries
    found, records = tries - 1, []
    for _ in range(KILLS):
        reported = kill_writer(target, found, chance.uniform(0, 3 * usual))
        found = number_in(target)
        records.append((reported, found, len(names_in(folder)) - 1))
    rank0_save(state_of(found + 1), target)
    return records


def kill_writer(target: Path, last: int, after: float) -> int:
    """Kill a fork that saves one number after another; return the last that it reported."""
    reading, writing = os.pipe()

    def save_for_ever() -> None:
        os.write(writing, b"%d\n" % last)
        for number in itertools.count(last + 1):
            rank0_save(state_of(number), target)
            os.write(writing, b"%d\n" % number)

    pid = fork(save_for_ever)
    os.close(writing)
    first = os.read(reading, 1)  # it has begun
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    assert exit_code_of(pid) == -signal.SIGKILL
    with open(reading, "rb") as pipe:  # noqa: PTH123  # a descriptor has no Path
        return int((first + pipe.read()).split()[-1])


def write_at_once(folder: Path) -> list[int]:
    """Read what two writers save to one path, until they have ended; return the saves seen."""
    torch.set_num_threads(1)
    target = folder / "x.pt"
    rank0_save(state_of(0), target)

    def save(writer: int) -> None:
        for number in range(1, SAVES_EACH + 1):
            rank0_save(state_of(1000 * writer + number), target)

    writers = [fork(lambda writer=writer: save(writer)) for writer in (1, 2)]  # type: ignore[misc]
    seen = [number_in(target)]
    while any(
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in writers
    ):
        seen.append(number_in(target))
    assert [exit_code_of(pid) for pid in writers] == [0, 0]
    return [*seen, number_in(target)]


def load_meanwhile(folder: Path) -> list[list[tuple[object, str]]]:
    """Load on two ranks what another program saves in a loop; return the outcomes of each rank."""
    torch.set_num_threads(1)
    target = folder / "x.pt"
    rank0_save(state_of(0), target)

    def save_for_ever() -> None:
        for number in itertools.count(1):
            rank0_save(state_of(number), target)

    def load() -> list[tuple[object, str]]:
        outcomes = []
        for _ in range(LOADS):
            outcomes.append(outcome_of(lambda: barrier_load(target)))
            check_group_works()
        return outcomes

    pid = fork(save_for_ever)
    try:
        return run_ranks(load)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ---------------------------------------------------------------------------------- killed writers


@pytest.mark.drill
@pytest.mark.timeout(180)
def test_a_program_killed_at_any_time_leaves_the_last_save_that_it_reported_or_the_next(
    tmp_path: Path,
) -> None:
    records = run_program("kill_writers", tmp_path)
    assert len(records) == KILLS
    assert [record for record in records if record[1] - record[0] not in (0, 1)] == []
    assert max(left for _, _, left in records) == 1, "each save sweeps what the last writer left"
    assert sum(left for _, _, left in records) > KILLS // 20, "hardly any kill hit a save"
    assert number_in(tmp_path / "x.pt") == records[-1][1] + 1
    assert names_in(tmp_path) == ["x.pt"]


@pytest.mark.drill
@pytest.mark.timeout(180)
def test_two_programs_that_save_to_one_path_never_tear_it(tmp_path: Path) -> None:
    seen = run_program("write_at_once", tmp_path)
    for writer in (1, 2):
        numbers = [number for number in seen if number // 1000 == writer]
        assert numbers == sorted(numbers), "an older save came back"
        assert numbers
    assert seen[-1] % 1000 == SAVES_EACH
    assert names_in(tmp_path) == ["x.pt"]


@pytest.mark.drill
@pytest.mark.timeout(180)
def test_ranks_that_load_what_another_program_is_saving_get_the_same_whole_save(
    tmp_path: Path,
) -> None:
    first, second = run_program("load_meanwhile", tmp_path)
    assert first == second
    numbers = [told for told, _ in first if isinstance(told, int)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 1, "nothing was saved meanwhile"
    errors = [told for told, _ in first if not isinstance(told, int)]
    assert [told for told in errors if "was changed while it was being loaded" not in told] == []


@pytest.mark.parametrize(
    ("ranks", "rank", "moment"),
    [
        # Of 0 ranks: a program without a group.
        (0, 0, "mapped"),
        (0, 0, "loaded"),
        (1, 0, "mapped"),
        (1, 0, "loaded"),
        (2, 0, "mapped"),
        (2, 0, "loaded"),
        (2, 1, "mapped"),
        (2, 1, "loaded"),
    ],
)
def test_a_file_that_is_replaced_while_it_is_loaded_gives_one_whole_save_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, rank: int, moment: str
) -> None:
    target, follower = tmp_path / "x.pt", tmp_path / "next.pt"
    torch.save(state_of(1), target)
    torch.save(state_of(2), follower)
    load, make_mapped = torch.load, torch.UntypedStorage.from_file

    def replace_file(now: str) -> None:
        if now == moment and get_rank() == rank and follower.exists():
            follower.replace(target)

    def load_then_replace(*args: Any, **options: Any) -> Any:
        value = load(*args, **options)
        replace_file("loaded")
        return value

    def replace_then_map(*args: Any, **options: Any) -> Any:
        # torch has read the structure by now, and opens the file once more by its name.
        replace_file("mapped")
        return make_mapped(*args, **options)

    def use() -> tuple[object, str]:
        outcome = outcome_of(lambda: barrier_load(target))
        if ranks:
            check_group_works()
        return outcome

    monkeypatch.setattr(torch, "load", load_then_replace)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", staticmethod(replace_then_map))
    outcomes = run_ranks(use, ranks) if ranks else [use()]
    assert len(set(outcomes)) == 1
    told = outcomes[0][0]
    assert told in (1, 2) or str(told).startswith("CheckpointError: ")


class KillsInStateDict:
    def state_dict(self) -> dict[str, int]:
        die()


@pytest.mark.parametrize(
    ("stage", "survivor"), [("state", 1), ("file sync", 1), ("folder sync", 2)]
)
def test_rank_0_killed_in_a_save_ends_the_launch_and_leaves_a_whole_file(
    tmp_path: Path, stage: str, survivor: int
) -> None:
    target = tmp_path / "x.pt"
    rank0_save(state_of(1), target)

    def use() -> None:
        if is_rank0() and stage != "state":
            before_sync(stat.S_ISREG if stage == "file sync" else stat.S_ISDIR, die)
        more = KillsInStateDict() if stage == "state" else None
        rank0_save({**state_of(2), "more": more}, target)

    # If rank 1 waited for a time-out, it would be that of this test.
    with pytest.raises(WorkerError) as caught:
        run_ranks(use, timeout=600)
    assert (caught.value.rank, caught.value.signal_name) == (0, "SIGKILL")
    assert number_in(target) == survivor
    rank0_save(state_of(3), target)
    assert number_in(target) == 3
    assert names_in(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("rest", [0.0, 5.0], ids=["ends at once", "goes on"])
def test_rank_1_killed_while_rank_0_saves_leaves_a_whole_file(tmp_path: Path, rest: float) -> None:
    target = tmp_path / "x.pt"
    rank0_save(state_of(1), target)

    def use() -> None:
        pids: list[Any] = [None, None]
        dist.all_gather_object(pids, os.getpid())

        def kill_the_other() -> None:
            os.kill(pids[1], signal.SIGKILL)
            time.sleep(rest)

        if is_rank0():
            before_sync(stat.S_ISREG, kill_the_other)
        rank0_save(state_of(2), target)
        dist.barrier()

    with pytest.raises(WorkerError) as caught:
        run_ranks(use, timeout=600)
    assert (caught.value.rank, caught.value.signal_name) == (1, "SIGKILL")
    assert number_in(target) in (1, 2)
    rank0_save(state_of(3), target)
    assert number_in(target) == 3
    assert names_in(tmp_path) == ["x.pt"]


def test_a_save_that_is_interrupted_leaves_nothing_beside_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x.pt"
    rank0_save(state_of(1), target)
    monkeypatch.setattr(os, "fsync", os.fsync)  # to have the original back afterwards
    before_sync(stat.S_ISREG, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        rank0_save(state_of(2), target)
    assert number_in(target) == 1
    assert names_in(tmp_path) == ["x.pt"]


# ---------------------------------------------------------------------------------- system errors


def test_what_is_moved_into_place_is_on_disk_and_the_move_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x.pt"
    rank0_save(state_of(1), target)
    synced = []

    def note(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size, number_in(target)))

    monkeypatch.setattr(os, "fsync", note)
    rank0_save(state_of(2), target)
    first, last = synced[0], synced[-1]
    assert first == (target.stat().st_ino, target.stat().st_size, 1), "complete, and not moved yet"
    assert last[0] == tmp_path.stat().st_ino
    assert last[2] == 2, "moved before the folder was synced"


def test_a_limit_of_the_size_of_files_is_everybodys_error_wherever_it_strikes(
    tmp_path: Path,
) -> None:
    target, probe = tmp_path / "x.pt", tmp_path / "probe.pt"
    rank0_save(state_of(1, 3000), target)
    rank0_save(state_of(1, 3000), probe)
    size = probe.stat().st_size
    probe.unlink()

    def save_with_limit(limit: int, number: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if is_rank0():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            rank0_save(state_of(number, 3000), target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def use() -> list[tuple[str, str]]:
        errors = []
        for limit in (0, 1, *range(4096, size, 4096), size - 1):
            errors.append(refusal(lambda limit=limit: save_with_limit(limit, 2)))  # type: ignore[misc]
            if is_rank0():  # rank 1 would see the next save at work
                assert number_in(target) == 1
                assert names_in(tmp_path) == ["x.pt"]
        save_with_limit(size, 3)
        assert number_of(barrier_load(target)) == 3
        return errors

    first, second = run_ranks(use)
    assert first == second
    assert len(first) > 10
    for message, cause in first:
        assert str(target) in message
        assert "File too large" in message
        assert "OSError" in cause


@pytest.mark.parametrize(
    "synced",
    [
        "file",
        "folder",
    ],
)
def test_an_error_of_a_sync_is_everybodys_and_tells_the_truth_about_the_old_file(
    tmp_path: Path, synced: str
) -> None:
    target = tmp_path / "x.pt"
    rank0_save(state_of(1), target)

    def fail() -> None:
        raise OSError(5, "Input/output error")

    def use() -> tuple[str, str]:
        original = os.fsync
        before_sync(stat.S_ISREG if synced == "file" else stat.S_ISDIR, fail)
        error = refusal(lambda: rank0_save(state_of(2), target))
        os.fsync = original
        return error

    first, second = run_ranks(use)
    assert first == second
    assert "Input/output error" in first[0]
    assert names_in(tmp_path) == ["x.pt"]
    assert ("untouched" in first[0]) == (number_in(target) == 1)
    rank0_save(state_of(3), target)
    assert number_in(target) == 3


def limit_files(soft: int) -> int:
    """Set how many files this process may have open; return how many it might before."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return before


def test_no_descriptor_left_on_rank_0_is_everybodys_error_and_on_rank_1_nobodys(
    tmp_path: Path,
) -> None:
    target = tmp_path / "x.pt"
    rank0_save(state_of(1), target)

    def without_descriptors(rank: int, action: Callable[[], Any]) -> Any:
        next_one = os.open(os.devnull, os.O_RDONLY)
        os.close(next_one)
        before = limit_files(next_one) if get_rank() == rank else None
        try:
            return action()
        finally:
            if before is not None:
                limit_files(before)

    def use() -> list[tuple[str, str]]:
        check_group_works()
        errors = [
            refusal(lambda: without_descriptors(0, lambda: rank0_save(state_of(2), target))),
            refusal(lambda: without_descriptors(0, lambda: barrier_load(target))),
        ]
        assert number_of(without_descriptors(1, lambda: barrier_load(target))) == 1
        without_descriptors(1, lambda: rank0_save(state_of(3), target))
        assert number_of(barrier_load(target)) == 3
        return errors

    first, second = run_ranks(use)
    assert first == second
    for message, _ in first:
        assert "Too many open files" in message
        assert str(target) in message
    assert names_in(tmp_path) == ["x.pt"]


def test_what_is_no_file_and_no_folder_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "null"
    os.mkfifo(target)
    with pytest.raises(CheckpointError, match="no ordinary file"):
        rank0_save(state_of(1), target)
    with pytest.raises(CheckpointError, match="no ordinary file"):
        barrier_load(target)
    assert target.is_fifo()


@pytest.fixture
def mountable(tmp_path: Path) -> Path:
    """A folder on which ranks can mount; where they may not, the test is skipped."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here, which takes root: {error}")
    return folder


def mount(folder: Path, flags: int, options: str) -> None:
    call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode())


def mount_privately(folder: Path, options: str) -> None:
    """Mount a small file system that only this thread sees, and that goes away with it."""
    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    mount(folder, 0, options)


def call(name: str, *args: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("full", "No space left on device"),
        ("no more files", "No space left on device"),
        ("read-only", "read-only"),
    ],
)
def test_what_a_file_system_refuses_is_everybodys_error_until_it_is_mended(
    mountable: Path, case: str, told: str
) -> None:
    target = mountable / "x.pt"
    # The inodes: one for the root, one for the file, one for the file that takes its place.
    options = "size=1m,nr_inodes=3"

    def break_it() -> None:
        if case == "no more files":
            (mountable / "other").touch()
        elif case == "read-only":
            mount(mountable, MS_REMOUNT | MS_RDONLY, options)

    def mend_it() -> None:
        if case == "no more files":
            (mountable / "other").unlink()
        elif case == "read-only":
            mount(mountable, MS_REMOUNT, options)

    def use() -> list[tuple[str, str]]:
        if is_rank0():
            mount_privately(mountable, options)
        rank0_save(state_of(1), target)
        if is_rank0():
            break_it()
        big = state_of(2, 100_000 if case == "full" else 20_000)
        errors = [refusal(lambda: rank0_save(big, target)) for _ in range(3)]
        if is_rank0():
            assert number_in(target) == 1
            mend_it()
            assert names_in(mountable) == ["x.pt"]
        rank0_save(state_of(3), target)
        assert number_of(barrier_load(target)) == 3
        return errors

    first, second = run_ranks(use)
    assert first == second
    for message, _ in first:
        assert told in message
        assert str(target) in message
    assert names_in(mountable) == [], "mounted for rank 0 alone"


# ---------------------------------------------------------------------------------- refused objects


class RaisesWhenPickled:
    def __reduce__(self) -> NoReturn:
        raise ZeroDivisionError("in __reduce__")


class HasAState:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.state}


def too_deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


PATH_CLASS = f"{type(Path()).__module__}.PosixPath"  # of Python 3.13: pathlib._local


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (RaisesWhenPickled, "obj['loader']['inner'] is a"),
        (lambda: Path("x"), f"obj['loader']['inner'] is a {PATH_CLASS}: save str(x)"),
        (lambda: iter([1]), "obj['loader']['inner'] is a"),
        (lambda: 2**2100, "obj['loader']['inner'] is a int"),
        (too_deep, "RecursionError"),
    ],
    ids=[
        "raises when pickled",
        "refused by the safe loader",
        "cannot be pickled",
        "huge",
        "too deep",
    ],
)
def test_an_object_that_cannot_be_saved_is_everybodys_error(
    tmp_path: Path, make: Callable[[], object], told: str
) -> None:
    target = tmp_path / "x.pt"
    rank0_save(state_of(1), target)

    def use() -> tuple[str, str]:
        error = refusal(lambda: rank0_save({"loader": HasAState(make())}, target))
        assert number_of(barrier_load(target)) == 1
        return error

    first, second = run_ranks(use)
    assert first == second
    assert told in first[0]
    assert str(target) in first[0]
    assert names_in(tmp_path) == ["x.pt"]


# ---------------------------------------------------------------------------------- damaged files


def whole_file(folder: Path) -> bytes:
    torch.save(state_of(1, 3700), folder / "whole.pt")
    return (folder / "whole.pt").read_bytes()


def load_all(target: Path, files: list[bytes]) -> list[tuple[object, str]]:
    """Load one file after another on every rank."""
    outcomes = []
    for data in files:
        if is_rank0():
            target.write_bytes(data)
        outcomes.append(outcome_of(lambda: barrier_load(target)))
        check_group_works()
    return outcomes


def directory_of(whole: bytes) -> range:
    """Return where the directory of a zip file and what follows it lie."""
    end = whole.rindex(b"PK\x05\x06")
    (start,) = struct.unpack_from("<I", whole, end + 16)
    return range(start, len(whole))


def with_flipped_bytes(whole: bytes, places: range) -> Iterator[bytes]:
    for place in places:
        data = bytearray(whole)
        data[place] ^= 0xFF
        yield bytes(data)


def with_lost_pages(whole: bytes) -> Iterator[bytes]:
    """Yield what a machine may leave that went down before all of a file was on disk."""
    for start in range(0, len(whole), PAGE):
        end = min(start + PAGE, len(whole))
        yield whole[:start] + bytes(end - start) + whole[end:]


def test_damaged_files_are_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    target, whole = tmp_path / "x.pt", whole_file(tmp_path)
    assert len(whole) > 60_000
    chance = random.Random(0)
    files = [whole[:size] for size in (*range(0, len(whole), 1024), len(whole) - 1)]
    files += [chance.randbytes(size) for size in (1, 4, 1000, 60_000)]
    files += [bytes(60_000), b"PK\x03\x04" + chance.randbytes(1000), whole[1000:]]
    first, second = run_ranks(lambda: load_all(target, [*files, whole]))
    assert first == second
    assert first[-1] == (1, "")
    for told, _ in first[:-1]:
        assert str(told).startswith(f"CheckpointError: {target} is not a whole torch.save file")


@pytest.mark.drill
@pytest.mark.timeout(180)
def test_a_flipped_byte_in_the_directory_has_the_same_outcome_on_all_ranks(tmp_path: Path) -> None:
    target, whole = tmp_path / "x.pt", whole_file(tmp_path)
    files = list(with_flipped_bytes(whole, directory_of(whole)))
    first, second = run_ranks(lambda: load_all(target, files))
    assert first == second
    errors = [told for told, _ in first if isinstance(told, str) and told != "torn"]
    assert all(told.startswith("CheckpointError: ") and str(target) in told for told in errors)
    # Some bytes (dates, versions) say nothing about the contents.
    assert 0 < len(errors) < len(files)


@pytest.mark.parametrize("damage", ["flipped byte", "lost page"])
def test_damage_that_torch_load_refuses_is_never_loaded(tmp_path: Path, damage: str) -> None:
    target, whole = tmp_path / "x.pt", whole_file(tmp_path)
    flipped = damage == "flipped byte"
    files = with_flipped_bytes(whole, directory_of(whole)) if flipped else with_lost_pages(whole)
    wrong = []
    for index, data in enumerate(files):
        target.write_bytes(data)
        told, _ = outcome_of(lambda: barrier_load(target))
        if told == "torn" and outcome_of(lambda: torch.load(target))[0] != "torn":
            wrong.append(index)
    assert wrong == []


def test_a_lost_page_never_gives_other_contents_where_checksums_are_computed(
    tmp_path: Path,
) -> None:
    target, whole = tmp_path / "x.pt", whole_file(tmp_path)
    wrong = []
    for index, data in enumerate(with_lost_pages(whole)):
        target.write_bytes(data)
        if outcome_of(lambda: barrier_load(target, verify=True))[0] == "torn":
            wrong.append(index)
    assert wrong == []


# ---------------------------------------------------------------------------------- trapped files


class Trap:
    """Its pickle makes a folder wherever it is loaded without care."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("seen_by", ["rank 0", "both"])
def test_a_file_that_would_run_code_is_refused_on_all_ranks_and_runs_nothing(
    tmp_path: Path, seen_by: str
) -> None:
    folders = [tmp_path / "0", tmp_path / ("0" if seen_by == "both" else "1")]
    for folder in set(folders):
        folder.mkdir()
    trap, made = {"model": Trap(tmp_path / "made"), "number": 1}, tmp_path / "made"
    torch.save(trap, folders[0] / "zip.pt")
    torch.save(trap, folders[0] / "old.pt", _use_new_zipfile_serialization=False)
    (folders[0] / "pickle.pt").write_bytes(pickle.dumps(trap, protocol=2))

    def use() -> list[tuple[str, str]]:
        os.chdir(folders[get_rank()])
        names = ("zip.pt", "old.pt", "pickle.pt")
        into = {"model": torch.nn.Linear(1, 1)}
        return [
            *(refusal(lambda name=name: barrier_load(name)) for name in names),  # type: ignore[misc]
            *(refusal(lambda name=name: barrier_load(name, into=into)) for name in names),  # type: ignore[misc]
        ]

    first, second = run_ranks(use)
    assert first == second
    assert not made.exists()
    for message, _ in first:
        assert "mkdir" in message
        assert "weights_only" in message


def test_nothing_of_a_trapped_file_that_only_rank_1_has_is_run(tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, value in zip(folders, (state_of(1), Trap(tmp_path / "made")), strict=True):
        folder.mkdir()
        torch.save(value, folder / "x.pt")

    def use() -> list[int]:
        os.chdir(folders[get_rank()])
        return [number_of(barrier_load("x.pt", weights_only=safe)) for safe in (True, False)]

    assert run_ranks(use) == [[1, 1], [1, 1]]
    assert not (tmp_path / "made").exists()


# ---------------------------------------------------------------------------------- other folders


def test_a_relative_path_is_rank_0s_when_saving_and_when_loading(tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(3)]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        if rank != 2:
            torch.save(state_of(10 + rank), folder / "x.pt")

    def use() -> list[int]:
        os.chdir(folders[get_rank()])
        numbers = [number_of(barrier_load("x.pt"))]
        rank0_save(state_of(20), "x.pt")
        numbers.append(number_of(barrier_load("x.pt")))
        check_group_works()
        return numbers

    assert run_ranks(use, 3) == [[10, 20]] * 3
    assert number_in(folders[0] / "x.pt") == 20
    assert number_in(folders[1] / "x.pt") == 11
    assert names_in(folders[2]) == []


@pytest.mark.parametrize(
    "kind",
    [
        "zip",
        "old format",
        "old format, other in the middle",
        "zip, damaged in the middle",
    ],
)
def test_another_file_of_the_same_name_size_and_time_is_not_taken_for_rank_0s(
    tmp_path: Path, kind: str
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    save_look_alikes(folders[0] / "x.pt", folders[1] / "x.pt", kind)
    for folder in folders:
        os.utime(folder / "x.pt", ns=(10**18, 10**18))
    assert len({(folder / "x.pt").stat().st_size for folder in folders}) == 1
    assert len({(folder / "x.pt").read_bytes() for folder in folders}) == 2

    def use() -> Any:
        os.chdir(folders[get_rank()])
        try:
            loaded = barrier_load("x.pt").tolist()
        except CheckpointError as error:  # would be right too, if it is on all ranks
            loaded = str(error)
        check_group_works()
        return loaded

    first, second = run_ranks(use)
    assert first == second


def save_look_alikes(one: Path, other: Path, kind: str) -> None:
    tensor = torch.zeros(100_000)
    torch.save(tensor, one, _use_new_zipfile_serialization=kind.startswith("zip"))
    if kind == "zip":
        tensor[50_000] = 1
        torch.save(tensor, other)
        return
    # The old format holds addresses, so that no second save is sure to have the same size.
    data = bytearray(one.read_bytes())
    data[len(data) // 2 if "middle" in kind else 10_000] ^= 0x40
    other.write_bytes(data)
