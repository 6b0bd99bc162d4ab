import collections
import dataclasses
import datetime
import enum
import errno
import os
import random
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

# Optimizers import it, and it sets an environment variable, which a test must not.
import torch._dynamo
from torch import nn

from ddpkit import durable
from ddpkit.checkpoint import barrier_load, rank0_save
from ddpkit.durable import _temporary_in, write_whole
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.snapshot import check_loadable, plain_state


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Counter:
    """A loader-like object of the user's."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Dangerous:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------- saving


def test_the_file_is_what_torch_save_makes_of_the_states(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = {"model": net, "more": [{"opt": optimizer}, (Counter(4), 1)], "epoch": 3}
    rank0_save(state, tmp_path / "last.pt")
    loaded = torch.load(tmp_path / "last.pt")
    assert list(loaded) == ["model", "more", "epoch"]
    torch.testing.assert_close(loaded["model"], net.state_dict())
    assert loaded["model"]._metadata == net.state_dict()._metadata  # type: ignore[attr-defined]
    assert loaded["more"] == [{"opt": optimizer.state_dict()}, ({"count": 4}, 1)]
    assert names_in(tmp_path) == ["last.pt"]


def test_what_has_nothing_to_replace_stays_the_same_object() -> None:
    value = {"a": [1, (2, torch.ones(1))], "b": collections.OrderedDict(x=1)}
    assert plain_state(value) is value


def test_replacing_does_not_change_the_input() -> None:
    counter = Counter(1)
    value = collections.OrderedDict(a=[counter], b=Pair(1, 2))
    new = plain_state(value)
    assert new == {"a": [{"count": 1}], "b": Pair(1, 2)}
    assert type(new) is collections.OrderedDict
    assert value["a"] == [counter]


def test_wrappers_leave_no_trace_in_names() -> None:
    net = nn.Linear(1, 1)
    assert list(plain_state([nn.DataParallel(net)])[0]) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Color.RED, r"Color: save x\.value"),
        (Path("x"), r"Path: save str\(x\)"),
        (Pair(1, 2), r"Pair: save tuple\(x\)"),
        (Config(), r"Config: save dataclasses.asdict\(x\)"),
        (torch.__version__, r"TorchVersion: save str\(x\)"),
        (datetime.datetime(2026, 1, 1), r"datetime: save x.isoformat\(\)"),
        (collections.defaultdict(int), r"defaultdict: save dict\(x\)"),
        (frozenset({1}), r"frozenset: save set\(x\)"),
        (range(3), r"range: save list\(x\)"),
        (lambda: 1, "function: save what it is made from"),
    ],
    ids=lambda item: type(item).__name__ if not isinstance(item, str) else "",
)
def test_what_a_safe_load_refuses_is_named_before_anything_is_written(
    tmp_path: Path, value: Any, told: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"obj\['cfg'\]\[1\] is a .*{told}") as caught:
        rank0_save({"cfg": [1, value]}, tmp_path / "sub" / "last.pt")
    assert caught.value.path == str(tmp_path / "sub" / "last.pt")
    assert caught.value.__cause__ is not None
    assert names_in(tmp_path) == []


def test_all_offenders_are_named_keys_too() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_loadable({"a": Color.RED, Color.RED: 1, "s": {frozenset()}}, "x.pt")
    message = str(caught.value)
    assert "obj['a'] is a" in message
    assert "the key <Color.RED: 1> of obj is a" in message
    assert "obj['s']{...} is a frozenset" in message


def test_everything_that_a_safe_load_takes_is_let_through() -> None:
    loop: list[Any] = []
    loop.append(loop)
    state = {
        "numbers": [1, 2**80, 1.5, 1j, True, None],
        "text": ("a", b"b", bytearray(b"c")),
        "containers": [collections.OrderedDict(a={1}), collections.Counter("aab"), loop],
        "torch": [torch.Size([1]), torch.float16, torch.device("cpu"), torch.get_rng_state()],
        "tensors": [nn.Parameter(torch.ones(1)), torch.eye(2).to_sparse(), torch.ones(2, 2).t()],
    }
    check_loadable(state, "x.pt")


def test_allowed_types_of_the_users_are_let_through(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Color]):
        rank0_save([Color.RED], tmp_path / "x.pt")
        assert barrier_load(tmp_path / "x.pt") == [Color.RED]


def test_a_failing_state_dict_is_a_checkpoint_error(tmp_path: Path) -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, int]:
            raise ZeroDivisionError("in the loader")

    with pytest.raises(CheckpointError, match="ZeroDivisionError: in the loader") as caught:
        rank0_save([Broken()], tmp_path / "x.pt")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("path", ["", 3, None, b"x.pt"], ids=repr)
@pytest.mark.parametrize("call", [lambda path: rank0_save({}, path), barrier_load])
def test_a_path_must_be_one(call: Any, path: Any) -> None:
    with pytest.raises(ConfigError, match="path of a file"):
        call(path)


# ------------------------------------------------------------------------------------- whole files


def test_parents_are_made_and_relative_and_odd_names_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/last.pt", "sp ace*.pt", "x" * 250 + ".pt", "ünïcode"):
        rank0_save(1, name)
        assert barrier_load(name) == 1


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.pt").write_bytes(b"old")
    (tmp_path / "link.pt").symlink_to(Path("real") / "a.pt")
    rank0_save(7, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert torch.load(tmp_path / "real" / "a.pt") == 7


def test_permissions_are_those_of_an_ordinary_file(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_bytes(b"")
    rank0_save(1, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("at", ["folder", "file/x.pt"])
def test_impossible_targets_raise(tmp_path: Path, at: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="untouched") as caught:
        rank0_save(1, tmp_path / at)
    assert isinstance(caught.value.__cause__, OSError)
    assert names_in(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "x.pt"
    target.write_bytes(b"old")

    def fail_midway(file: Any) -> None:
        file.write(b"new")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_whole(target, fail_midway)
    assert target.read_bytes() == b"old"
    assert names_in(tmp_path) == ["x.pt"]


def test_an_error_of_the_system_is_told_and_not_what_follows_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hide(file: Any) -> None:
        monkeypatch.setattr(file, "_file", open(os.devnull, "rb"))  # noqa: PTH123, SIM115
        try:
            file.write(b"x")
        except OSError:
            file._file.close()
            raise RuntimeError("something that follows") from None

    with pytest.raises(OSError, match="writ"):
        write_whole(tmp_path / "x.pt", hide)


@pytest.fixture
def early_syncs(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """Have files synced early after a few bytes, and tell when that is done."""
    monkeypatch.setattr(durable, "_SYNC_EVERY", 1000)
    done, sync = threading.Event(), os.fdatasync

    def recorded(number: int) -> None:
        sync(number)
        done.set()

    monkeypatch.setattr(os, "fdatasync", recorded)
    return [done]


def test_a_big_file_is_synced_while_it_is_written(
    tmp_path: Path, early_syncs: list[threading.Event]
) -> None:
    def write(file: Any) -> None:
        file.write(bytes(2000))
        assert early_syncs[0].wait(20)
        file.write(b"the end")

    for _ in range(2):  # the second one replaces a big file
        early_syncs[0].clear()
        write_whole(tmp_path / "x", write)
        assert (tmp_path / "x").read_bytes() == bytes(2000) + b"the end"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_big_file_is_written_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a program, whose last save in the background is still being written."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(durable, "_SYNC_EVERY", 1000)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(3):
        rank0_save(torch.full((1000,), number), tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt")[0] == number
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_error_of_an_early_sync_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells it once, so the sync at the end goes well."""
    rank0_save("old", tmp_path / "x.pt")
    monkeypatch.setattr(durable, "_SYNC_EVERY", 1000)
    failed = threading.Event()

    def fail(number: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    def write(file: Any) -> None:
        file.write(bytes(2000))
        assert failed.wait(20)

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_whole(tmp_path / "x.pt", write)
    assert torch.load(tmp_path / "x.pt") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_only_temporaries_of_dead_writers_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".ddpkit-dead.tmp").write_bytes(b"half")
    (tmp_path / ".other.tmp").write_bytes(b"somebody else's")
    with _temporary_in(tmp_path) as (_, living):
        rank0_save(1, tmp_path / "x.pt")
        assert names_in(tmp_path) == sorted([living.name, ".other.tmp", "x.pt"])
    assert names_in(tmp_path) == [".other.tmp", "x.pt"]


