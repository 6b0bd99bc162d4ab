"""The legacy scripts and what they became with ddpkit: both train alike.

The scripts run in float64 and on the same batches, since sharded_loader's shuffle is another one
than that of torch's samplers. What may differ then is only the order in which sums are made, so one
rank gives the same bits and two ranks the same digits.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ddpkit.testing import run_ranks
from tests.launcher.same_order import order_of_ddpkit
from tests.launcher.test_examples import REPOSITORY, TORCHRUN, check_same_bits, messages_in, run

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(120)]

LEGACY = REPOSITORY / "examples" / "legacy"
SAME_ORDER = str(REPOSITORY / "tests" / "launcher" / "same_order.py")
STAGES = ["1_loader", "2_metrics", "3_checkpoint", "4_ddp", "5_entry"]
DATA_SETS = ("Digits", "Spirals")

Parameters = dict[str, torch.Tensor]


class StoppedError(Exception):
    """Stands for whatever ends a training in the middle of an epoch."""


class Outcome(NamedTuple):
    """What a rank printed and loaded."""

    printed: str
    loaded: list[tuple[int, int]]
    """Samples: length of their data set, and index. Of a text: its length, and a hash of a crop."""


# --------------------------------------------------------------------------------- running them


def train(script: str, *arguments: str, interrupt_at: int | None = None) -> Outcome:
    """Run a script's main in this process, on the CPU, in float64 and in the order of ddpkit."""
    loaded: list[tuple[int, int]] = []
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=False))
        stack.enter_context(in_float64_on_one_thread())
        module = load_script(script)
        for name in DATA_SETS:
            record_samples(getattr(module, name, None), loaded, interrupt_at)
        record_crops(module, loaded)
        module.args = module.parser.parse_args(arguments)  # type: ignore[attr-defined]
        stack.enter_context(order_of_ddpkit(getattr(module.args, "batch_size", 1)))
        stack.enter_context(contextlib.redirect_stdout(printed))
        module.main()
    return Outcome(printed.getvalue(), loaded)


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LEGACY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def in_float64_on_one_thread() -> Iterator[None]:
    """Also keep torch's threads from waiting for each other: the models are tiny."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def record_samples(data_set: Any, loaded: list[tuple[int, int]], interrupt_at: int | None) -> None:
    if data_set is None:
        return
    load = data_set.__getitem__

    def recorded(self: Any, index: int) -> Any:
        if len(loaded) == interrupt_at:
            raise StoppedError
        loaded.append((len(self), index))
        return load(self, index)

    data_set.__getitem__ = recorded


def record_crops(module: Any, loaded: list[tuple[int, int]]) -> None:
    get_batch = getattr(module, "get_batch", None)
    if get_batch is None:
        return

    def recorded(data: torch.Tensor) -> Any:
        x, y = get_batch(data)
        loaded.extend((len(data), hash(tuple(crop))) for crop in x.tolist())
        return x, y

    module.get_batch = recorded


def timeless(printed: str) -> str:
    return re.sub(r"Time [\d.]+|[\d.]+ ms/step", "TIME", printed)


def check_same_digits(actual: Parameters, expected: Parameters) -> None:
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        assert parameter.dtype == torch.float64
        torch.testing.assert_close(actual[name], parameter, rtol=1e-9, atol=1e-11)


def check_every_sample_once(ranks: Sequence[Outcome], length: int, epochs: int) -> None:
    """Cut what each rank has loaded of a data set into epochs, and put the ranks together."""
    own = [[index for size, index in rank.loaded if size == length] for rank in ranks]
    for epoch in range(epochs):
        together: list[int] = []
        for indices in own:
            size = len(indices) // epochs
            together += indices[epoch * size : (epoch + 1) * size]
        assert sorted(together) == list(range(length))


# ---------------------------------------------------------------------------------- the classifier

EPOCHS = 2
TRAIN, VAL = 1536, 261


class Trained(NamedTuple):
    """What a training printed and loaded on each rank, and its folder."""

    ranks: list[Outcome]
    folder: Path

    @property
    def printed(self) -> str:
        return timeless(self.ranks[0].printed)

    def classifier(self, file: str = "checkpoint.pt") -> Parameters:
        names: Parameters = torch.load(self.folder / file)["state_dict"]
        return {name.removeprefix("module."): tensor for name, tensor in names.items()}


Training = Callable[..., Trained]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Train the classifier before (0 ranks) or after the conversion, once for all tests."""

    @functools.cache
    def of(ranks: int, epochs: int = EPOCHS) -> Trained:
        folder = tmp_path_factory.mktemp("classifier")
        return train_classifier(ranks, folder, "--epochs", str(epochs))

    return of


def train_classifier(ranks: int, folder: Path, *options: str) -> Trained:
    arguments = ["--save-dir", str(folder / "new"), *options]
    if ranks == 0:
        return Trained([train("classifier_before", *arguments)], folder / "new")
    outcomes = run_ranks(train, ranks, args=["classifier_after", *arguments])
    return Trained(outcomes, folder / "new")


