import functools
import inspect
import logging
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import distributed, group, process_group
from ddpkit import entry as entries
from ddpkit.entry import DistributedFunction, choose_nproc, make_options
from ddpkit.errors import ConfigError
from ddpkit.launch.job import Job, Options
from ddpkit.topology import Topology


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    launched: list[Job] = []

    def note(job: Job) -> list[Any]:
        launched.append(job)
        return [f"rank {rank}" for rank in range(job.nproc)]

    monkeypatch.setattr("ddpkit.launch.start.launch", note)
    return launched


@distributed(device="cpu")
def train(epochs: int = 3, *, rate: float = 0.1) -> str:
    """Train the model."""
    return f"{epochs} epochs at {rate} on rank {dist.get_rank()}"


# ----------------------------------------------------------------------------- how it looks


def test_the_function_keeps_its_looks() -> None:
    names = {name: getattr(train, name) for name in ("__name__", "__qualname__", "__module__")}
    assert names == {"__name__": "train", "__qualname__": "train", "__module__": __name__}
    assert train.__doc__ == "Train the model."
    assert list(inspect.signature(train).parameters) == ["epochs", "rate"]
    assert inspect.signature(train) == inspect.signature(train.__wrapped__)
    assert inspect.isfunction(train.__wrapped__)
    assert "train" in repr(train)


def test_it_can_be_used_without_brackets() -> None:
    @distributed
    def function() -> int:
        return 1

    assert isinstance(function, DistributedFunction)
    assert function.options == Options()


def test_it_can_be_used_as_a_function() -> None:
    def function() -> int:
        return 1

    assert distributed(function, nproc_per_node=2).options.nproc_per_node == 2


def test_options_of_a_decorated_function_can_be_changed() -> None:
    other = train.with_options(nproc_per_node=2, timeout=timedelta(minutes=1))
    assert (other.options.nproc_per_node, other.options.timeout) == (2, 60.0)
    assert other.options.device == "cpu"
    assert train.options.nproc_per_node is None
    assert other.__wrapped__ is train.__wrapped__


def test_decorating_twice_changes_the_options() -> None:
    again = distributed(train, nproc_per_node=2)
    assert isinstance(again, DistributedFunction)
    assert again.__wrapped__ is train.__wrapped__
    assert again.options.nproc_per_node == 2


def test_another_decorator_below_keeps_its_own_wrapped() -> None:
    def inner() -> int:
        return 1

    @distributed(device="cpu")
    @functools.wraps(inner)
    def outer() -> int:
        return inner() + 1

    assert outer() == 2


class Trainer:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @distributed(device="cpu")
    def fit(self, x: int) -> int:
        """Fit."""
        return self.factor * x

    @staticmethod
    @distributed(device="cpu")
    def static(x: int) -> int:
        return x

    @classmethod
    def make(cls) -> "Trainer":
        return cls(3)


def test_a_method() -> None:
    assert Trainer(3).fit(4) == 12
    assert Trainer.fit(Trainer(3), 4) == 12
    assert Trainer(3).fit.run_all(4) == [12]
    assert Trainer(3).fit.with_options(nproc_per_node=1)(4) == 12
    assert Trainer.fit.__doc__ == "Fit."
    assert Trainer.static(4) == 4


train_more = train.with_options(nproc_per_node=2, timeout=7)
plain_abs = distributed(abs, device="cpu")
partly_given = distributed(functools.partial(divmod, 7), device="cpu")


def test_a_decorated_function_can_be_pickled_by_its_name() -> None:
    sent = pickle.loads(pickle.dumps(train))
    assert sent.__wrapped__ is train.__wrapped__
    assert (sent.options, sent.__name__, sent.__doc__) == (train.options, "train", train.__doc__)
    assert sent(2) == "2 epochs at 0.1 on rank 0"
    assert pickle.loads(pickle.dumps(train_more)).options == train_more.options
    assert pickle.loads(pickle.dumps(plain_abs))(-3) == 3
    assert pickle.loads(pickle.dumps(partly_given))(2) == (3, 1)


def test_a_bound_method_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Trainer(3).fit))(4) == 12