# ------------------------------------------------------------------------------------- loading


def test_objects_are_restored_in_place_and_come_back(tmp_path: Path) -> None:
    net, counter = nn.Linear(2, 2), Counter(5)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    weight = net.weight.detach().clone()
    state = {"model": net, "opt": optimizer, "loader": counter, "epoch": 3}
    rank0_save(state, tmp_path / "x.pt")
    nn.init.zeros_(net.weight)
    live = {"model": net, "opt": torch.optim.Adam(net.parameters()), "loader": Counter()}
    loaded = barrier_load(tmp_path / "x.pt", into=live)
    assert list(loaded) == list(state)
    assert all(loaded[key] is live[key] for key in live)
    assert loaded["epoch"] == 3
    assert torch.equal(net.weight, weight)
    assert loaded["loader"].count == 5
    torch.testing.assert_close(loaded["opt"].state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("prefix", ["", "module.", "module.module.", "_orig_mod.module."])
def test_names_of_any_wrapper_load_beside_a_child_called_module(
    tmp_path: Path, prefix: str
) -> None:
    net = nn.Sequential(collections.OrderedDict(module=nn.Linear(2, 2), norm=nn.BatchNorm1d(2)))
    state = {prefix + name: value + 1 for name, value in net.state_dict().items()}
    torch.save({"model": state}, tmp_path / "x.pt")
    barrier_load(tmp_path / "x.pt", into={"model": nn.DataParallel(net)})
    torch.testing.assert_close(
        dict(net.state_dict()), {name.removeprefix(prefix): item for name, item in state.items()}
    )


def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    rank0_save({"model": {"weight": torch.ones(2, 2), "wrong": 1}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"entry 'model'") as caught:
        barrier_load(tmp_path / "x.pt", into={"model": nn.Linear(2, 2)})
    assert 'Missing key(s) in state_dict: "bias"' in str(caught.value)
    assert 'Unexpected key(s) in state_dict: "wrong"' in str(caught.value)


def test_missing_entries_are_listed_before_anything_is_restored(tmp_path: Path) -> None:
    rank0_save({"loader": Counter(1)}, tmp_path / "x.pt")
    counter = Counter()
    with pytest.raises(CheckpointError, match=r"has no entry 'opt'; it has 'loader'"):
        barrier_load(tmp_path / "x.pt", into={"loader": counter, "opt": Counter()})
    assert counter.count == 0
    rank0_save([1], tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        barrier_load(tmp_path / "y.pt", into={"loader": counter})


@pytest.mark.parametrize("into", [[1], {"epoch": 3}], ids=repr)
def test_into_must_be_a_dict_of_objects_that_can_load(into: Any) -> None:
    with pytest.raises(ConfigError, match="into"):
        barrier_load("not read", into=into)


def test_what_was_loaded_does_not_depend_on_the_file(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    rank0_save({"a": shared, "b": shared[1:], "keep": shared + 1}, tmp_path / "x.pt")
    loaded = barrier_load(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(b"\0" * (tmp_path / "x.pt").stat().st_size)
    assert torch.equal(loaded["keep"], shared + 1)
    loaded["a"] += 1
    assert torch.equal(loaded["b"], shared[1:] + 1)


def test_the_default_device_is_the_cpu_and_another_can_be_given(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "x.pt")
    assert barrier_load(tmp_path / "x.pt").device.type == "cpu"
    assert barrier_load(tmp_path / "x.pt", map_location="meta").device.type == "meta"


def test_old_formats_load(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(barrier_load(tmp_path / "x.pt")["a"], torch.ones(1))


def test_a_missing_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint .*x\.pt .*Check the path") as caught:
        barrier_load(tmp_path / "x.pt")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(CheckpointError, match="Could not read"):
        barrier_load(tmp_path)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    rank0_save({"a": torch.ones(2000)}, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    for size in [*range(0, len(whole), 1024), len(whole) - 1]:
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.pt is not a whole torch\.save file"):
            barrier_load(tmp_path / "cut.pt")


def test_a_flipped_bit_anywhere_gives_no_other_contents_where_checksums_are_computed(
    tmp_path: Path,
) -> None:
    state: dict[str, Any] = {"x": torch.arange(1000), "n": 5}
    rank0_save(state, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    chance, refused = random.Random(0), 0
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        (tmp_path / "x.pt").write_bytes(flipped)
        try:
            loaded = barrier_load(tmp_path / "x.pt", verify=True)
        except CheckpointError:
            refused += 1
        else:  # what is no part of the data: padding, dates, the origin of the file
            assert torch.equal(loaded["x"], state["x"])
            assert loaded["n"] == 5
    assert refused > 100


def test_a_model_and_its_average_go_through_a_file(tmp_path: Path) -> None:
    """The average keeps its model as a genuine child called `module`."""
    model, average = nn.Linear(2, 2), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    rank0_save({"model": model, "average": average}, tmp_path / "x.pt")
    saved = {name: value.clone() for name, value in average.state_dict().items()}
    fresh, fresh_average = nn.Linear(2, 2), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    barrier_load(tmp_path / "x.pt", into={"model": fresh, "average": fresh_average})
    assert torch.equal(fresh.weight, model.weight)
    assert all(torch.equal(value, saved[k]) for k, value in fresh_average.state_dict().items())
    assert "module.weight" in torch.load(tmp_path / "x.pt")["average"]


def test_a_file_that_runs_code_does_not_unless_it_may(tmp_path: Path) -> None:
    torch.save(Dangerous(tmp_path / "made"), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"loader refuses: .*mkdir .* weights_only=False"):
        barrier_load(tmp_path / "x.pt")
    assert not (tmp_path / "made").exists()
    barrier_load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "made").exists()
