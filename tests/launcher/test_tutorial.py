"""The steps of the tutorial as a person runs them, judged by what they print."""

import functools
import json
import re
import runpy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.launcher.test_examples import REPOSITORY, TORCHRUN, messages_in, run

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(120)]

DATA_LOADING = str(REPOSITORY / "examples" / "tutorial" / "data_loading.py")
LENGTH = 11

RANK_LINE = re.compile(r"(epoch \d|evaluation), rank (\d+): (.*)")
TOGETHER_LINE = re.compile(
    r"(epoch \d|evaluation), together: (\d+) of (\d+) samples, "
    r"(?:none repeated|repeated as padding: (.*))"
)

Batches = list[list[int]]
Shares = dict[str, list[Batches]]


def shares_in(output: str) -> Shares:
    """Return the batches of every rank in every pass; each rank must come once and in order."""
    shares: Shares = {}
    for name, rank, batches in RANK_LINE.findall(output):
        ranks = shares.setdefault(name, [])
        assert int(rank) == len(ranks)
        ranks.append(json.loads(batches))
    return shares


def global_order(ranks: list[Batches]) -> list[int]:
    """Return the samples step by step, those of rank 0 first within a step."""
    return [index for step in zip(*ranks, strict=True) for batch in step for index in batch]


def samples(ranks: list[Batches]) -> Counter[int]:
    return Counter(index for batches in ranks for batch in batches for index in batch)


def check(output: str, world_size: int) -> Shares:
    """Judge a whole output by the samples in it, and its own words by the same."""
    shares = shares_in(output)
    assert list(shares) == ["epoch 1", "epoch 2", "evaluation"]
    assert [len(ranks) for ranks in shares.values()] == [world_size] * 3
    check_epochs(shares["epoch 1"], shares["epoch 2"], world_size)
    assert samples(shares["evaluation"]) == Counter(range(LENGTH))
    said = {name: words for name, *words in TOGETHER_LINE.findall(output)}
    assert said == {name: words_for(ranks) for name, ranks in shares.items()}
    assert output.splitlines()[-1] == f"the evaluation counted {LENGTH} of {LENGTH} samples"
    return shares


def check_epochs(first: list[Batches], second: list[Batches], world_size: int) -> None:
    padding = -LENGTH % world_size
    for ranks in (first, second):
        assert len({sum(map(len, batches)) for batches in ranks}) == 1
        order = global_order(ranks)
        assert sorted(order[:LENGTH]) == list(range(LENGTH))
        assert order[LENGTH:] == order[:padding]
    assert global_order(first) != global_order(second)


def words_for(ranks: list[Batches]) -> list[str]:
    repeated = sorted((samples(ranks) - Counter(range(LENGTH))).elements())
    return [str(LENGTH), str(LENGTH), str(repeated) if repeated else ""]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Shares]:
    """Run the script with so many ranks and so many samples in a batch, once for all tests."""

    @functools.cache
    def load(ranks: int, batch_size: int) -> Shares:
        options = ["--nproc-per-node", str(ranks), "--batch-size", str(batch_size)]
        folder = tmp_path_factory.mktemp("tutorial")
        result = run(folder, DATA_LOADING, *options, "--length", str(LENGTH))
        assert result.stderr == ""
        assert list(folder.iterdir()) == []
        return check(result.stdout, ranks)

    return load


def test_two_ranks_share_every_epoch(shared: Callable[[int, int], Shares]) -> None:
    shares = shared(2, 2)
    for ranks in shares.values():
        assert [len(batches) for batches in ranks] == [3, 3]


@pytest.mark.drill
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 4), (4, 1)])
def test_any_number_of_ranks_takes_the_same_steps(
    ranks: int, batch_size: int, shared: Callable[[int, int], Shares]
) -> None:
    of_these, of_two = shared(ranks, batch_size), shared(2, 2)
    for name in ("epoch 1", "epoch 2"):
        order = global_order(of_these[name])
        assert order[:LENGTH] == global_order(of_two[name])[:LENGTH]


@pytest.mark.drill
def test_torchrun_prints_the_same(tmp_path: Path, shared: Callable[[int, int], Shares]) -> None:
    result = run(tmp_path, *TORCHRUN, "2", DATA_LOADING)  # by default as many samples
    assert messages_in(result.stderr) == ""
    assert check(result.stdout, 2) == shared(2, 2)


# --------------------------------------------------------------------------------------- checkpoint

