import os
from pathlib import Path

import pytest

from ddpkit import threads
from ddpkit.threads import cores_by_launcher, setting_of_user, threads_per_rank, usable_cores

PARENT = 77


@pytest.mark.parametrize(
    ("cores", "ranks", "setting", "expected"),
    [
        (8, 2, None, 4),
        (8, 3, None, 2),
        (2, 2, None, 1),
        (2, 64, None, 1),
        (8, 2, "3", 3),
        (2, 2, "16", 16),
        (8, 2, "4,2", 4),
        (8, 2, "", 4),
        (8, 2, "0", 4),
        (8, 2, "many", 4),
    ],
)
def test_threads_of_a_rank(cores: int, ranks: int, setting: str | None, expected: int) -> None:
    assert threads_per_rank(cores, ranks, setting) == expected


@pytest.mark.parametrize(
    ("cores", "own", "expected"),
    [(8, 4, 4), (64, 4, 4), (2, 8, 2), (8, None, 4), (8, 0, 4), (1, 4, 1)],
)
def test_cores_that_are_a_ranks_own_are_not_divided(
    cores: int, own: int | None, expected: int
) -> None:
    assert threads_per_rank(cores, 2, None, own) == expected
    assert threads_per_rank(cores, 2, "3", own) == 3


@pytest.mark.parametrize(
    ("setting", "source", "own"),
    [
        ("4", "slurm", 4),
        ("4", "torchrun", None),  # a task of srun that runs torchrun: its ranks share the cores
        ("0", "slurm", None),
        ("many", "slurm", None),
        (None, "slurm", None),
    ],
)
def test_cores_by_launcher(setting: str | None, source: str, own: int | None) -> None:
    environ = {} if setting is None else {"SLURM_CPUS_PER_TASK": setting}
    assert cores_by_launcher(environ, source) == own


@pytest.mark.parametrize(("quota", "cores"), [(None, 6), (4.0, 4), (8.0, 6), (1.5, 1), (0.5, 1)])
def test_affinity_and_quota_limit_the_cores(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(threads, "quota_of_groups", lambda: quota)
    assert usable_cores() == cores


def set_environment_of_parent(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    files = {f"/proc/{PARENT}/environ": text}
    monkeypatch.setattr(threads, "_read", lambda path: files[path])


def test_the_setting_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment_of_parent(monkeypatch, "")
    assert setting_of_user({}, PARENT) is None
    assert setting_of_user({"OMP_NUM_THREADS": "4"}, PARENT) == "4"
    assert setting_of_user({"OMP_NUM_THREADS": "1"}, PARENT) == "1"


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        ("PATH=/bin\0HOME=/\0", None),  # torchrun's own default
        ("PATH=/bin\0OMP_NUM_THREADS=1\0", "1"),  # torchrun was started with it
        ("", "1"),  # its environment cannot be read
        ("MY_OMP_NUM_THREADS=1\0", None),
    ],
)
def test_the_default_of_torchrun_is_not_the_users_setting(
    monkeypatch: pytest.MonkeyPatch, parent: str, expected: str | None
) -> None:
    set_environment_of_parent(monkeypatch, parent)
    assert setting_of_user(TORCHRUN, PARENT) == expected


def test_more_than_one_thread_under_torchrun_is_the_users_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_environment_of_parent(monkeypatch, "PATH=/bin\0")
    assert setting_of_user({**TORCHRUN, "OMP_NUM_THREADS": "2"}, PARENT) == "2"


def test_a_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert threads._read(str(tmp_path / "missing")) == ""