def test_a_decorated_function_of_main_goes_by_name_for_pickle_and_by_value_for_ranks() -> None:
    program = """
import pickle, ddpkit

@ddpkit.distributed(device="cpu")
def depth(left):
    "Count."
    return 1 + depth(left - 1) if left else len(depth.__doc__)

assert pickle.loads(pickle.dumps(depth)).__wrapped__ is depth.__wrapped__
for method in ("forkserver", "auto"):
    two = depth.with_options(nproc_per_node=2, start_method=method)
    assert two.run_all(2) == [8, 8]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=55)


def test_a_method_of_several_ranks_takes_its_object_along(launches: list[Job]) -> None:
    trainer = Trainer(3)
    trainer.fit.with_options(nproc_per_node=2)(4)
    assert launches[0].args == (trainer, 4)


# --------------------------------------------------------------------------------- options


def test_the_options_of_the_record_are_those_of_the_overloads() -> None:
    overload = inspect.getdoc(distributed)
    assert overload is not None
    for field in fields(Options):
        assert f"- {field.name}:" in overload


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"nproc_per_node": 0},
            "nproc_per_node=0 was given, but it must be a whole number of at least 1",
        ),
        ({"nproc_per_node": -1}, "nproc_per_node=-1"),
        ({"nproc_per_node": 1.5}, "nproc_per_node=1.5"),
        ({"nproc_per_node": True}, "nproc_per_node=True"),
        ({"nproc_per_node": "2"}, "nproc_per_node='2'"),
        ({"timeout": 0}, "timeout=0 was given"),
        ({"timeout": timedelta(seconds=-1)}, "more than 0 seconds"),
        ({"timeout": float("inf")}, "timeout=inf was given.* at most 1e"),
        ({"timeout": 1e12}, "timeout=1000000000000.0 was given"),
        ({"timeout": timedelta.max}, "more than 0 seconds and at most"),
        ({"timeout": True}, "timeout=True was given, but it must be seconds or a timedelta"),
        ({"timeout": "10"}, "timeout='10' was given, but it must be seconds or a timedelta"),
        ({"time_limit": float("inf")}, "time_limit=inf was given"),
        ({"shutdown_grace": -1.0}, "shutdown_grace=-1.0"),
        ({"shutdown_grace": float("nan")}, "shutdown_grace=nan was given.* at least 0"),
        ({"shutdown_grace": float("inf")}, "shutdown_grace=inf"),
        ({"shutdown_grace": "5"}, "shutdown_grace='5' was given, but it must be seconds or"),
        ({"shutdown_grace": None}, "shutdown_grace=None was given"),
        ({"backend": "glooo"}, "backend='glooo' was given, but the backends here are gloo,"),
        ({"backend": "cpu:gloo,cuda:nccll"}, "backend='cpu:gloo,cuda:nccll'"),
        ({"backend": 5}, "backend=5 was given"),
        ({"device": "bogus"}, "device='bogus' was given, but it must be a device such as"),
        ({"device": 1.5}, "device=1.5"),
        ({"start_method": "thread"}, "start_method='thread' was given; on this machine it must be"),
        ({"start_method": None}, "start_method=None"),
        ({"log_dir": 5}, "log_dir=5 was given, but it must be a path"),
        ({"init_group": "no"}, "init_group='no' was given, but it must be True or False"),
        ({"nprocs": 2}, "no option nprocs. Its options are nproc_per_node, backend"),
        ({"nprocs": 2, "grace": 1}, "no option grace, nprocs"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_options(**options)
    with pytest.raises(ConfigError, match=message):
        distributed(**options)(train)
    with pytest.raises(ConfigError, match=message):
        train.with_options(**options)


def test_times_may_be_timedeltas() -> None:
    options = make_options(
        timeout=timedelta(minutes=2), time_limit=timedelta(hours=1), shutdown_grace=timedelta(0)
    )
    assert (options.timeout, options.time_limit, options.shutdown_grace) == (120.0, 3600.0, 0.0)


@pytest.mark.parametrize(
    "options", [{"backend": "cpu:gloo,cuda:nccl"}, {"device": torch.device("cpu")}]
)
def test_options_in_their_longer_forms(options: dict[str, Any]) -> None:
    assert options.items() <= vars(make_options(**options)).items()


async def async_function() -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (async_function, r"^async_function is an async function.* asyncio\.run\(\)"),
        (generator, r"^generator is a generator function.* return a list"),
        (async_generator, r"^async_generator is a generator function"),
        (functools.partial(generator), "is a generator function"),
        (staticmethod(generator), "is a staticmethod already.*Write @staticmethod above"),
    ],
)
def test_a_function_whose_body_would_run_later_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        distributed(function)
    with pytest.raises(ConfigError, match=message):
        distributed(nproc_per_node=2)(function)


def test_a_daemonic_process_is_told_that_it_may_start_no_ranks(
    monkeypatch: pytest.MonkeyPatch, launches: list[Job]
) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"train\(\) was called in .* a daemonic .*ProcessPool"):
        train.with_options(nproc_per_node=2)()
    assert launches == []
    assert train(2) == "2 epochs at 0.1 on rank 0"


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"distributed\(2\) was given.*nproc_per_node"):
        distributed(2)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("explicit", "variable", "expected"),
    [(None, None, None), (3, None, 3), (None, "2", 2), (3, "2", 3), (3, "nonsense", 3)],
)
def test_number_of_ranks(explicit: int | None, variable: str | None, expected: int | None) -> None:
    assert choose_nproc(explicit, variable) == expected


@pytest.mark.parametrize("variable", ["0", "-1", "two", "", "1.5", "²"])
def test_a_wrong_variable_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPKIT_NPROC_PER_NODE", variable)
    with pytest.raises(ConfigError, match=f"DDPKIT_NPROC_PER_NODE='{variable}' was given"):
        train()


def test_the_variable_is_the_default(monkeypatch: pytest.MonkeyPatch, launches: list[Job]) -> None:
    monkeypatch.setenv("DDPKIT_NPROC_PER_NODE", "3")
    assert train() == "rank 0"
    assert launches[0].nproc == 3
    train.with_options(nproc_per_node=2)()
    assert launches[1].nproc == 2


@pytest.mark.parametrize(
    ("device", "accelerator", "count", "expected"),
    [
        (None, None, 0, 1),
        (None, "cuda", 4, 4),
        ("cuda", "cuda", 4, 4),
        ("cuda:1", "cuda", 4, 1),
        ("cpu", "cuda", 4, 1),
    ],
)
def test_default_by_the_devices(
    device: str | None,
    accelerator: str | None,
    count: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entries, "accelerator_type", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert entries._count_devices(Options(device=device)) == expected


def test_more_ranks_than_devices_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, launches: list[Job]
) -> None:
    monkeypatch.setattr(entries, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="shows 2"):
        distributed(lambda: 1, nproc_per_node=3)()
    assert launches == []


# ----------------------------------------------------------------------------- where it runs


@pytest.mark.parametrize(
    ("source", "group_is_open", "where"),
    [
        ("none", False, "start"),
        ("none", True, "inside"),
        ("torchrun", False, "launcher"),
        ("torchrun", True, "inside"),
        ("environment", False, "launcher"),
        ("ddpkit", False, "inside"),
        ("ddpkit", True, "inside"),
    ],
)
def test_where_a_call_runs(source: str, group_is_open: bool, where: str) -> None:
    assert entries._decide(Options(), Topology(source=source), group_is_open) == where


def test_the_number_of_ranks_inside_a_rank() -> None:
    with process_group(device="cpu"):
        assert train.with_options(nproc_per_node=1)(2) == "2 epochs at 0.1 on rank 0"
        with pytest.raises(ConfigError, match=r"nproc_per_node=3 was given.* world of 1"):
            train.with_options(nproc_per_node=3)()


def test_one_rank_runs_in_this_process(launches: list[Job]) -> None:
    seen: list[int] = []

    @distributed(nproc_per_node=1, device="cpu")
    def function() -> list[int]:
        seen.append(os.getpid())
        return seen

    assert function() is seen
    assert seen == [os.getpid()]
    assert launches == []


def test_the_longest_time_limit_can_be_waited_for() -> None:
    assert train.with_options(timeout=1e9, time_limit=1e9)(1) == "1 epochs at 0.1 on rank 0"


def test_one_rank_has_a_group_while_it_runs() -> None:
    assert train(2, rate=0.5) == "2 epochs at 0.5 on rank 0"
    assert not dist.is_initialized()


def test_one_rank_raises_the_exception_itself() -> None:
    error = KeyError("x")

    @distributed(nproc_per_node=1, device="cpu")
    def function() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        function()
    assert caught.value is error
    assert error.__cause__ is None


def test_run_all_of_one_rank() -> None:
    assert train.run_all(1) == ["1 epochs at 0.1 on rank 0"]


def test_several_ranks_are_started(launches: list[Job]) -> None:
    two = train.with_options(nproc_per_node=2)
    assert two(5, rate=0.5) == "rank 0"
    assert two.run_all(5) == ["rank 0", "rank 1"]
    job = launches[0]
    assert (job.function, job.args, job.kwargs) == (train.__wrapped__, (5,), {"rate": 0.5})
    assert (job.nproc, job.options) == (2, two.options)


def test_one_rank_without_a_group_has_the_variables_of_a_rank() -> None:
    environment = dict(os.environ)

    @distributed(nproc_per_node=1, init_group=False)
    def legacy() -> tuple[int, int]:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return int(os.environ["LOCAL_RANK"]), int(value)

    hook = sys.excepthook
    assert legacy() == (0, 1)
    sys.excepthook = hook  # torch's own function sets it
    assert dict(os.environ) == environment


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    train()
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------------- under a launcher


@pytest.fixture
def hand_set_world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    yield
    group._state.servers.pop(("127.0.0.1", port), None)


@pytest.mark.usefixtures("hand_set_world_of_one")
def test_the_numbers_of_the_launcher_win(
    launches: list[Job], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ddpkit.entry"):
        assert train.with_options(nproc_per_node=4)(2) == "2 epochs at 0.1 on rank 0"
    assert launches == []
    assert [record.getMessage() for record in caplog.records if record.name == "ddpkit.entry"] == [
        "nproc_per_node=4 is ignored: environment started 1 ranks on this node"
    ]


@pytest.mark.usefixtures("hand_set_world_of_one")
def test_run_all_under_a_launcher() -> None:
    assert train.run_all(2) == ["2 epochs at 0.1 on rank 0"]
