"""The verified fork after real work with real libraries, each in an interpreter of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpkit.threads import usable_cores
from tests.forking import needs_fork

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(120)]  # a busy machine starts slowly

ROOT = Path(__file__).parents[2]

# What runs after the work of a case. Whole numbers, so that the results are known to the last bit.
LAUNCH = """
import json, logging, os, sys
import torch
import torch.distributed as dist
from ddpkit.launch import forksafe
from ddpkit.testing import run_ranks


def work():
    matrix = torch.ones(300, 300)
    weight = torch.ones(8, 3, 3, 3, requires_grad=True)
    convolved = torch.nn.functional.conv2d(torch.ones(4, 3, 32, 32), weight)
    convolved.sum().backward()
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    parts = [matrix @ matrix, convolved.detach(), weight.grad, total]
    return [os.getppid(), torch.get_num_threads(), *(part.unique().tolist() for part in parts)]


class Lines(logging.Handler):
    lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def launch():
    Lines.lines.clear()
    reason = forksafe.prepare_fork()
    parents, *results = zip(*run_ranks(work))
    return {
        "reason": reason,
        "forked": [parent == os.getpid() for parent in parents],
        "results": results,
        "log": [line for line in Lines.lines if "not by fork" in line],
    }


logging.getLogger("ddpkit").addHandler(Lines())
logging.getLogger("ddpkit").setLevel(logging.DEBUG)
"""

# Both ranks alike: two threads, then every element of the product, of the convolution and of its
# weights' gradient, and the sum over ranks.
EXPECTED = [[2, 2], [[300], [300]], [[27], [27]], [[3600], [3600]], [[3], [3]]]

# -------------------------------------------------------------------------- work before a fork

MATMUL = """
import torch
matrix = torch.randn(800, 800, requires_grad=True)
(matrix @ matrix).sum().backward()
torch.ones(1 << 22).add_(1)
"""

ONE_THREAD = "import torch; torch.set_num_threads(1)" + MATMUL

FEWER_THREADS_THAN_BEFORE = MATMUL + "torch.set_num_threads(1); matrix @ matrix"

BLAS = """
import numpy, scipy.linalg
matrix = numpy.random.default_rng(0).random((1000, 1000))
scipy.linalg.inv(matrix @ matrix)
"""

# The workers stay when there is less for them to do.
LIMITED_BLAS = BLAS + "import threadpoolctl; threadpoolctl.threadpool_limits(1); matrix @ matrix"

SKLEARN = """
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
digits = load_digits()
KMeans(10, n_init=2, random_state=0).fit(digits.data)
HistGradientBoostingClassifier(max_iter=5).fit(digits.data, digits.target)
"""

GROUP_BY_HAND = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
hook = sys.excepthook
address = "tcp://127.0.0.1:0"
dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(50, 50))
PREPARE
model(torch.randn(20, 50)).sum().backward()
dist.destroy_process_group()
sys.excepthook = hook
"""

# A callback on a thread of gloo's that logs is a thread for Python ever after.
LOGGING_HOOK = GROUP_BY_HAND.replace(
    "PREPARE",
    """
import logging

def reduce_and_log(state, bucket):
    def log(future):
        logging.getLogger("train").info("reduced")
        return future.value()[0]
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(log)

logging.getLogger("train").setLevel(logging.INFO)
logging.getLogger("train").addHandler(logging.NullHandler())
model.register_comm_hook(None, reduce_and_log)
""",
)

FINISHED_LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
batches = iter(DataLoader(TensorDataset(torch.arange(40)), batch_size=4, num_workers=2))
assert len(list(batches)) == 10
"""

PREVIOUS_LAUNCH = """
import torch
from ddpkit.testing import run_ranks
assert run_ranks(lambda: torch.ones(1 << 20).sum().item()) == [1 << 20] * 2
"""

WATCHDOG = "import faulthandler; faulthandler.dump_traceback_later(300)" + MATMUL


def drill(*values: str, id: str) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.drill)


def run_python(*arguments: str, folder: Path = ROOT) -> str:
    """Run a program to its end; two threads for every process, however many ranks there are."""
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def launch_after(work: str) -> dict[str, Any]:
    """Do some work, then launch two ranks, and return what was found."""
    found: dict[str, Any] = json.loads(
        run_python("-W", "error", "-c", work + LAUNCH + "json.dump(launch(), sys.stdout)")
    )
    assert found["results"] == EXPECTED
    return found


# ----------------------------------------------------------------------------------- it forks


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(MATMUL + BLAS, id="a matmul in torch and one in numpy"),
        drill(ONE_THREAD, id="one thread from the beginning"),
        drill(FEWER_THREADS_THAN_BEFORE, id="one thread after several"),
        drill(LIMITED_BLAS, id="numpy with a limit on its threads"),
        drill(MATMUL + SKLEARN + MATMUL, id="scikit-learn between work in torch"),
        drill(GROUP_BY_HAND.replace("PREPARE", ""), id="a group and DDP by hand"),
        drill(LOGGING_HOOK, id="a DDP hook that logs"),
        drill(FINISHED_LOADER, id="a loader that has finished"),
        drill(PREVIOUS_LAUNCH + MATMUL + PREVIOUS_LAUNCH, id="earlier launches"),
        drill(WATCHDOG, id="with the watchdog of faulthandler"),
    ],
)
@needs_fork
@pytest.mark.skipif(usable_cores() < 2, reason="on one core there are no pools")
def test_ranks_are_forked_after(work: str) -> None:
    found = launch_after(work)
    assert (found["reason"], found["forked"]) == (None, [True, True])


# faulthandler does not know that a fork has no watchdog, and would wait for its end for ever.
CALL_IT_OFF = """
import faulthandler, json, os, sys, warnings
from ddpkit.testing import run_ranks

