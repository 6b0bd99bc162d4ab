"""The examples in docstrings do what they show, and every public name has one."""

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import ddpkit
import ddpkit.testing

# One is a program, the other is for forkservers alone: it has the process that imports it end
# without an exit status.
NOT_FOR_IMPORT = {"ddpkit.__main__", "ddpkit.launch.preload"}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(ddpkit.__path__, "ddpkit.")
    if module.name not in NOT_FOR_IMPORT
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_happens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


PUBLIC = [
    *(getattr(ddpkit, name) for name in ddpkit.__all__),
    *(getattr(ddpkit.testing, name) for name in ddpkit.testing.__all__),
]


@pytest.mark.parametrize("item", PUBLIC, ids=lambda item: item.__name__)
def test_public_names_have_examples(item: object) -> None:
    assert ">>> " in (inspect.getdoc(item) or "")
