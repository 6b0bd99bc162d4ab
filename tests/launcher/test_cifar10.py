"""The CIFAR-10 example on a tiny data set in CIFAR-10's own format, read by torchvision's class.

torchvision knows the files by their MD5 sums. A driver tells it those of the tiny ones, and then
runs the example, unchanged, as the main program. What a download would fetch is in the folder
already, so it only unpacks; the driver records which rank does that.
"""

import colorsys
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.launcher.test_examples import REPOSITORY, TORCHRUN, epochs_in, messages_in

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(120)]

CIFAR10 = str(REPOSITORY / "examples" / "cifar10.py")
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
LAST_LINE = re.compile(r"test accuracy: (\d+\.\d) % of (\d+) images")
QUICK = ["--epochs", "1", "--batch-size", "20", "--workers", "0"]

BATCH = 60  # images in each of the five training files
TEST = 51  # does not go into two equal parts

SETTINGS = """
import json, os, runpy, sys
from pathlib import Path
from torchvision.datasets import CIFAR10, cifar
from ddpkit import get_rank

for name, value in json.loads(Path("settings.json").read_text()).items():
    setattr(CIFAR10, name, value)

download = cifar.download_and_extract_archive


def recorded_download(*arguments, **options):
    with open("downloads.txt", "a") as record:
        record.write(f"rank {get_rank()}\\n")
    download(*arguments, **options)


cifar.download_and_extract_archive = recorded_download
"""

RUN = """
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Most of a run is the import of torch and torchvision, so the programs of one story are forked from
# a process that has done it. Each is a process of its own, with a status of its own. Unless frozen,
# what the imports left would be copied into each of them by the garbage collector.
RUN_SEVERAL = """
import gc

