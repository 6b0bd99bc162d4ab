"""Lines of several ranks: which come, with which tag, however the ranks were started."""

import logging
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ddpkit.agree import barrier
from ddpkit.console import get_logger, show_own_lines
from ddpkit.group import get_rank, process_group
from ddpkit.testing import run_ranks
from tests.forking import FORK

log = get_logger("train")


def configure() -> None:
    logging.basicConfig(format="%(name)s: %(message)s", level="INFO", stream=sys.stderr, force=True)


def speak() -> None:
    configure()
    for rank in range(2):  # one after the other
        if get_rank() == rank:
            log.info("epoch %d", 1)
            log.warning("slow")
        barrier()


SPOKEN = ["train: [rank 0/2] epoch 1", "train: [rank 0/2] slow", "train: [rank 1/2] slow"]


@pytest.mark.parametrize(
    "method",
    [FORK, *(pytest.param(name, marks=pytest.mark.drill) for name in ("forkserver", "spawn"))],
)
def test_ranks_speak_alike_however_they_are_started(
    method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(speak, start_method=method)
    assert capfd.readouterr().err.splitlines() == SPOKEN


@pytest.mark.drill
def test_a_logger_in_a_closure_speaks_alike(capfd: pytest.CaptureFixture[str]) -> None:
    own = get_logger("train")

    def speak_here() -> None:
        configure()
        own.info("from rank 0 alone")

    run_ranks(speak_here, start_method="forkserver")
    assert capfd.readouterr().err.splitlines() == ["train: [rank 0/2] from rank 0 alone"]


@pytest.mark.drill
def test_log_files_have_each_line_with_one_tag(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(speak, log_dir=tmp_path)
    files = [(tmp_path / f"rank-{rank}.log").read_text().splitlines()[1:] for rank in range(2)]
    assert files == [SPOKEN[:2], SPOKEN[2:]]
    assert capfd.readouterr().err.splitlines() == SPOKEN[:2]


class Talker(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        configure()
        log.info("loading")
        log.warning("damaged")
        return index


def load(context: str) -> None:
    for rank in range(2):
        if rank == int(os.environ["RANK"]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                list(DataLoader(Talker(), num_workers=1, multiprocessing_context=context))
        # There is no group in one of the tests.
        torch.distributed.barrier() if torch.distributed.is_initialized() else None


LOADED = ["train: [rank 0/2] damaged", "train: [rank 0/2] loading", "train: [rank 1/2] damaged"]


@pytest.mark.parametrize("init_group", [True, False], ids=["group", "no group"])
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.drill)])
def test_data_workers_speak_as_their_rank(
    context: str, init_group: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(load, args=(context,), init_group=init_group)
    assert sorted(capfd.readouterr().err.splitlines()) == LOADED


def test_a_rank_is_right_before_the_group_opens_and_after_it_closed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def in_and_out() -> None:
        configure()
        log.info("before")
        with process_group():
            log.info("within")
        log.info("after")

    run_ranks(in_and_out, init_group=False)
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("train")]
    assert shown == [f"train: [rank 0/2] {when}" for when in ("before", "within", "after")]


def test_own_lines_of_forked_ranks_go_to_their_own_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def own_lines() -> None:
        logging.getLogger().handlers.clear()  # what pytest has put there
        show_own_lines("info")
        with process_group(backend="gloo"):
            pass

    run_ranks(own_lines, init_group=False)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "INFO ddpkit.group: [rank 0/2] opened a group: rank 0 of 2, local rank 0"
    )


SHOWN = """
from ddpkit.testing import run_ranks
assert run_ranks(lambda: 0, start_method="{method}") == [0, 0]
"""


@pytest.mark.drill
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_variable_shows_own_lines_of_a_program_and_of_its_ranks(method: str) -> None:
    command = [sys.executable, "-c", SHOWN.format(method=method)]
    environment = {**os.environ, "DDPKIT_LOG": "info"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=50
    )
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "INFO ddpkit.group: [rank 0/2] opened a group: rank 0 of 2, local rank 0"
    )
