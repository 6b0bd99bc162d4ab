"""Objects and tensors of two ranks and three, brought together."""

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import (
    all_ranks,
    barrier,
    collect,
    delivery,
    gather,
    gather_cat,
    get_rank,
    sharded_loader,
)
from ddpkit.errors import WorkerError
from ddpkit.testing import run_ranks

HERE = Path(__file__).name
UINT4: torch.dtype = vars(torch)["uint4"]  # the stubs do not have it
EVERY_DTYPE = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, UINT4, torch.bits16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.complex32, torch.complex64, torch.complex128),
    *filter(None, [getattr(torch, "float8_e8m0fnu", None)]),
    *filter(None, [getattr(torch, "float4_e2m1fn_x2", None)]),
]
ROWS = (2, 0, 5)


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what a call raises; ranks can return them and go on."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    return "", ""


def still_in_step() -> bool:
    """Tell whether later calls get what belongs to them."""
    rank = get_rank()
    found = gather_cat(torch.full((rank + 1,), rank), to_all=True).tolist()
    objects = gather(rank, to_all=True)
    on_rank0 = gather(f"rank {rank}")
    world = dist.get_world_size()
    return all_ranks(
        found == [r for r in range(world) for _ in range(r + 1)]
        and objects == list(range(world))
        and on_rank0 == (None if rank else [f"rank {r}" for r in range(world)])
    )


class CannotBeRebuilt:
    """Can be pickled on one rank and raises on the one that reads it."""

    def __reduce__(self) -> Any:
        return open_the_missing, ()


def open_the_missing() -> object:
    raise FileNotFoundError("vocabulary.txt")


class RebuiltSlowly:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __setstate__(self, state: dict[str, float]) -> None:
        time.sleep(state["seconds"])
        self.__dict__ = state


# --------------------------------------------------------------------------------------- gather


def test_objects_come_in_the_order_of_ranks_and_to_rank_0_alone() -> None:
    def function() -> Any:
        return gather({"rank": get_rank(), "f": lambda: get_rank()}), gather("x" * get_rank())

    first, *others = run_ranks(function, 3)
    assert [found["rank"] for found in first[0]] == [0, 1, 2]
    assert first[1] == ["", "x", "xx"]
    assert others == [(None, None)] * 2


def test_to_all_gives_every_rank_the_list() -> None:
    def function() -> list[Any]:
        return gather(None if get_rank() == 1 else (get_rank(), torch.ones(2)), to_all=True)

    for first, second, third in run_ranks(function, 3):
        assert first[0] == 0
        assert second is None
        assert torch.equal(third[1], torch.ones(2))


@pytest.mark.parametrize("to_all", [False, True])
def test_the_own_object_is_itself_and_the_others_are_copies(to_all: bool) -> None:
    def function() -> bool:
        mine = [get_rank()]
        found = gather(mine, to_all=to_all)
        return found is None or (found[get_rank()] is mine and found[1 - get_rank()] is not mine)

    assert run_ranks(function) == [True, True]


@pytest.mark.parametrize("to_all", [False, True])
def test_large_objects_come_in_chunks(monkeypatch: pytest.MonkeyPatch, to_all: bool) -> None:
    monkeypatch.setattr(delivery, "_CHUNK", 1000)

    def function() -> bool:
        found = gather([bytes([get_rank()]) * n for n in range(300)], to_all=to_all)
        return found == [[bytes([rank]) * n for n in range(300)] for rank in range(3)]

    assert run_ranks(function, 3) == [True, to_all, to_all]