gc.freeze()
script, command_lines = sys.argv[1], json.loads(sys.argv[2])
for number, arguments in enumerate(command_lines):
    if os.fork() == 0:
        for descriptor, name in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    Path(f"{number}.status").write_text(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


class Outcome(NamedTuple):
    """How a program ended and what it wrote."""

    status: int
    stdout: str
    stderr: str

    def accuracy(self) -> float:
        """Return the accuracy of the last line; every test image must have been counted once."""
        assert self.status == 0, self.stderr
        assert messages_in(self.stderr) == ""
        assert len(LAST_LINE.findall(self.stdout)) == 1
        last = LAST_LINE.fullmatch(self.stdout.splitlines()[-1])
        assert last is not None
        assert int(last[2]) == TEST
        return float(last[1])


# --------------------------------------------------------------------------- the tiny data set


def make_archive(folder: Path) -> dict[str, Any]:
    """Write a data set as CIFAR-10's archive, and return the attributes of torchvision's class."""
    source = folder / "source" / FOLDER
    source.mkdir(parents=True)
    generator = np.random.default_rng(0)
    sizes = {f"data_batch_{number}": BATCH for number in range(1, 6)}
    for name, size in {**sizes, "test_batch": TEST}.items():
        (source / name).write_bytes(pickle.dumps(make_batch(name, size, generator), protocol=2))
    names = [f"colour {label}" for label in range(10)]
    meta = {"num_cases_per_batch": BATCH, "label_names": names, "num_vis": 3072}
    (source / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    fetched = folder / "data" / ARCHIVE
    fetched.parent.mkdir()
    with tarfile.open(fetched, "w:gz") as archive:
        archive.add(source, arcname=FOLDER)
    return {
        "url": "http://127.0.0.1:9/",  # where nobody answers
        "tgz_md5": md5(fetched),
        "train_list": [[name, md5(source / name)] for name in sizes],
        "test_list": [["test_batch", md5(source / "test_batch")]],
        "meta": {
            "filename": "batches.meta",
            "key": "label_names",
            "md5": md5(source / "batches.meta"),
        },
    }


def make_batch(name: str, size: int, generator: np.random.Generator) -> dict[str, Any]:
    """Make images whose class is their colour, under a noise: rows of 1024 red, green and blue."""
    labels = [index % 10 for index in range(size)]
    colours = [[200 * part for part in colorsys.hsv_to_rgb(label / 10, 1, 1)] for label in labels]
    noise = generator.uniform(0, 55, size=(size, 3072))
    data = (np.repeat(np.array(colours), 1024, axis=1) + noise).astype(np.uint8)
    filenames = [f"{index}.png" for index in range(size)]
    return {"batch_label": name, "labels": labels, "data": data, "filenames": filenames}


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


# --------------------------------------------------------------------------------- running it


def prepare(folder: Path) -> None:
    (folder / "settings.json").write_text(json.dumps(make_archive(folder)))
    (folder / "driver.py").write_text(SETTINGS + RUN)
    (folder / "several.py").write_text(SETTINGS + RUN_SEVERAL)


def downloads_in(folder: Path) -> list[str]:
    """Return who downloaded, in the order of time."""
    return (folder / "downloads.txt").read_text().splitlines()


def run(folder: Path, *arguments: str) -> Outcome:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return Outcome(finished.returncode, finished.stdout, finished.stderr)


def run_several(folder: Path, *command_lines: list[str]) -> list[Outcome]:
    """Run the example with each of these command lines, one after the other."""
    driver = run(folder, "several.py", CIFAR10, json.dumps(command_lines))
    assert driver == Outcome(0, "", "")
    return [
        Outcome(
            int((folder / f"{number}.status").read_text()),
            (folder / f"{number}.out").read_text(),
            (folder / f"{number}.err").read_text(),
        )
        for number in range(len(command_lines))
    ]


class Story(NamedTuple):
    """One folder in which the data set was missing, was downloaded, and was found."""

    missing: Outcome
    downloaded: Outcome
    resumed: Outcome
    fake: Outcome
    downloads: list[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("cifar10")
    two = ["--nproc-per-node", "2", *QUICK]
    prepare(folder)
    missing, downloaded, resumed, fake = run_several(
        folder,
        two,
        [*two, "--download"],
        [*two, "--epochs", "2", "--resume"],
        [*two, "--fake", "--limit", str(TEST), "--checkpoint", "fake.pt"],
    )
    return Story(missing, downloaded, resumed, fake, downloads_in(folder))


def test_missing_data_end_it_with_one_line(story: Story) -> None:
    assert story.missing.status == 1
    assert story.missing.stdout == ""
    (line,) = story.missing.stderr.splitlines()
    assert "'data'" in line
    assert "--download" in line
    assert "--fake" in line


def test_one_rank_downloads_and_both_learn(story: Story) -> None:
    assert story.downloads == ["rank 0"]
    assert epochs_in(story.downloaded.stdout) == [1]
    assert story.downloaded.accuracy() > 30  # guessing would be right 10 times in 100


def test_resumed_with_the_data_that_are_there(story: Story) -> None:
    assert epochs_in(story.resumed.stdout) == [2]
    assert story.resumed.accuracy() > 30


def test_fake_data_need_no_files(story: Story) -> None:
    assert epochs_in(story.fake.stdout) == [1]
    assert story.fake.accuracy() < 50  # their classes are drawn by lot


# ---------------------------------------------------------------------------- the longer runs


@pytest.mark.drill
def test_torchrun_downloads_once(tmp_path: Path) -> None:
    prepare(tmp_path)
    outcome = run(tmp_path, *TORCHRUN, "2", "driver.py", CIFAR10, *QUICK, "--download")
    assert downloads_in(tmp_path) == ["rank 0"]
    assert outcome.accuracy() > 30


@pytest.mark.drill
def test_one_rank_alone(tmp_path: Path) -> None:
    prepare(tmp_path)
    one = ["--nproc-per-node", "1", *QUICK, "--download"]
    outcome = run(tmp_path, "driver.py", CIFAR10, *one)
    assert downloads_in(tmp_path) == ["rank 0"]
    assert outcome.accuracy() > 30


@pytest.mark.drill
def test_a_resumed_run_learns_what_an_unbroken_one_learns(tmp_path: Path) -> None:
    # Workers draw the crops from a stream of their own for each epoch, so they are the same ones.
    two = ["--nproc-per-node", "2", "--batch-size", "20", "--workers", "1", "--limit", "100"]
    prepare(tmp_path)
    outcomes = run_several(
        tmp_path,
        [*two, "--download", "--epochs", "2", "--checkpoint", "unbroken.pt"],
        [*two, "--epochs", "1", "--checkpoint", "resumed.pt"],
        [*two, "--epochs", "2", "--checkpoint", "resumed.pt", "--resume"],
    )
    assert [epochs_in(outcome.stdout) for outcome in outcomes] == [[1, 2], [1], [2]]
    unbroken, resumed = (torch.load(tmp_path / f"{n}.pt")["model"] for n in ("unbroken", "resumed"))
    assert [name for name in unbroken if not torch.equal(unbroken[name], resumed[name])] == []
