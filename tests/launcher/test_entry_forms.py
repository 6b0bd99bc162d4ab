"""The forms in which people write a decorated function, under every start method."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ddpkit
from ddpkit.errors import ConfigError

pytestmark = pytest.mark.launcher

ROOT = Path(__file__).parents[2]
METHODS = ["auto", "forkserver", pytest.param("spawn", marks=pytest.mark.drill)]
# A fresh process imports torch; one script by forkserver is in every run, the rest are drills.
MOSTLY_DRILLS = [
    "auto",
    *(pytest.param(name, marks=pytest.mark.drill) for name in ("forkserver", "spawn")),
]

# No main guard, a name that cannot be imported, and torch work before the launch.
UNGUARDED_SCRIPT = """
import functools, json, sys
import torch, torch.distributed as dist
import ddpkit

method = sys.argv[1]
torch.set_num_threads(2)
a = torch.randn(600, 600, requires_grad=True)
(a @ a).sum().backward()


class Answer:
    def __init__(self, value):
        self.value = value


def announced(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return ["announced", function(*args, **kwargs)]
    return wrapper


@announced
@ddpkit.distributed(nproc_per_node=2, start_method=method)
def train(transform):
    total = torch.ones(1)
    dist.all_reduce(total)
    return Answer(transform(int(total)))


def closure_over(number):
    @ddpkit.distributed(nproc_per_node=2, start_method=method)
    def inner():
        return number * ddpkit.get_world_size()
    return inner


def legacy():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return [int(total), rank]


label, answer = train(lambda x: x + 40)
started = ddpkit.distributed(legacy, nproc_per_node=2, init_group=False, start_method=method)
print(json.dumps({
    "decorator on top": label,
    "lambda argument": answer.value,
    "same class comes back": type(answer) is Answer,
    "closure": closure_over(21)(),
    "legacy": started.run_all(),
}))
"""

GUARDED_MODULE = """
import argparse, json
import ddpkit


@ddpkit.distributed(nproc_per_node=2)
def main():
    return [args.learning_rate, ddpkit.get_world_size()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("method")
    parser.add_argument("--learning-rate", type=float)
    args = parser.parse_args()
    print(json.dumps(main.with_options(start_method=args.method)()))
"""

ONE_LINER = """
import json, sys, ddpkit
@ddpkit.distributed(nproc_per_node=2, start_method=sys.argv[1])
def main():
    return [ddpkit.get_world_size(), sys.argv[1]]
print(json.dumps(main()))
"""


def run_python(folder: Path, *arguments: str) -> Any:
    finished = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return json.loads(finished.stdout)


@pytest.mark.parametrize("method", METHODS)
def test_unguarded_script_with_an_odd_name(tmp_path: Path, method: str) -> None:
    (tmp_path / "train-v2.py").write_text(UNGUARDED_SCRIPT)
    assert run_python(tmp_path, "train-v2.py", method) == {
        "decorator on top": "announced",
        "lambda argument": 42,
        "same class comes back": True,
        "closure": 42,
        "legacy": [[2, 0], [2, 1]],
    }


@pytest.mark.parametrize("method", MOSTLY_DRILLS)
def test_module_run_by_name_with_a_global_set_under_its_guard(tmp_path: Path, method: str) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mod.py").write_text(GUARDED_MODULE)
    output = run_python(tmp_path, "-m", "pkg.mod", method, "--learning-rate", "0.5")
    assert output == [0.5, 2]


@pytest.mark.parametrize("method", MOSTLY_DRILLS)
def test_program_on_the_command_line(tmp_path: Path, method: str) -> None:
    assert run_python(tmp_path, "-c", ONE_LINER, method) == [2, method]


@pytest.mark.parametrize("method", METHODS)
def test_argument_that_cannot_be_sent_is_named_before_any_process_starts(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    @ddpkit.distributed(nproc_per_node=2, start_method=method)
    def main(config: dict[str, Any]) -> None:
        raise AssertionError("the function ran")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", fail)
    with socket.socket() as unsendable, pytest.raises(ConfigError) as caught:
        main({"logging": {"target": unsendable}})
    assert "argument 'config'['logging']['target'] is a socket.socket" in str(caught.value)
