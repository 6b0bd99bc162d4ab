import faulthandler
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import ddpkit
from ddpkit.launch.stacks import summarize

TORCH = Path(torch.__file__).parent
LAUNCH = Path(ddpkit.__file__).parent / "launch"

DUMP = f"""\
Thread 0x00007f0000000002 (most recent call first):
  File "{LAUNCH}/worker.py", line 99 in watch
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f0000000003 [loader] (most recent call first):
  File "/home/u/data.py", line 5 in prefetch

Current thread 0x00007f0000000001 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3913 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/u/train.py", line 41 in train
  File "{LAUNCH}/job.py", line 73 in __call__
  File "{LAUNCH}/worker.py", line 200 in _report
  File "/home/u/caller.py", line 3 in <module>
"""


def main_thread(*frames: tuple[str, int, str]) -> str:
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    return "\n".join(["Thread 0x0000000000000001 (most recent call first):", *lines, ""])


def place(*frames: tuple[str, int, str]) -> str:
    stack = summarize(main_thread(*frames), 1)
    assert stack is not None
    return stack.place


def test_the_main_thread_comes_first_without_what_stands_below_the_function() -> None:
    stack = summarize(DUMP, 0x7F0000000001)
    assert stack is not None
    assert stack.place == "all_reduce at train.py:41"
    assert stack.text.splitlines() == [
        "main thread (most recent call first):",
        f'  File "{TORCH}/distributed/distributed_c10d.py", line 3913 in all_reduce',
        f'  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper',
        '  File "/home/u/train.py", line 41 in train',
        "another thread:",
        '  File "/home/u/data.py", line 5 in prefetch',
    ]


@pytest.mark.parametrize("dump", ["", "Thread 0x00007f0000000009 (most recent call first):\n"])
def test_a_text_without_the_main_thread_is_no_stack(dump: str) -> None:
    assert summarize(dump, 1) is None


def test_a_place_in_the_users_own_code_is_named_by_its_function() -> None:
    assert place(("/home/u/data.py", 7, "load"), ("/home/u/train.py", 3, "main")) == (
        "load at data.py:7"
    )


def test_a_place_in_a_call_of_ddpkit_is_named_by_the_call() -> None:
    agree = f"{LAUNCH.parent}/agree.py"
    frames = [(agree, 300, "_meet"), (agree, 80, "barrier"), ("/home/u/train.py", 57, "main")]
    assert place(*frames) == "barrier at train.py:57"


def test_a_place_with_library_code_alone_is_named_all_the_same() -> None:
    assert place((f"{TORCH}/a.py", 1, "f")) == "f at a.py:1"
    assert place((f"{LAUNCH}/worker.py", 1, "_run")) == "_run at worker.py:1"


def test_a_rank_that_has_no_frame_yet_is_before_its_function() -> None:
    assert place() == "before the function"


def test_what_faulthandler_writes_is_understood() -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        dump = os.read(file.fileno(), 1 << 20).decode()
    stack = summarize(dump, threading.get_ident())
    assert stack is not None
    assert "in test_what_faulthandler_writes_is_understood" in stack.text
