import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddpkit.group import process_group
from ddpkit.launch import forksafe
from ddpkit.launch.forksafe import ForkFacts, prepare_fork, reason_against_fork
from ddpkit.threads import usable_cores
from tests.forking import needs_fork

SAFE = ForkFacts(
    platform="linux",
    accelerator_in_use=False,
    group_is_open=False,
    python_threads=1,
    unpaused_openmp=(),
    native_threads=("python",),
    main_thread_name="python",
    openblas_workers=0,
)
LEFT_BY_A_GROUP = ("gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv")


# ------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    "facts",
    [
        SAFE,
        replace(SAFE, native_threads=("python", *LEFT_BY_A_GROUP, *LEFT_BY_A_GROUP)),
        replace(SAFE, native_threads=("python",) * 4, openblas_workers=3),
        # OpenBLAS may have fewer workers than it could have.
        replace(SAFE, native_threads=("python",) * 2, openblas_workers=3),
    ],
)
def test_safe(facts: ForkFacts) -> None:
    assert reason_against_fork(facts) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(SAFE, platform="darwin"), "Linux only, this is darwin"),
        (replace(SAFE, accelerator_in_use=True), "an accelerator was used"),
        (replace(SAFE, group_is_open=True), "a process group is open"),
        (replace(SAFE, python_threads=3), "2 more Python threads"),
        (replace(SAFE, unpaused_openmp=("libgomp.so.1",)), "OpenMP .* put away: libgomp.so.1"),
        (
            replace(SAFE, native_threads=("python", "cuda-EvtHandlr", "jemalloc_bg_thd")),
            "unknown native threads are running: cuda-EvtHandlr, jemalloc_bg_thd",
        ),
        (replace(SAFE, native_threads=("python",) * 3), "2 unknown native threads are running"),
        (
            replace(SAFE, native_threads=("python",) * 5, openblas_workers=3),
            "1 unknown native threads",
        ),
        (replace(SAFE, native_threads=("unknown (no /proc)",)), "unknown native threads"),
    ],
)
def test_refusals(facts: ForkFacts, reason: str) -> None:
    given = reason_against_fork(facts)
    assert given is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(given)


# ---------------------------------------------------------------- the facts of this process


@needs_fork
def test_this_process_can_be_forked_even_after_multi_threaded_work() -> None:
    torch.ones(1 << 22).add_(1)
    assert prepare_fork() is None


def test_another_python_thread_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forksafe, "_WAIT_FOR_THREADS", 0.02)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    reason = prepare_fork()
    release.set()
    thread.join()
    assert reason == "1 more Python threads are running"


@needs_fork
def test_a_thread_that_is_about_to_end_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forksafe, "_WAIT_FOR_THREADS", 20.0)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: release.set())
    monkeypatch.setattr(forksafe, "time", clock)
    assert prepare_fork() is None
    thread.join()


@needs_fork
def test_an_open_group_is_a_reason() -> None:
    with process_group(device="cpu"):
        assert prepare_fork() == "a process group is open in this process"
    assert prepare_fork() is None


def test_an_accelerator_context_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    reason = prepare_fork()
    assert reason is not None
    assert reason.startswith("an accelerator was used")


def test_an_open_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [*forksafe._loaded_libraries(), "/usr/lib/libcuda.so.535.54"]
    monkeypatch.setattr(forksafe, "_loaded_libraries", lambda: libraries)
    reason = prepare_fork()
    assert reason is not None
    assert reason.startswith("an accelerator was used, or its driver opened")


def test_another_kind_of_accelerator_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: True))
    assert forksafe._accelerator_in_use([])


def test_an_openmp_that_cannot_be_paused_is_a_reason_once_it_has_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libraries = ["/usr/lib/libgomp.so.1", "/usr/lib/libc.so.6"]
    monkeypatch.setattr(forksafe, "_pause", lambda path: False)
    names = ["python"]
    monkeypatch.setattr(forksafe, "_native_thread_names", lambda: tuple(names))
    monkeypatch.setattr(forksafe, "_thread_name", lambda task: "python")
    assert forksafe.pause_openmp(libraries) == ()
    names.append("python")
    assert forksafe.pause_openmp(libraries) == ("libgomp.so.1",)


