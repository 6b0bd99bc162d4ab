import compileall
import inspect
import json
import subprocess
import sys
from pathlib import Path

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
new = set(sys.modules) - before
print(json.dumps({{"seconds": seconds, "forbidden": sorted(new.intersection({FORBIDDEN!r}))}}))
"""


def test_all_is_sorted_and_is_what_can_be_imported() -> None:
    public = {
        name
        for name, value in vars(ddpkit).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert sorted(set(ddpkit.__all__)) == ddpkit.__all__
    assert set(ddpkit.__all__) == public


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
    # The target is 50 ms; a busy machine may take much longer.
    assert measured["seconds"] < 0.5
    assert result.stderr == ""


def test_version_is_a_version() -> None:
    assert ddpkit.__version__.split(".")[0].isdigit()
