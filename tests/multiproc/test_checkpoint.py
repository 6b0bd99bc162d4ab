"""Checkpoints on two ranks: one writer, the same outcome everywhere, whole files."""

import logging
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Optimizers and DDP import it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn

from ddpkit import barrier, checkpoint, durable
from ddpkit.checkpoint import barrier_load, latest_checkpoint, rank0_save
from ddpkit.errors import CheckpointError, GroupError, PeerError, WorkerError
from ddpkit.group import get_rank, is_rank0
from ddpkit.testing import run_ranks
from ddpkit.wrap import ddp


def check_group_works() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def outcome(action: Any) -> tuple[str, str]:
    """Return message and cause of the error that an action must raise, with a group that works."""
    with pytest.raises(CheckpointError) as caught:
        action()
    check_group_works()
    return str(caught.value), repr(caught.value.__cause__)


def test_one_rank_writes_and_all_see_the_whole_file(tmp_path: Path) -> None:
    def use() -> int:
        writes = []
        original = durable.write_whole

        def counted(*args: Any) -> None:
            writes.append(1)
            original(*args)

        vars(checkpoint)["write_whole"] = counted
        for number in range(20):
            rank0_save({"n": number, "rank": get_rank()}, tmp_path / "x.pt")
            assert torch.load(tmp_path / "x.pt") == {"n": number, "rank": 0}
            check_group_works()
        return len(writes)

    assert run_ranks(use) == [20, 0]


def test_a_wrapped_model_goes_through_a_file_and_back(tmp_path: Path) -> None:
    def use() -> None:
        torch.manual_seed(get_rank())
        net: Any = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model = ddp(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        state: dict[str, Any] = {"model": model, "opt": optimizer}
        rank0_save(state, tmp_path / "x.pt")
        assert list(torch.load(tmp_path / "x.pt")["model"]) == list(net.state_dict())
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        momentum = optimizer.state[net[0].weight]["momentum_buffer"].clone()
        for tensor in (*model.parameters(), optimizer.state[net[0].weight]["momentum_buffer"]):
            nn.init.zeros_(tensor)
        loaded = barrier_load(tmp_path / "x.pt", into=state)
        assert loaded["model"] is model
        torch.testing.assert_close(list(model.parameters()), expected, atol=0, rtol=0)
        assert torch.equal(optimizer.state[net[0].weight]["momentum_buffer"], momentum)

    run_ranks(use)


@pytest.mark.drill
def test_a_save_may_take_longer_than_the_time_out_of_collectives(tmp_path: Path) -> None:
    def use() -> None:
        check_group_works()
        original = torch.save

        def slow(*args: Any) -> None:
            time.sleep(3)
            original(*args)

        torch.save = slow  # type: ignore[assignment]
        rank0_save(1, tmp_path / "x.pt")
        check_group_works()

    run_ranks(use, timeout=2.0)
    assert torch.load(tmp_path / "x.pt") == 1


@pytest.mark.parametrize("case", ["folder", "not a folder", "refused", "size limit", "unreadable"])
def test_an_error_on_rank_0_is_everybodys_and_leaves_the_old_file(
    tmp_path: Path, case: str
) -> None:
    target = tmp_path / "x.pt"
    torch.save("old", target)

    def save() -> None:
        if case == "folder":
            rank0_save(1, tmp_path)
        elif case == "not a folder":
            rank0_save(1, target / "y.pt")
        elif case == "refused":
            rank0_save({"f": [lambda: 1]}, target)
        elif case == "size limit":
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
            try:
                rank0_save(torch.zeros(100_000), target)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        else:
            os.open = _refuse  # type: ignore[assignment]  # What a folder without permission does to all but root.
            rank0_save(1, target)

    first, second = run_ranks(lambda: outcome(save))
    assert first == second
    told = {
        "folder": "IsADirectoryError",
        "not a folder": "NotADirectoryError",
        "refused": r"obj['f'][0] is a function",
        "size limit": "File too large",
        "unreadable": "PermissionError",
    }[case]
    assert told in first[0]
    assert str(tmp_path) in first[0]
    assert torch.load(target) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def _refuse(path: object, *_: object) -> int:
    raise PermissionError(13, "Permission denied", str(path))


def _die(*_: object, **__: object) -> None:
    os._exit(9)


def _write_half_and_die(state: object, file: Any) -> None:
    file.write(b"PK" * 5000)
    file.flush()
    os._exit(9)


@pytest.mark.parametrize(
    ("stage", "survivor"),
    [("opened", "old"), ("half", "old"), ("complete", "old"), ("moved", "new")],
)
def test_a_writer_killed_at_any_stage_leaves_a_whole_file(
    tmp_path: Path, stage: str, survivor: str
) -> None:
    target = tmp_path / "x.pt"
    rank0_save("old", target)

    def use() -> None:
        if stage == "opened":
            durable._write_through = _die
        elif stage == "half":
            torch.save = _write_half_and_die  # type: ignore[assignment]
        elif stage == "complete":
            Path.replace = _die  # type: ignore[assignment, method-assign]
        else:
            durable._sync_folder = _die
        rank0_save("new", target)

    with pytest.raises(WorkerError) as caught:
        run_ranks(use)
    assert caught.value.rank == 0
    assert caught.value.exit_code == 9
    assert barrier_load(target) == survivor
    rank0_save("next", target)
    assert barrier_load(target) == "next"
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def varied_state() -> dict[str, Any]:
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "views": [base, base[1:, ::2], base.t()],
        "types": [base.to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex64)],
        "shapes": [torch.tensor(1), torch.ones(0, 3)],
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "model": nn.Sequential(nn.BatchNorm1d(2)).state_dict(),
        "plain": {"n": 3, "name": ("a", None)},
    }


