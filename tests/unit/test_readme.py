"""What README and the list of modules show must be what the files hold."""

from __future__ import annotations

import re
from pathlib import Path

import ddpkit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_diff_is_that_of_the_examples() -> None:
    blocks = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    lines = blocks[0].splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert before in (ROOT / "examples" / "single_device.py").read_text()
    assert after in (ROOT / "examples" / "digits.py").read_text()


def test_every_public_name_is_mentioned() -> None:
    assert [name for name in ddpkit.__all__ if name not in README] == []


def test_the_architecture_lists_every_module() -> None:
    modules = {path.name for path in (ROOT / "ddpkit").rglob("*.py")}
    assert {name for name in modules if name not in ARCHITECTURE} == set()
