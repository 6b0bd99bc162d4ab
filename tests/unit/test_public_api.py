import ast
import compileall
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ddpkit

# What must not be paid for by those who only import ddpkit.
FORBIDDEN = ("torchvision", "tqdm", "sklearn", "torch._dynamo", "pytest")

MEASURE_IMPORT = f"""
import json, sys, time
import torch
before = set(sys.modules)
started = time.perf_counter()
import ddpkit
seconds = time.perf_counter() - started
from ddpkit import *
new = set(sys.modules) - before
print(json.dumps({{"seconds": seconds, "forbidden": sorted(new.intersection({FORBIDDEN!r}))}}))
"""


def imported_for_type_checkers() -> dict[str, str]:
    """Return what `ddpkit/__init__.py` shows to type checkers: names, and their modules."""
    tree = ast.parse(Path(ddpkit.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    shown = next(node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in shown.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_all_is_sorted_and_is_what_can_be_imported() -> None:
    assert sorted(set(ddpkit.__all__)) == ddpkit.__all__
    assert set(ddpkit.__all__) == imported_for_type_checkers().keys()
    assert set(ddpkit.__all__) <= set(dir(ddpkit))


@pytest.mark.parametrize(("name", "module"), imported_for_type_checkers().items())
def test_names_are_those_that_type_checkers_see(name: str, module: str) -> None:
    assert getattr(ddpkit, name) is getattr(importlib.import_module(module), name)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'ddpkit' has no attribute 'dpp'"):
        ddpkit.dpp  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'dpp' from 'ddpkit'"):
        from ddpkit import dpp  # type: ignore[attr-defined]  # noqa: F401


def test_every_public_name_has_a_docstring() -> None:
    undocumented = [name for name in ddpkit.__all__ if not getattr(ddpkit, name).__doc__]
    assert undocumented == []


def test_importing_is_cheap_and_brings_no_extra() -> None:
    # As for people who have installed it, with compiled files: not every machine writes them.
    compileall.compile_dir(Path(ddpkit.__file__).parent, quiet=1)
    command = [sys.executable, "-c", MEASURE_IMPORT]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(result.stdout)
    print(f"import ddpkit after import torch: {1000 * measured['seconds']:.0f} ms")  # noqa: T201
    assert measured["forbidden"] == []
    assert measured["seconds"] < 0.05
    assert result.stderr == ""


def test_version_is_a_version() -> None:
    assert ddpkit.__version__.split(".")[0].isdigit()