@pytest.mark.parametrize(
    ("path", "pattern", "matches"),
    [
        ("/x/torch/lib/libgomp.so.1", forksafe._OPENMP, True),
        ("/x/torch/lib/libgomp-a34b3233.so.1", forksafe._OPENMP, True),
        ("/x/sklearn.libs/libgomp-a34b3233.so.1.0.0", forksafe._OPENMP, True),
        ("/x/lib/libiomp5.so", forksafe._OPENMP, True),
        ("/x/lib/libomp.so.5", forksafe._OPENMP, True),
        ("/x/lib/libompt_tool.so", forksafe._OPENMP, False),
        ("/x/lib/libc.so.6", forksafe._OPENMP, False),
        ("/x/numpy.libs/libscipy_openblas64_-ff651d7f.so", forksafe._OPENBLAS, True),
        ("/x/numpy.libs/libopenblas64_p-r0-0cf96a72.3.23.dev.so", forksafe._OPENBLAS, True),
        ("/usr/lib/libopenblas.so.0", forksafe._OPENBLAS, True),
        ("/usr/lib/libblas.so.3", forksafe._OPENBLAS, False),
        ("/usr/lib/libcuda.so.1", forksafe._CUDA_DRIVER, True),
        ("/x/nvidia/libcudart.so.12", forksafe._CUDA_DRIVER, False),
    ],
)
def test_names_of_libraries(path: str, pattern: re.Pattern[str], matches: bool) -> None:
    assert bool(pattern.search(path)) == matches


@pytest.mark.parametrize(
    ("state", "blocked", "matches"),
    [
        ("S (sleeping)", "fffffffe7ffbfeff", True),
        ("R (running)", "fffffffe7ffbfeff", False),  # the C library has just made it
        ("S (sleeping)", "0000000000010000", False),
    ],
)
def test_a_new_thread_is_not_taken_for_the_watchdog(
    state: str, blocked: str, matches: bool
) -> None:
    status = f"Name:\tpython\nState:\t{state}\nSigPnd:\t0\nSigBlk:\t{blocked}\n"
    assert forksafe._describes_watchdog(status) == matches


def test_every_thread_of_this_process_is_counted() -> None:
    release = threading.Event()
    before = Counter(forksafe._native_thread_names())
    thread = threading.Thread(target=release.wait)
    thread.start()
    after = Counter(forksafe._native_thread_names())
    release.set()
    thread.join()
    assert (after - before).total() >= 1


# ------------------------------------------------------------------------- the pause is real

PAUSE_AND_FORK = """
import os
import torch
from ddpkit.launch import forksafe

def count_threads():
    return len(os.listdir("/proc/self/task"))

alone = count_threads()
x = torch.randn(300, 300)
(x @ x).sum()
torch.ones(1 << 22).add_(1)
working = count_threads()
reason = forksafe.prepare_fork()
paused = count_threads()
pid = os.fork()
if pid == 0:
    weight = torch.randn(300, 300, requires_grad=True)
    (x @ weight).tanh().sum().backward()
    torch.ones(1 << 22).add_(1)
    os._exit(0 if bool((weight.grad.abs().sum() > 0)) and count_threads() > 1 else 1)
_, status = os.waitpid(pid, 0)
torch.ones(1 << 22).add_(1)
print(working > alone, paused < working, reason, status, count_threads() > 1)
"""


@needs_fork
@pytest.mark.skipif(usable_cores() < 2, reason="on one core there is no pool")
def test_the_pool_goes_away_and_a_fork_and_its_parent_have_their_own_again() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PAUSE_AND_FORK]
    folder = Path(forksafe.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=folder)
    assert done.stderr == ""
    assert done.stdout.split() == ["True", "True", "None", "0", "True"]
