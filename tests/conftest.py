"""Guards around every test: what it opened it must close, and a leak fails the test."""

import tempfile
from collections.abc import Iterator

import pytest

import ddpkit  # noqa: F401  (sets its one variable now, so that no test is blamed for it)
from tests import guards


@pytest.fixture(autouse=True, scope="session")
def _private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this session, and what it starts, a temporary folder that no other program writes to."""
    folder = str(tmp_path_factory.mktemp("t"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def _no_leaks(_private_temporary_folder: None) -> Iterator[None]:
    """Fail a test that leaves something behind (see tests/guards.py)."""
    before = guards.take_snapshot()
    yield
    leaks = guards.find_lasting_leaks(before)
    if leaks:
        guards.restore(before)
        pytest.fail("the test leaks:\n  " + "\n  ".join(leaks), pytrace=False)
