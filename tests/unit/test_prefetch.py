"""Moving batches: what is moved, and in which order things are asked of an accelerator."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpkit import prefetch
from ddpkit.prefetch import move, moved_ahead, moves_ahead


@pytest.mark.parametrize(
    ("device", "expected"),
    [(None, False), ("cpu", False), ("meta", False), ("mps", False), ("cuda", True)],
)
def test_copies_run_ahead_where_there_are_streams(device: str | None, expected: bool) -> None:
    assert moves_ahead(None if device is None else torch.device(device)) == expected


def test_on_the_cpu_nothing_is_done() -> None:
    batch = {"x": [torch.zeros(1)]}
    assert move(batch, torch.device("cpu")) is batch
    assert move(batch, None) is batch


class Batch:
    """What a tensor on an accelerator does, written down."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number = number
        self.log = log

    def to(self, device: torch.device, *, non_blocking: bool) -> "Batch":
        assert (device.type, non_blocking) == ("cuda", True)
        self.log.append(f"copy {self.number}")
        return self


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def record_event(self) -> str:
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for the {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    current = [Stream("main", log)]
    accelerator = SimpleNamespace(
        current_stream=lambda device: current[0],
        set_stream=lambda stream: current.__setitem__(0, stream),
    )
    fake = SimpleNamespace(
        Stream=lambda device: Stream("side", log), accelerator=accelerator, Tensor=torch.Tensor
    )
    monkeypatch.setattr(prefetch, "torch", fake)
    return log


def pairs(count: int, log: list[str]) -> Iterator[tuple[Any, str]]:
    for number in range(count):
        log.append(f"load {number}")
        yield Batch(number, log), f"note {number}"


def test_the_next_batch_is_copied_before_this_one_is_used(log: list[str]) -> None:
    for batch, note in moved_ahead(pairs(3, log), torch.device("cuda:0")):
        assert note == f"note {batch.number}"
        log.append(f"use {batch.number}")
    wait = "main waits for the event of side"
    assert log == [
        *("load 0", "copy 0", "load 1", "copy 1", wait, "use 0"),
        *("load 2", "copy 2", wait, "use 1", wait, "use 2"),
    ]


def test_an_error_comes_after_the_batches_before_it(log: list[str]) -> None:
    def broken() -> Iterator[tuple[Any, str]]:
        yield from pairs(2, log)
        raise OSError("unreadable")

    seen = []
    with pytest.raises(OSError, match="unreadable"):  # noqa: PT012
        for batch, _ in moved_ahead(broken(), torch.device("cuda:0")):
            seen.append(batch.number)
    assert seen == [0, 1]
    assert list(moved_ahead(iter(()), torch.device("cuda:0"))) == []


def test_memory_is_kept_for_the_stream_that_uses_it(log: list[str]) -> None:
    class Recorded(torch.Tensor):
        """A tensor that says it lies elsewhere."""

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda:0")

        def to(self, *_: Any, **__: Any) -> "Recorded":
            return self

        def record_stream(self, stream: Any) -> None:
            log.append(f"kept for {stream.name}")

    batch = {"pair": (torch.zeros(1).as_subclass(Recorded), "name")}
    found = list(moved_ahead(iter([(batch, None)]), torch.device("cuda:0")))
    assert found == [(batch, None)]
    assert log == ["main waits for the event of side", "kept for main"]