def check_varied(loaded: dict[str, Any]) -> None:
    expected = varied_state()
    assert loaded.pop("plain") == expected.pop("plain")
    assert loaded["model"]._metadata == expected["model"]._metadata
    torch.testing.assert_close(loaded, expected, atol=0, rtol=0)
    assert type(loaded["parameter"]) is nn.Parameter
    loaded["views"][0].zero_()
    assert loaded["views"][1].sum() == 0, "views of one storage must stay views of one"


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize("chunk", [16, 1 << 20])
@pytest.mark.parametrize("elsewhere", ["nothing", "another file", "the same file"])
def test_every_rank_gets_rank_0s_contents(tmp_path: Path, elsewhere: str, chunk: int) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    torch.save(varied_state(), folders[0] / "x.pt")
    if elsewhere == "another file":
        torch.save({**varied_state(), "plain": 0}, folders[1] / "x.pt")
    elif elsewhere == "the same file":
        (folders[1] / "x.pt").symlink_to(folders[0] / "x.pt")

    def use() -> None:
        checkpoint._CHUNK_BYTES = chunk
        os.chdir(folders[get_rank()])
        check_varied(barrier_load("x.pt"))
        net = nn.BatchNorm1d(2)
        nn.init.zeros_(net.weight)
        barrier_load("x.pt", into={"model": nn.Sequential(net)})
        assert torch.equal(net.weight, torch.ones(2))
        check_varied(barrier_load("x.pt", map_location=lambda storage, _: storage))
        check_group_works()

    run_ranks(use)


def test_only_rank_0_looks_whether_there_is_a_file(tmp_path: Path) -> None:
    torch.save(1, tmp_path / "x.pt")

    def use() -> Any:
        if not is_rank0():
            Path.exists = lambda *_, **__: False  # type: ignore[method-assign]
            os.path.exists = lambda path: False
        return barrier_load(tmp_path / "x.pt")

    assert run_ranks(use) == [1, 1]


@pytest.mark.parametrize("case", ["missing", "empty", "cut", "unsafe"])
def test_a_file_that_cannot_be_loaded_raises_the_same_everywhere(tmp_path: Path, case: str) -> None:
    target = tmp_path / "x.pt"
    if case != "missing":
        torch.save(Path("x") if case == "unsafe" else torch.ones(500), target)
    if case in ("empty", "cut"):
        target.write_bytes(target.read_bytes()[: 0 if case == "empty" else 1000])

    def load() -> None:
        barrier_load(target)

    first, second = run_ranks(lambda: outcome(load))
    assert first == second
    assert str(target) in first[0]


def test_a_rank_that_cannot_restore_stops_all(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "x.pt")

    def use() -> tuple[str, str]:
        net = nn.Linear(2, 2 + get_rank())
        return outcome(lambda: barrier_load(tmp_path / "x.pt", into={"model": net}))

    (first, _), (second, cause) = run_ranks(use)
    assert first == second
    assert first.startswith("[rank 1/2] The entry 'model'")
    assert "size mismatch" in first
    assert "RuntimeError" in cause


# ------------------------------------------------------------------------------- in the background


def slow_writes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    original = durable._sync_folder

    def slow(folder: Path) -> None:
        time.sleep(seconds)
        original(folder)

    monkeypatch.setattr(durable, "_sync_folder", slow)