CHECKPOINT = str(REPOSITORY / "examples" / "tutorial" / "checkpoint.py")


def train(folder: Path, *options: str, launcher: Sequence[str] = ()) -> str:
    """Run the script and return the last line of its output."""
    folder.mkdir(exist_ok=True)
    return run(folder, *launcher, CHECKPOINT, "--folder", ".", *options).stdout.splitlines()[-1]


def checkpoints(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.drill
def test_a_stopped_training_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "a", "--epochs", "2")
    assert train(tmp_path / "b", "--epochs", "2", "--stop-at", "15") == "stopped"
    assert checkpoints(tmp_path / "b") == ["epoch-1.pt"]
    assert train(tmp_path / "b", "--epochs", "2", "--nproc-per-node", "1") == unbroken
    assert (
        checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b") == ["epoch-1.pt", "epoch-2.pt"]
    )


@pytest.mark.drill
def test_it_is_stopped_often_and_goes_on_in_any_world(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "a")
    for ranks in ("2", "4", "1"):
        assert train(tmp_path / "b", "--stop-at", "9", "--nproc-per-node", ranks) == "stopped"
    # Of two, the newer one is damaged; the one before it is taken.
    newest = tmp_path / "b" / checkpoints(tmp_path / "b")[-1]
    (tmp_path / "b" / "epoch-9.pt").write_bytes(newest.read_bytes()[:1000])
    assert train(tmp_path / "b", launcher=[*TORCHRUN, "2"]) == unbroken
    assert checkpoints(tmp_path / "b") == ["epoch-3.pt", "epoch-4.pt", "epoch-9.pt"]


# --------------------------------------------------------------------------------------- basic DDP

BASIC_DDP = str(REPOSITORY / "examples" / "tutorial" / "basic_ddp.py")


def expected_words(world_size: int) -> list[str]:
    """Say what is printed if the loss is that of one process with the batches of all ranks."""
    script = runpy.run_path(BASIC_DDP)
    torch.manual_seed(0)
    model = script["ToyModel"]()
    batches = [script["make_batch"](rank) for rank in range(world_size)]
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = f"loss {F.mse_loss(model(inputs), labels).item():.4f}"
    return [f"by hand: {loss}", f"with ddpkit: {loss}", "both ways ended with the same parameters"]


@pytest.mark.drill
@pytest.mark.timeout(240)  # interpreters that start one after another, on a busy machine
@pytest.mark.parametrize(
    ("ranks", "launcher", "options"),
    [
        (1, [], ["--nproc-per-node", "1"]),
        (2, [], []),
        (2, [*TORCHRUN, "2"], []),
    ],
    ids=["python, one rank", "python, two ranks", "torchrun"],
)
def test_the_first_step_by_hand_and_with_ddpkit_is_the_same(
    ranks: int, launcher: list[str], options: list[str], tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        expected = expected_words(ranks)
    result = run(tmp_path, *launcher, BASIC_DDP, *options)
    assert messages_in(result.stderr) == ""
    assert result.stdout.splitlines() == expected
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------- model parallel

MODEL_PARALLEL = str(REPOSITORY / "examples" / "tutorial" / "model_parallel.py")


def loss_of_one_process(world_size: int, steps: int) -> float:
    """Train the plain model on the batches of all ranks, and return the last loss."""
    script = runpy.run_path(MODEL_PARALLEL)
    torch.manual_seed(0)
    model = script["ToyModel"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        batches = []
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            batches.append([torch.randn(20, size, generator=generator) for size in (10, 5)])
        inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.drill
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ranks", "launcher", "options"),
    [(1, [], ["--nproc-per-node", "1"]), (2, [], []), (2, [*TORCHRUN, "2"], [])],
    ids=["python, one rank", "python, two ranks", "torchrun"],
)
def test_a_model_on_two_devices_by_hand_and_with_ddpkit_is_the_same(
    ranks: int, launcher: list[str], options: list[str], tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        loss = f"loss {loss_of_one_process(ranks, steps=5):.4f}"
    result = run(tmp_path, *launcher, MODEL_PARALLEL, *options)
    assert messages_in(result.stderr) == ""
    said = result.stdout.splitlines()
    if torch.cuda.device_count() < 2 * ranks:
        assert said.pop(0) == "not enough GPUs for two in each rank: both devices are the CPU"
    assert said == [
        f"by hand: {loss}",
        f"with ddpkit: {loss}",
        "both ways ended with the same parameters",
    ]
    assert list(tmp_path.iterdir()) == []
