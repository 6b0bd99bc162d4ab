"""What is published: the wheel and the sdist, and the tests and types of what they install."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.launcher, pytest.mark.drill, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
# A part of each kind: pure functions, ranks, files, data workers.
TESTS = ("unit/test_sampler.py", "unit/test_reduce.py", "multiproc/test_launch.py")


@dataclass(frozen=True)
class Built:
    """The two files."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the sdist, and the wheel from it, as pip does."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    run(command, folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in an environment that has all else of this one, and return its bin."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    run([*pip, "--target", str(packages), str(built.wheel)], folder)
    # After its own packages, so that what is installed here in another way is not found first.
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def run(command: list[str], folder: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**clean, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    names = names_in_wheel(built.wheel)
    inside = {name for name in names if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "ddpkit").rglob("*.py")}
    assert inside == sources | {"ddpkit/py.typed"}
    about = {name.split(".dist-info/")[1] for name in names - inside}
    assert about == {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE", "entry_points.txt"}


def test_the_sdist_has_what_its_tests_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "Makefile", "pyproject.toml"):
        assert name in names
    for folder in ("ddpkit", "tests", "examples", "benchmarks", "docs"):
        kept = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
        assert kept <= names


def test_the_installed_package_passes_its_tests(
    built: Built, installed: Path, tmp_path: Path
) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    (unpacked / "ddpkit").rename(unpacked / "not-to-be-imported")
    python = str(installed / "python")
    where = run([python, "-c", "import ddpkit; print(ddpkit.__file__)"], unpacked)
    assert Path(where.strip()).is_relative_to(installed.parent)
    tests = [f"tests/{name}" for name in TESTS]
    chosen = ("-m", "not drill and not gpu", "-p", "no:cacheprovider")
    assert " passed" in run([python, "-m", "pytest", "-q", *chosen, *tests], unpacked)


def test_the_types_are_complete(installed: Path, tmp_path: Path) -> None:
    path = f"{installed}{os.pathsep}{os.environ['PATH']}"
    pyright = [sys.executable, "-m", "pyright", "--verifytypes", "ddpkit", "--ignoreexternal"]
    report = run(pyright, tmp_path, PATH=path, VIRTUAL_ENV=str(installed.parent))
    assert "Type completeness score: 100%" in report, report