def test_training_goes_on_while_a_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_writes(monkeypatch, 0.5)

    def use() -> tuple[float, float, float]:
        model = nn.Linear(10, 10)
        with torch.no_grad():
            model.weight.fill_(1)
        handle = rank0_save({"model": model}, tmp_path / "x.pt", background=True)
        with torch.no_grad():
            model.weight.fill_(2)  # the next step
        began = time.monotonic()
        check_group_works()
        handle.wait()
        waited = time.monotonic() - began
        loaded = torch.load(tmp_path / "x.pt")["model"]["weight"]
        check_group_works()
        handle.wait()
        return waited, float(loaded.min()), float(loaded.max())

    for waited, least, most in run_ranks(use):
        assert waited > 0.2
        assert (least, most) == (1, 1)


def test_one_save_is_written_at_a_time_and_the_last_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_writes(monkeypatch, 0.1)

    def use() -> list[int]:
        counts = []
        for number in range(4):
            rank0_save({"n": number}, tmp_path / f"x{number}.pt", keep_last=2, background=True)
            names = [thread.name for thread in threading.enumerate()]
            counts.append(names.count("ddpkit-save"))
        return counts

    assert run_ranks(use) == [[1] * 4, [0] * 4]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x2.pt", "x3.pt"]
    assert torch.load(tmp_path / "x3.pt") == {"n": 3}


@pytest.mark.parametrize("surfaces", ["wait", "next save", "latest", "end"])
def test_an_error_in_the_background_is_everybodys_and_comes_once(
    tmp_path: Path, surfaces: str
) -> None:
    (tmp_path / "folder").mkdir()

    def use() -> str:
        handle = rank0_save({"n": 1}, tmp_path / "folder", background=True)
        calls: dict[str, Callable[[], object]] = {
            "wait": handle.wait,
            "next save": lambda: rank0_save({"n": 2}, tmp_path / "x.pt"),
            "latest": lambda: latest_checkpoint(tmp_path),
        }
        if surfaces == "end":
            return "the end"
        with pytest.raises(CheckpointError) as caught:
            calls[surfaces]()
        check_group_works()
        rank0_save({"n": 3}, tmp_path / "x.pt", background=True).wait()
        return str(caught.value)

    if surfaces == "end":
        with pytest.raises(CheckpointError, match="folder"):
            run_ranks(use)
        return
    first, second = run_ranks(use)
    assert first == second
    assert str(tmp_path / "folder") in first
    assert torch.load(tmp_path / "x.pt") == {"n": 3}


@pytest.mark.parametrize("told_by", ["next save", "latest", "load"])
def test_the_handle_of_a_save_that_failed_never_says_that_it_is_on_disk(
    tmp_path: Path, told_by: str
) -> None:
    (tmp_path / "folder").mkdir()

    def use() -> list[str]:
        rank0_save({"n": 0}, tmp_path / "x.pt")
        handle = rank0_save({"n": 1}, tmp_path / "folder", background=True)
        calls: dict[str, Callable[[], object]] = {
            "next save": lambda: rank0_save({"n": 2}, tmp_path / "x.pt"),
            "latest": lambda: latest_checkpoint(tmp_path),
            "load": lambda: barrier_load(tmp_path / "x.pt"),
        }
        texts = [outcome(calls[told_by])[1]]
        rank0_save({"n": 3}, tmp_path / "x.pt", background=True).wait()
        return texts + [outcome(handle.wait)[1] for _ in range(2)]

    for texts in run_ranks(use):
        assert len(set(texts)) == 1
        assert str(tmp_path / "folder") in texts[0]


def test_what_cannot_be_saved_is_told_at_once_also_in_the_background(tmp_path: Path) -> None:
    def use() -> str:
        return outcome(lambda: rank0_save({"f": object()}, tmp_path / "x.pt", background=True))[0]

    first, second = run_ranks(use)
    assert first == second
    assert "['f']" in first
    assert not list(tmp_path.iterdir())


def test_a_load_waits_for_a_save_in_the_background_and_a_new_folder_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()

    def use() -> list[Any]:
        os.chdir(tmp_path)
        rank0_save({"n": 1}, "x.pt")
        if is_rank0():
            slow_writes(monkeypatch, 0.2)
        rank0_save({"n": 2}, "x.pt", background=True)
        os.chdir(tmp_path / "other")
        return [barrier_load(tmp_path / "x.pt"), list((tmp_path / "other").iterdir())]

    assert run_ranks(use) == [[{"n": 2}, []]] * 2


END_OF_PROGRAM = """
import sys, time
from ddpkit import durable, rank0_save
original = durable._sync_folder
durable._sync_folder = lambda folder: (time.sleep(0.3), original(folder))
rank0_save({"n": 1}, sys.argv[1], background=True)
print("the end", flush=True)
"""


