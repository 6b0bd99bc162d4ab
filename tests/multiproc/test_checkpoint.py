"""Checkpoints on two ranks: one writer, the same outcome everywhere, whole files."""

import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

# Optimizers and DDP import it, which takes longer than these tests: once here, not in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn

from ddpkit import checkpoint
from ddpkit.checkpoint import barrier_load, rank0_save
from ddpkit.errors import CheckpointError, WorkerError
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
        original = checkpoint.write_whole

        def counted(*args: Any) -> None:
            writes.append(1)
            original(*args)

        checkpoint.write_whole = counted  # type: ignore[assignment]
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
            checkpoint._write_through = _die
        elif stage == "half":
            torch.save = _write_half_and_die  # type: ignore[assignment]
        elif stage == "complete":
            Path.replace = _die  # type: ignore[assignment, method-assign]
        else:
            checkpoint._sync_folder = _die
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
