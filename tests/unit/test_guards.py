import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.guards import find_lasting_leaks, find_leaks, restore, take_snapshot

REPOSITORY = Path(__file__).parents[2]


def test_nothing_happened_is_no_leak() -> None:
    assert find_leaks(take_snapshot(), take_snapshot()) == []


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "old")
    monkeypatch.setenv("REMOVED", "old")
    before = take_snapshot()
    monkeypatch.setenv("CHANGED", "new")
    monkeypatch.delenv("REMOVED")
    monkeypatch.setenv("ADDED", "new")

    assert find_leaks(before, take_snapshot()) == [
        "environment variable ADDED was None and is 'new' now",
        "environment variable CHANGED was 'old' and is 'new' now",
        "environment variable REMOVED was 'old' and is None now",
    ]
    restore(before)
    assert find_leaks(before, take_snapshot()) == []


def test_process_and_that_it_may_take_a_moment_to_end() -> None:
    before = take_snapshot()
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        (leak,) = find_leaks(before, take_snapshot())
        assert leak.startswith(f"a process is left: {process.pid}: ")
        assert find_lasting_leaks(before, patience=0.05) != []
        threading.Timer(0.1, process.communicate).start()
        assert find_lasting_leaks(before, patience=20) == []


def test_process_of_a_process(tmp_path: Path) -> None:
    before = take_snapshot()
    inner = [sys.executable, "-c", "input()"]
    outer = f"import subprocess; subprocess.Popen({inner!r}); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", outer], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(find_leaks(before, take_snapshot())) == 2
        process.communicate()
    assert find_lasting_leaks(before, patience=20) == []


def test_zombie() -> None:
    before = take_snapshot()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert f"{pid}: a zombie" in find_leaks(before, take_snapshot())[0]
    os.waitpid(pid, 0)


def test_thread() -> None:
    before = take_snapshot()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    assert find_leaks(before, take_snapshot()) == ["a thread is left: forgotten"]
    stop.set()
    thread.join()


def test_signal_handler_and_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    before = take_snapshot()
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    leaks = find_leaks(before, take_snapshot())
    signal.signal(signal.SIGUSR1, previous)
    assert leaks == [
        "the handler of SIGUSR1 was not restored",
        "the handler of sys.excepthook was not restored",
    ]


def test_listening_socket_but_not_a_connected_one() -> None:
    before = take_snapshot()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            (leak,) = find_leaks(before, take_snapshot())
        assert f"{server.getsockname()}" in leak


def test_file_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = take_snapshot()
    Path("last.pt").touch()
    Path(".hidden").touch()
    assert find_leaks(before, take_snapshot()) == ["a file is left: last.pt"]


def test_file_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = take_snapshot()
    (tmp_path / "ddpkit-stacks").touch()
    (tmp_path / "somebody-else").touch()
    assert find_leaks(before, take_snapshot()) == [f"a file is left: {tmp_path}/ddpkit-stacks"]


def test_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = take_snapshot()
    monkeypatch.chdir(tmp_path)
    (leak,) = find_leaks(before, take_snapshot())
    assert leak == f"the current folder was {before.folder} and is {tmp_path} now"
    restore(before)
    assert str(Path.cwd()) == before.folder


def test_group() -> None:
    before = dataclasses.replace(take_snapshot(), group=None)
    after = dataclasses.replace(before, group="gloo with 1 ranks")
    assert find_leaks(before, after) == [
        "the default process group was None and is gloo with 1 ranks now"
    ]


LEAKING_TESTS = """
import os, torch.distributed

def test_variable():
    os.environ["RANK"] = "1"

def test_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

def test_innocent():
    assert "RANK" not in os.environ and not torch.distributed.is_initialized()
"""


def test_a_leaking_test_fails_and_the_next_one_is_not_blamed(tmp_path: Path) -> None:
    program = tmp_path / "test_leaking.py"
    program.write_text(LEAKING_TESTS)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(program)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "environment variable RANK was None and is '1' now" in result.stdout
    assert "the default process group was None and is gloo with 1 ranks now" in result.stdout
    assert "3 passed, 2 errors" in result.stdout