@pytest.mark.drill
@pytest.mark.parametrize("target", ["x.pt", "."])
def test_a_plain_program_ends_with_its_last_save_written_or_its_error_shown(
    tmp_path: Path, target: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", END_OF_PROGRAM, target],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "the end\n"
    if target == "x.pt":
        assert done.stderr == ""
        assert torch.load(tmp_path / "x.pt") == {"n": 1}
    else:
        assert "CheckpointError" in done.stderr
        assert "is a folder" in done.stderr


def test_the_latest_checkpoint_is_the_same_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use() -> Path | None:
        for number in range(3):
            rank0_save({"n": number}, tmp_path / f"x{number}.pt", background=True)
        if not is_rank0():  # as on a node that does not see the folder
            monkeypatch.setattr(Path, "is_file", lambda self: False)
            monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
        return latest_checkpoint(tmp_path)

    assert run_ranks(use) == [tmp_path / "x2.pt"] * 2


def test_a_load_by_another_number_of_ranks_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(lambda: rank0_save({"n": 1}, tmp_path / "x.pt"))
    with caplog.at_level(logging.INFO, logger="ddpkit.checkpoint"):
        assert barrier_load(tmp_path / "x.pt") == {"n": 1}
        torch.save({}, tmp_path / "y.pt")
        barrier_load(tmp_path / "y.pt")
    (record,) = caplog.records
    assert "saved by 2 ranks (ddpkit" in record.getMessage()


# ----------------------------------------------------------------------------------- random streams


def draw() -> tuple[float, float, float, float]:
    return float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.normal())


def seed_by_rank() -> None:
    torch.manual_seed(get_rank())
    random.seed(get_rank())
    np.random.seed(get_rank())
    draw()  # of normal deviates one more is waiting then


@pytest.mark.parametrize("background", [False, True])
def test_every_rank_goes_on_with_its_own_random_streams(tmp_path: Path, background: bool) -> None:
    def use() -> tuple[list[Any], list[Any]]:
        seed_by_rank()
        path = tmp_path / "x.pt"
        rank0_save({"n": 1}, path, include_rng=True, background=background).wait()
        went_on = [draw(), draw()]
        assert barrier_load(path, include_rng=True) == {"n": 1}
        return went_on, [draw(), draw()]

    first, second = run_ranks(use)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second
    assert torch.load(tmp_path / "x.pt") == {"n": 1}


class Keeps(nn.Module):
    """Keeps what it is given instead of copying it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.cache = torch.arange(200_000.0)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"cache": self.cache}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.cache = state["cache"]


class Assigns(Keeps):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict, assign=True)


@pytest.mark.parametrize("kind", [Keeps, Assigns])
def test_nothing_that_was_restored_depends_on_the_file(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    path = tmp_path / "kept.pt"
    rank0_save({"model": kind()}, path)
    model = kind()
    barrier_load(path, into={"model": model})
    assert path.name not in Path("/proc/self/maps").read_text()
    assert model.cache is not None


@pytest.mark.parametrize(
    ("option", "call"),
    [("include_rng", "rank0_save"), ("include_rng", "barrier_load"), ("into", "barrier_load")],
)
def test_options_that_differ_between_ranks_are_named(
    tmp_path: Path, option: str, call: str
) -> None:
    path = tmp_path / "x.pt"
    options: dict[str, Any] = {"include_rng": True, "into": {"model": nn.Linear(2, 2)}}

    def use() -> str:
        rank0_save({"model": nn.Linear(2, 2)}, path, include_rng=True)
        given = {option: options[option]} if is_rank0() else {}

        def differ() -> None:
            if call == "rank0_save":
                rank0_save({}, path, **given)
            else:
                barrier_load(path, **given)
            barrier()

        with pytest.raises((GroupError, PeerError)) as caught:
            differ()
        return str(caught.value)

    # A rank that waits may hear first that the one that saw it has left.
    assert any(f"{call}({option}=" in text for text in run_ranks(use))


def test_random_streams_of_other_ranks_are_left_alone_with_a_warning(tmp_path: Path) -> None:
    run_ranks(lambda: rank0_save({"n": 1}, tmp_path / "x.pt", include_rng=True).path)

    def use() -> None:
        before = torch.get_rng_state()
        with pytest.warns(UserWarning, match="random streams of 2 ranks, and 3 load it"):
            barrier_load(tmp_path / "x.pt", include_rng=True)
        assert torch.equal(torch.get_rng_state(), before)

    run_ranks(use, 3)


def test_a_file_without_random_streams_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"n": 1}, tmp_path / "x.pt")

    def use() -> tuple[str, str]:
        return outcome(lambda: barrier_load(tmp_path / "x.pt", include_rng=True))

    first, second = run_ranks(use)
    assert first[0] == second[0]
    assert "include_rng=True" in first[0]