def arm_and_call_off():
    faulthandler.cancel_dump_traceback_later()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        faulthandler.dump_traceback_later(300)
    return os.getppid(), [str(warning.message) for warning in caught]

faulthandler.dump_traceback_later(300)
(parent, warned), _ = run_ranks(arm_and_call_off)
faulthandler.cancel_dump_traceback_later()
json.dump([parent == os.getpid(), warned], sys.stdout)
"""


@pytest.mark.drill
def test_a_forked_rank_does_not_wait_for_the_watchdog_of_its_parent() -> None:
    forked, (warned,) = json.loads(run_python("-W", "error", "-c", CALL_IT_OFF))
    assert forked
    assert "dump_traceback_later() does nothing in this forked process" in warned


UNDER_PYTEST = """
import os, torch
from ddpkit.launch import forksafe
from ddpkit.testing import run_ranks

def test_fork():
    torch.ones(1 << 22).add_(1)
    assert forksafe.prepare_fork() is None
    assert run_ranks(os.getppid) == [os.getpid()] * 2
"""


@pytest.mark.drill
def test_ranks_are_forked_under_the_watchdog_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(UNDER_PYTEST)
    options = ["-o", "faulthandler_timeout=30", "-p", "no:cacheprovider", "-q"]
    assert "1 passed" in run_python("-m", "pytest", *options, folder=tmp_path)


# ------------------------------------------------------------------------------ it does not fork

# Each of these stands in the way while its block lasts, and no longer. One program for all: what
# takes long is the start of the forkserver.
OBSTACLES = """
import contextlib, ctypes, io, threading, warnings
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


@contextlib.contextmanager
def python_thread():
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


@contextlib.contextmanager
def loader_at_work():
    batches = iter(DataLoader(TensorDataset(torch.arange(40)), batch_size=4, num_workers=2))
    next(batches)
    yield
    # A fork would hold the iterator too, and tell the workers to stop when it lets go of it.
    rest = [number for (batch,) in batches for number in batch.tolist()]
    assert rest == list(range(4, 40)), rest


@contextlib.contextmanager
def persistent_workers():
    dataset = TensorDataset(torch.arange(40))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    assert len(list(loader)) == 10
    yield
    assert len(list(loader)) == 10


@contextlib.contextmanager
def progress_bar():
    for _ in tqdm(range(10), file=io.StringIO()):
        pass
    yield  # the bar has ended, its monitor has not
    tqdm.monitor.exit()


@contextlib.contextmanager
def native_thread():
    # One of a C library, of which Python knows nothing. OpenBLAS has put its workers away for
    # earlier forks, and this must not pass for one of them.
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(600)) == 0
    yield
    libc.pthread_cancel(thread)
    libc.pthread_join(thread, None)


@contextlib.contextmanager
def inter_op_pool():
    # A child would wait for its threads, which are not in it. They never end.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out

        @torch.jit.script
        def apart(x: torch.Tensor) -> torch.Tensor:
            return torch.jit.wait(torch.jit.fork(torch.sin, x))

    assert apart(torch.zeros(1)).item() == 0
    yield


found = {}
for obstacle in map(globals().get, sys.argv[1:]):
    before = forksafe.prepare_fork()
    with obstacle():
        found[obstacle.__name__] = {**launch(), "before": before}
json.dump(found, sys.stdout)
"""

REASONS = {
    "python_thread": "1 more Python threads are running",
    "loader_at_work": "2 more Python threads are running",
    "persistent_workers": "2 more Python threads are running",
    "progress_bar": "1 more Python threads are running",
    "native_thread": "1 unknown native threads are running",
    "inter_op_pool": "unknown native threads are running: PTThreadPool",
}


@pytest.mark.drill
def test_ranks_are_not_forked_while_an_unknown_thread_is_there(tmp_path: Path) -> None:
    script = tmp_path / "obstacles.py"
    script.write_text(LAUNCH + OBSTACLES)
    found = json.loads(run_python("-W", "error", str(script), *REASONS))
    for obstacle, reason in REASONS.items():
        assert found[obstacle] == {
            "before": None,
            "reason": reason,
            "forked": [False, False],
            "results": EXPECTED,
            "log": [f"starting ranks by forkserver and not by fork, because {reason}"],
        }