def test_the_classifier_on_one_rank_does_the_same(classifier: Training) -> None:
    before, after = classifier(0), classifier(1)
    assert "Best accuracy: " in before.printed
    assert after.printed == before.printed
    check_same_bits(after.classifier(), before.classifier())
    check_same_bits(after.classifier("model_best.pt"), before.classifier("model_best.pt"))
    assert after.ranks[0].loaded == before.ranks[0].loaded


def test_the_classifier_on_two_ranks_learns_the_same(classifier: Training) -> None:
    before, after = classifier(0), classifier(2)
    # The lines inside of an epoch are about rank 0's own batches.
    assert without_progress(after.printed) == without_progress(before.printed)
    check_same_digits(after.classifier(), before.classifier())
    check_same_digits(after.classifier("model_best.pt"), before.classifier("model_best.pt"))


def without_progress(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if not line.startswith("Epoch: [")]


def test_two_ranks_share_every_epoch_of_the_classifier(classifier: Training) -> None:
    ranks = classifier(2).ranks
    assert ranks[1].printed == ""
    check_every_sample_once(ranks, TRAIN, EPOCHS)
    check_every_sample_once(ranks, VAL, EPOCHS)  # an odd number: nothing is padded


def test_an_interrupted_classifier_is_resumed(classifier: Training, tmp_path: Path) -> None:
    arguments = ["classifier_after", "--epochs", str(EPOCHS), "--save-dir", str(tmp_path / "new")]
    of_a_rank = (TRAIN + VAL) // 2
    with pytest.raises(StoppedError):
        run_ranks(train, 2, args=arguments, kwargs={"interrupt_at": of_a_rank * 3 // 2})
    resume = ("--epochs", str(EPOCHS), "--resume", str(tmp_path / "new" / "checkpoint.pt"))
    resumed = train_classifier(2, tmp_path, *resume)
    first, *rest = without_progress(resumed.printed)
    assert first.endswith("checkpoint.pt' (epoch 1)")
    assert rest == without_progress(classifier(2).printed)[-len(rest) :]
    check_same_bits(resumed.classifier(), classifier(2).classifier())


def test_a_checkpoint_from_before_is_resumed_after(classifier: Training, tmp_path: Path) -> None:
    old = classifier(0, 1).folder / "checkpoint.pt"
    assert all(name.startswith("module.") for name in torch.load(old)["state_dict"])
    resumed = train_classifier(1, tmp_path, "--epochs", str(EPOCHS), "--resume", str(old))
    check_same_bits(resumed.classifier(), classifier(0).classifier())


# ------------------------------------------------------------------------------ the language model

CHARLM = (
    f"--input {REPOSITORY / 'LICENSE'} --hidden 16 --block-size 24 --batch-size 4 --grad-accum 3 "
    "--warmup 4 --steps 12 --eval-every 4 --sample 40"
).split()


@pytest.fixture(scope="module")
def charlm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Trained]:
    """Train the language model before (0 ranks) or after the conversion, once for all tests."""

    @functools.cache
    def of(ranks: int) -> Trained:
        folder = tmp_path_factory.mktemp("charlm")
        arguments = [*CHARLM, "--out", str(folder / "charlm.pt")]
        if ranks == 0:
            return Trained([train("charlm_before", *arguments)], folder)
        return Trained(run_ranks(train, ranks, args=["charlm_after", *arguments]), folder)

    return of


def charlm_in(folder: Path) -> Parameters:
    parameters: Parameters = torch.load(folder / "charlm.pt")
    return parameters


def test_the_language_model_on_one_rank_does_the_same(charlm: Callable[[int], Trained]) -> None:
    before, after = charlm(0), charlm(1)
    assert before.printed.count("val perplexity") == 3
    assert after.printed == before.printed
    check_same_bits(charlm_in(after.folder), charlm_in(before.folder))


def test_the_language_model_on_two_ranks_writes_the_same_text(
    charlm: Callable[[int], Trained],
) -> None:
    before, after = charlm(0), charlm(2)
    assert after.printed == before.printed
    assert after.ranks[1].printed == ""
    check_same_digits(charlm_in(after.folder), charlm_in(before.folder))


def test_two_ranks_share_the_crops_of_every_step(charlm: Callable[[int], Trained]) -> None:
    first, second = (rank.loaded for rank in charlm(2).ranks)
    assert len(first) == len(second)
    assert sorted(first + second) == sorted(charlm(0).ranks[0].loaded)


# ------------------------------------------------------------------------------- what was by hand

BY_HAND = ["--epochs", "3"]
POINTS, TEST_POINTS = 600, 201


@pytest.fixture(scope="module")
def spirals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Train a stage of the script by hand on two ranks, once for all tests."""

    @functools.cache
    def of(script: str) -> Trained:
        folder = tmp_path_factory.mktemp(script)
        arguments = [*BY_HAND, "--checkpoint", str(folder / "spirals.pt")]
        opens_group = script == "by_hand_5_entry"
        ranks = run_ranks(train, 2, args=[script, *arguments], init_group=opens_group)
        return Trained(ranks, folder)

    return of


def spirals_in(folder: Path) -> Parameters:
    parameters: Parameters = torch.load(folder / "spirals.pt")["model"]
    return parameters


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_like_the_script_by_hand(
    stage: str, spirals: Callable[[str], Trained]
) -> None:
    before, after = spirals("by_hand"), spirals(f"by_hand_{stage}")
    check_same_bits(spirals_in(after.folder), spirals_in(before.folder))
    check_every_sample_once(after.ranks, POINTS, epochs=3)
    check_every_sample_once(after.ranks, TEST_POINTS, epochs=3)
    assert re.findall(r"of (\d+) right", after.printed) == [str(TEST_POINTS)] * 3
    assert after.ranks[1].printed == ""


def test_the_script_by_hand_counts_a_sample_twice(spirals: Callable[[str], Trained]) -> None:
    by_hand = spirals("by_hand")
    check_every_sample_once(by_hand.ranks, POINTS, epochs=3)
    assert re.findall(r"of (\d+) right", by_hand.printed) == [str(TEST_POINTS + 1)] * 3


# ----------------------------------------------------------------------------- as a person runs it


@pytest.fixture(autouse=True, scope="module")
def _two_ranks_on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPKIT_NPROC_PER_NODE", "2")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def run_in_order(folder: Path, script: str) -> Parameters:
    """Run a script on two ranks of torchrun and return the parameters that it leaves."""
    in_order = [SAME_ORDER, "20", str(LEGACY / f"{script}.py")]
    result = run(folder, *TORCHRUN, "2", *in_order, *BY_HAND)
    assert messages_in(result.stderr) == ""
    assert result.stdout.count(" right") == 3
    return spirals_in(folder)


@pytest.fixture(scope="module")
def by_hand_under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    return run_in_order(tmp_path_factory.mktemp("by_hand"), "by_hand")


@pytest.mark.drill
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_under_torchrun(
    stage: str, by_hand_under_torchrun: Parameters, tmp_path: Path
) -> None:
    check_same_bits(run_in_order(tmp_path, f"by_hand_{stage}"), by_hand_under_torchrun)


@pytest.mark.drill
def test_the_last_stage_needs_no_launcher(tmp_path: Path) -> None:
    script = str(LEGACY / "by_hand_5_entry.py")
    launched = run(tmp_path, *TORCHRUN, "2", script, *BY_HAND)
    parameters = spirals_in(tmp_path)
    alone = run(tmp_path, script, *BY_HAND)
    assert alone.stdout == launched.stdout
    check_same_bits(spirals_in(tmp_path), parameters)


@pytest.mark.drill
@pytest.mark.parametrize("launcher", [[], [*TORCHRUN, "2"]], ids=["python", "torchrun"])
@pytest.mark.parametrize(
    ("script", "options", "last"),
    [
        ("classifier_after", ["--epochs", "1"], r"Best accuracy: \d+\.\d\d\n"),
        ("charlm_after", CHARLM, r"best perplexity \d+\.\d{4}\n"),
    ],
)
def test_converted_scripts_as_programs(
    script: str, options: list[str], last: str, launcher: list[str], tmp_path: Path
) -> None:
    result = run(tmp_path, *launcher, str(LEGACY / f"{script}.py"), *options)
    assert messages_in(result.stderr) == ""
    assert len(re.findall(last, result.stdout)) == 1


@pytest.mark.drill
@pytest.mark.parametrize("script", ["classifier_before", "charlm_before"])
def test_scripts_from_before_as_programs(script: str, tmp_path: Path) -> None:
    options = ["--epochs", "1"] if script == "classifier_before" else CHARLM
    assert messages_in(run(tmp_path, str(LEGACY / f"{script}.py"), *options).stderr) == ""


# ------------------------------------------------------------------------------------ their README

PAIRS = [
    ("classifier_before", "classifier_after"),
    ("charlm_before", "charlm_after"),
    *itertools.pairwise(["by_hand", *(f"by_hand_{stage}" for stage in STAGES)]),
]


def difference(before: str, after: str) -> str:
    """Say what `diff -U 1` would."""
    old, new = ((LEGACY / f"{name}.py").read_text().splitlines() for name in (before, after))
    lines = difflib.unified_diff(old, new, f"{before}.py", f"{after}.py", n=1, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def test_the_readme_shows_the_differences() -> None:
    readme = (LEGACY / "README.md").read_text()
    shown = re.findall(r"```diff\n(.*?)```", readme, re.DOTALL)
    assert shown == [difference(before, after) for before, after in PAIRS]