def test_other_ranks_receive_nothing() -> None:
    def function() -> list[str]:
        called: list[str] = []
        for name in ("send", "isend", "recv", "irecv", "broadcast", "gather", "all_gather"):
            original = getattr(dist, name)

            def noted(*args: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
                called.append(_name)
                return _original(*args, **more)

            setattr(dist, name, noted)
        gather("x")
        gather_cat(torch.ones(2))
        return called

    assert run_ranks(function, 3) == [["recv"] * 4, ["isend"] * 2, ["isend"] * 2]


@pytest.mark.drill
def test_a_rank_does_not_hold_the_data_of_others() -> None:
    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def function() -> float:
        large = get_rank() == 2
        objects = b"x" * (100 * 2**20 if large else 0)
        tensor = torch.ones(25 * 2**20 if large else 0)
        before = peak()
        gather(objects)
        gather_cat(tensor)
        return peak() - before

    on_rank0, on_rank1, _ = run_ranks(function, 3)
    assert on_rank0 > 90
    assert on_rank1 < 30


@pytest.mark.parametrize("to_all", [False, True])
def test_what_cannot_be_pickled_on_one_rank_is_an_error_on_all(to_all: bool) -> None:
    def function() -> tuple[tuple[str, str], bool]:
        mine = threading.Lock() if get_rank() == 1 else "fine"
        return outcome(lambda: gather(mine, to_all=to_all)), still_in_step()

    for (kind, text), in_step in run_ranks(function, 3):
        assert kind == "ConfigError"
        assert text.startswith("[rank 1/3] gather")
        assert "got a _thread.lock, which cannot be sent" in text
        assert in_step


@pytest.mark.parametrize("to_all", [False, True])
def test_what_cannot_be_rebuilt_is_an_error_on_all_and_the_rest_is_taken(to_all: bool) -> None:
    def function() -> tuple[tuple[str, str], bool]:
        mine = CannotBeRebuilt() if get_rank() == 1 else "x" * 1000
        return outcome(lambda: gather(mine, to_all=to_all)), still_in_step()

    results = run_ranks(function, 3)
    assert results == [results[0]] * 3
    (kind, text), in_step = results[0]
    assert kind == "ConfigError"
    assert "rank 1 has sent cannot be rebuilt on rank 0 (FileNotFoundError: vocabulary.t" in text
    assert in_step


@pytest.mark.parametrize("to_all", [False, True])
def test_a_rank_without_the_memory_is_an_error_on_all(
    monkeypatch: pytest.MonkeyPatch, to_all: bool
) -> None:
    def no_room(self: object, rank: int) -> Any:
        raise MemoryError("no room")

    def function() -> tuple[list[tuple[str, str]], bool]:
        with pytest.MonkeyPatch.context() as patch:
            if get_rank() == 0:
                patch.setattr(collect._Objects, "places", no_room)
                patch.setattr(collect._Rows, "places", no_room)
            objects = outcome(lambda: gather("x" * 1000, to_all=to_all))
            tensors = outcome(lambda: gather_cat(torch.ones(1000), to_all=to_all))
        return [objects, tensors], still_in_step()

    assert run_ranks(function, 3) == [([("MemoryError", "no room")] * 2, True)] * 3


def test_what_was_not_announced_is_not_read() -> None:
    def function() -> tuple[tuple[str, str], bool]:
        with pytest.MonkeyPatch.context() as patch:
            if get_rank() == 1:
                patch.setattr(collect, "_digest", lambda _: b"another")
            found = outcome(lambda: gather(CannotBeRebuilt()))
        return found, still_in_step()

    for (kind, text), in_step in run_ranks(function):
        assert kind == "GroupError"
        assert "What came from rank 1 is not what it has announced" in text
        assert in_step


@pytest.mark.drill
def test_rank_0_may_work_longer_than_the_time_out_of_collectives() -> None:
    def function() -> int:
        found = gather(RebuiltSlowly(0.8 * get_rank()))  # 2.4 s in all
        return 0 if found is None else len(found)

    assert run_ranks(function, 3, timeout=1.0) == [3, 0, 0]


def test_different_calls_are_named_with_their_places() -> None:
    def function() -> list[tuple[str, str]]:
        rank = get_rank()
        ones = torch.ones(1)
        return [
            outcome(lambda: gather(1, to_all=rank == 1)),
            outcome(lambda: gather(1) if rank else barrier()),
            outcome(lambda: gather_cat(ones) if rank else gather(ones)),
        ]

    for results in run_ranks(function):
        for (kind, text), names in zip(
            results,
            [("gather", "gather(to_all=True)"), ("barrier", "gather"), ("gather", "gather_cat")],
            strict=True,
        ):
            assert kind == "GroupError"
            assert f"rank 0 is in {names[0]} ({HERE}:" in text or "rank 1 is in" in text
            assert f"{names[1]} ({HERE}:" in text


@pytest.mark.parametrize("to_all", [False, True])
def test_a_rank_that_dies_while_it_sends_ends_the_wait_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_all: bool
) -> None:
    monkeypatch.setattr(delivery, "_CHUNK", 1000)
    whole = delivery.Delivery._outgoing

    def half(self: Any, own: Any) -> Any:
        pieces = list(whole(self, own))
        yield from pieces[: len(pieces) // 2]
        os.kill(os.getpid(), signal.SIGKILL)

    def function() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if get_rank() == 1:
            delivery.Delivery._outgoing = half  # type: ignore[method-assign]
        kind, text = outcome(lambda: gather("x" * 100_000, to_all=to_all))
        (tmp_path / f"{get_rank()}").write_text(f"{kind}: {text}")
        os._exit(0)  # what is left of the group is not the subject here

    started = time.monotonic()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        run_ranks(function, 3, shutdown_grace=30.0)
    assert time.monotonic() - started < 30
    for rank in (0, 2):
        seen = (tmp_path / f"{rank}").read_text()
        assert re.match(r"(RuntimeError|Dist\w+Error|PeerError): ", seen)
        assert re.search("closed by peer|reset by peer|Broken pipe|has ended without a word", seen)


# ----------------------------------------------------------------------------------- gather_cat


def rows_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Ragged rows of random bits, every second column of a wider tensor where that can be."""
    generator = torch.Generator().manual_seed(rank)
    shape = (ROWS[rank], 6 * dtype.itemsize)
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, shape, generator=generator)
    wide = bits.to(torch.uint8).view(dtype)
    return wide if dtype == UINT4 else wide[:, ::2]


def as_bits(tensor: torch.Tensor) -> list[int]:
    if not tensor.numel():
        return []
    bits: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return bits


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_every_type_keeps_every_bit() -> None:
    def function() -> list[Any]:
        found = []
        for dtype in EVERY_DTYPE:
            mine = rows_of(get_rank(), dtype)
            before = as_bits(mine)
            result = gather_cat(mine, to_all=True)
            assert as_bits(mine) == before
            found.append((result.dtype, tuple(result.shape), as_bits(result)))
            on_rank0 = gather_cat(mine)
            assert (on_rank0 is None) == (get_rank() > 0)
            assert on_rank0 is None or as_bits(on_rank0) == as_bits(result)
        return found

    expected = []
    for dtype in EVERY_DTYPE:
        parts = [rows_of(rank, dtype) for rank in range(3)]
        bits = [bit for part in parts for bit in as_bits(part)]
        expected.append((dtype, (sum(ROWS), parts[0].shape[1]), bits))
    assert run_ranks(function, 3) == [expected] * 3


def test_shapes_flags_and_structures() -> None:
    def function() -> list[Any]:
        rank = get_rank()
        scalars = gather_cat(torch.tensor(rank + 0.5, requires_grad=True), to_all=True)
        flags = torch.tensor([complex(rank, 1)]).conj()
        parts: Any = {"imag": flags.imag, "conj": flags, "none": (torch.ones(0, 2), [])}
        mixed = gather_cat(parts, to_all=True)
        image = torch.full((rank, 2, 1, 2), rank).to(memory_format=torch.channels_last)
        images = gather_cat(image, to_all=True)
        nothing: Any = gather_cat((torch.ones(0, 3), []))
        return [
            *(scalars.tolist(), scalars.requires_grad, mixed["imag"].tolist()),
            *(mixed["conj"].tolist(), tuple(mixed["none"][0].shape), mixed["none"][1]),
            *(tuple(images.shape), images.sum().item()),
            None if nothing is None else (tuple(nothing[0].shape), nothing[1]),
        ]

    first, second = run_ranks(function)
    assert first[:6] == [[0.5, 1.5], False, [-1.0, -1.0], [0 - 1j, 1 - 1j], (0, 2), []]
    assert first[6:] == [(1, 2, 1, 2), 4, ((0, 3), [])]
    assert second == [*first[:-1], None]


@pytest.mark.parametrize("to_all", [False, True])
def test_tensors_come_in_chunks_also_by_way_of_another_device(
    monkeypatch: pytest.MonkeyPatch, to_all: bool
) -> None:
    monkeypatch.setattr(delivery, "_CHUNK", 1000)

    def function() -> list[bool]:
        rank = get_rank()
        value: Any = {"a": torch.full((100 * rank + 7, 9), rank), "b": torch.ones(rank)}
        found = []
        for device in (torch.device("cpu"), torch.device("cpu", 0)):  # tensors say "cpu" alone
            monkeypatch.setattr(collect, "communication_device", lambda device=device: device)
            result = gather_cat(value, to_all=to_all)
            expected = torch.cat([torch.full((100 * r + 7, 9), r) for r in range(3)])
            found.append(result is not None and torch.equal(result["a"], expected))
        return found

    first, *others = run_ranks(function, 3)
    assert first == [True, True]
    assert others == [[to_all, to_all]] * 2


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4)), ["(2, 3)", "(2, 4)", "float32"]),
        ((torch.ones(2), torch.ones(0).double()), ["torch.float32 (2,)", "torch.float64 (0,)"]),
        ((torch.ones(2), torch.tensor(1.0)), ["(2,)", "()"]),
        (({"a": torch.ones(2)}, {"b": torch.ones(2)}), ["value['a']", "value['b']"]),
        ((torch.ones(2), []), ["rank 0: value torch.float32 (2,)", "rank 1: nothing"]),
    ],
    ids=["trailing", "type", "0-d", "key", "nothing"],
)
@pytest.mark.parametrize("to_all", [False, True])
def test_what_does_not_fit_raises_on_every_rank_and_leaves_the_group_usable(
    values: tuple[Any, Any], told: list[str], to_all: bool
) -> None:
    def function() -> tuple[tuple[str, str], bool]:
        return outcome(lambda: gather_cat(values[get_rank()], to_all=to_all)), still_in_step()

    first, second = run_ranks(function)
    assert first == second
    (kind, text), in_step = first
    assert kind == "GroupError"
    assert all(part in text for part in told)
    assert in_step


def test_a_value_that_is_no_tensor_on_one_rank_is_an_error_on_all() -> None:
    def function() -> tuple[list[tuple[str, str]], bool]:
        value: Any = [torch.ones(1)] if get_rank() == 0 else [torch.eye(2).to_sparse()]
        number: Any = 3 if get_rank() else torch.ones(1)
        return [outcome(lambda: gather_cat(value)), outcome(lambda: gather_cat(number))], (
            still_in_step()
        )

    for (sparse, number), in_step in run_ranks(function):
        assert sparse[0] == number[0] == "ConfigError"
        assert sparse[1].startswith("[rank 1/2] value[0] is a tensor of layout torch.sparse_coo")
        assert number[1].startswith("[rank 1/2] value is a int")
        assert in_step


# -------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("size", [23, 3, 1])
def test_predictions_come_in_the_order_of_the_dataset(size: int) -> None:
    def predict(inputs: torch.Tensor) -> torch.Tensor:
        return inputs.square() - 3

    def evaluate() -> torch.Tensor | None:
        loader = sharded_loader([float(n) for n in range(size)], batch_size=4, uneven="exact")
        predictions = [predict(inputs) for inputs in loader]
        return gather_cat(torch.cat([torch.empty(0, dtype=torch.float64), *predictions]))

    first, *others = run_ranks(evaluate, 3)
    assert first is not None
    assert torch.equal(first, predict(torch.arange(float(size), dtype=torch.float64)))
    assert others == [None, None]
