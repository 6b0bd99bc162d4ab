import dataclasses
import functools
import io
import json
import socket
import subprocess
import sys
import threading
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch

import ddpkit
from ddpkit.errors import ConfigError, WorkerError
from ddpkit.serialize import check_sendable, dump_value, load_value, record_exception


def send(value: Any) -> Any:
    return load_value(dump_value(value))


def raised(error: BaseException) -> BaseException:
    """Give an exception a traceback."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


# -------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("value", [None, 3, "text", [1, {"a": (2.5, b"x")}], {1, 2}, Path("a")])
def test_plain_values(value: object) -> None:
    assert send(value) == value


def test_a_closure() -> None:
    step = 3

    def add(x: int) -> int:
        return x + step

    assert send(add)(4) == 7


def test_a_lambda_in_a_container() -> None:
    assert send({"transform": lambda x: 2 * x})["transform"](4) == 8


def test_a_function_that_names_a_module_of_a_class_of_its_own() -> None:
    def precision() -> bool:
        return torch.backends.cudnn.allow_tf32

    assert type(torch.backends.cudnn) is not ModuleType
    assert send(precision)() is torch.backends.cudnn.allow_tf32


def test_a_recursive_closure() -> None:
    def factorial(n: int) -> int:
        return 1 if n == 0 else n * factorial(n - 1)

    assert send(factorial)(5) == 120


def test_a_tensor_keeps_its_data_dtype_and_need_for_gradients() -> None:
    again = send(torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True))
    assert torch.equal(again, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert again.requires_grad


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor])
def test_a_tensor_of_an_accelerator_arrives_on_the_cpu(
    kind: type[torch.Tensor], requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = kind(torch.ones(2)).requires_grad_(requires_grad)
    moved: list[torch.Tensor] = []
    to_cpu = torch.Tensor.cpu

    def note(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        return to_cpu(tensor)

    # Without an accelerator, this one tensor says that it is on one.
    monkeypatch.setattr("ddpkit.serialize._on_accelerator", lambda other: other is tensor)
    monkeypatch.setattr(torch.Tensor, "cpu", note)
    again = send(tensor)
    assert len(moved) == 1
    assert type(again) is kind
    assert again.requires_grad == requires_grad
    assert torch.equal(again, torch.ones(2))


def test_a_module_keeps_its_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    again = send(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_shared_parameters_stay_shared() -> None:
    layer = torch.nn.Linear(2, 2)
    first, second = send([layer, layer])
    assert first.weight is second.weight


@pytest.fixture
def notebook_cell() -> Iterator[dict[str, Any]]:
    """Names that were defined in `__main__` as a notebook does it: by exec, without a file."""
    source = """
import dataclasses
SCALE = 10

@dataclasses.dataclass
class Config:
    width: int

def scaled(config):
    return SCALE * config.width

def fail(config):
    raise KeyError(config.width)
"""
    main = sys.modules["__main__"]
    cell = ModuleType("__main__")
    sys.modules["__main__"] = cell
    exec(compile(source, "cell-7.py", "exec"), vars(cell))
    yield vars(cell)
    sys.modules["__main__"] = main


def test_functions_of_main_go_by_value_with_their_globals(notebook_cell: dict[str, Any]) -> None:
    data = dump_value((notebook_cell["scaled"], notebook_cell["Config"](4)))
    in_a_fresh_process = """
import sys
from ddpkit.serialize import load_value
function, config = load_value(sys.stdin.buffer.read())
print(function(config), type(config).__name__)
"""
    command = [sys.executable, "-c", in_a_fresh_process]
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["40", "Config"]


def test_a_class_of_main_comes_back_as_the_same_class(notebook_cell: dict[str, Any]) -> None:
    assert type(send(notebook_cell["Config"](4))) is notebook_cell["Config"]


def test_the_file_name_survives_in_tracebacks(notebook_cell: dict[str, Any]) -> None:
    function = send(notebook_cell["fail"])
    with pytest.raises(KeyError) as caught:
        function(notebook_cell["Config"](4))
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.name) == ("cell-7.py", 13, "fail")


def test_the_file_name_of_an_inner_function_survives() -> None:
    def outer() -> Callable[[], str]:
        def inner() -> str:
            return sys._getframe().f_code.co_filename

        return inner

    assert send(outer)()() == __file__


def test_an_unpicklable_value_raises_its_own_error() -> None:
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
        dump_value(threading.Lock())


# ---------------------------------------------------------------------------------- exceptions


class TwoArgumentsError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class KeywordOnlyError(ValueError):
    def __init__(self, *, field: str) -> None:
        super().__init__(f"bad {field}")
        self.field = field


class NoSuperError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


class QuitError(SystemExit):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


class SlotsError(Exception):
    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        super().__init__("slots")
        self.place = place


class BrokenStrError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class BrokenReprError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class WithLockError(Exception):
    def __init__(self) -> None:
        super().__init__("busy")
        self.lock = threading.Lock()


class OwnReduceError(Exception):
    def __init__(self, connection: object, name: str) -> None:
        super().__init__(name)
        self.connection = connection
        self.name = name

    def __reduce__(self) -> Any:
        return type(self), (None, self.name)


class RefusesToBeRebuiltError(Exception):
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("cannot be rebuilt")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        TwoArgumentsError(7, "disk"),
        KeywordOnlyError(field="lr"),
        NoSuperError(3),
        QuitError(3, "done"),
        SystemExit("text"),
        SystemExit(),
        KeyboardInterrupt(),
        StopIteration(5),
        AttributeError("no name"),
        ImportError("no module", name="nothing", path="there"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        SyntaxError("bad", ("file.py", 3, 2, "x = = 1")),
        json.JSONDecodeError("no value", "{", 1),
        subprocess.CalledProcessError(2, ["ls"], output=b"out", stderr=b"err"),
        subprocess.TimeoutExpired(["ls"], 3.0),
        torch.cuda.OutOfMemoryError("out of memory"),
        torch.distributed.DistBackendError("connection lost"),
        WorkerError("nested launch", rank=1, exit_code=7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_with_its_type_arguments_and_attributes(error: BaseException) -> None:
    again = record_exception(raised(error)).rebuild()
    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    for name in ("code", "name", "path", "value", "start", "lineno", "filename", "text", "errno"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_an_os_error_keeps_file_name_and_number() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Path("/nowhere/file").read_bytes()
    again = record_exception(caught.value).rebuild()
    assert type(again) is FileNotFoundError
    assert (again.errno, again.filename) == (2, "/nowhere/file")
    assert again.strerror == caught.value.strerror


def test_a_subclass_of_os_error_with_another_constructor() -> None:
    class StorageError(OSError):
        def __init__(self, bucket: str) -> None:
            super().__init__(5, "unreachable", bucket)
            self.bucket = bucket

    again = record_exception(raised(StorageError("b1"))).rebuild()
    assert isinstance(again, StorageError)
    assert (again.errno, again.filename, again.bucket) == (5, "b1", "b1")


def test_an_exception_keeps_what_is_in_its_slots() -> None:
    again = record_exception(raised(SlotsError("here"))).rebuild()
    assert isinstance(again, SlotsError)
    assert again.place == "here"


def test_an_exception_keeps_its_notes() -> None:
    error = ValueError("x")
    error.__notes__ = ["in batch 7"]  # add_note() is of Python 3.11
    again = record_exception(raised(error)).rebuild()
    assert getattr(again, "__notes__", None) == ["in batch 7"]


def test_an_exception_says_itself_how_it_is_pickled() -> None:
    again = record_exception(raised(OwnReduceError(threading.Lock(), "db"))).rebuild()
    assert isinstance(again, OwnReduceError)
    assert (again.connection, again.name) == (None, "db")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
def test_an_exception_group_keeps_its_members() -> None:
    kind: Any = __builtins__["ExceptionGroup"]  # type: ignore[index]
    members = [TwoArgumentsError(1, "a"), KeyError("b")]
    again: Any = record_exception(raised(kind("two", members))).rebuild()
    assert type(again) is kind
    assert [type(member) for member in again.exceptions] == [TwoArgumentsError, KeyError]
    assert again.exceptions[0].reason == "a"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
def test_a_subclass_of_an_exception_group() -> None:
    base: Any = __builtins__["ExceptionGroup"]  # type: ignore[index]

    class StepError(base):  # type: ignore[misc]
        step = 0

    error = StepError("step", [KeyError("b")])
    error.step = 7
    again: Any = record_exception(raised(error)).rebuild()
    assert (type(again), again.step, str(again)) == (StepError, 7, str(error))


def test_cause_and_context_arrive() -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            try:
                raise TwoArgumentsError(1, "second")
            except TwoArgumentsError as second:
                raise ValueError("third") from second

    with pytest.raises(ValueError, match="third") as caught:
        fail()
    again = record_exception(caught.value).rebuild()
    assert again is not None
    assert isinstance(again.__cause__, TwoArgumentsError)
    assert isinstance(again.__cause__.__context__, KeyError)
    assert again.__suppress_context__


def test_from_none_arrives() -> None:
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("shown") from None
    except ValueError as error:
        again = record_exception(error).rebuild()
    assert again is not None
    assert again.__suppress_context__
    assert again.__cause__ is None


def test_a_cycle_of_causes_arrives() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    again = record_exception(raised(first)).rebuild()
    assert again is not None
    assert again.__cause__ is not None
    assert again.__cause__.__cause__ is again


def test_an_exception_that_holds_itself_arrives() -> None:
    error = ValueError("x")
    error.origin = error  # type: ignore[attr-defined]
    again: Any = record_exception(raised(error)).rebuild()
    assert again.origin is again


def test_an_exception_of_a_local_class_arrives() -> None:
    class LocalError(Exception):
        pass

    assert isinstance(record_exception(raised(LocalError("x"))).rebuild(), LocalError)


@pytest.mark.parametrize("error", [WithLockError(), RefusesToBeRebuiltError("busy")])
def test_what_cannot_be_rebuilt_arrives_as_text(error: Exception) -> None:
    record = record_exception(raised(error))
    assert record.rebuild() is None
    assert record.summary.endswith(f"{type(error).__name__}: busy")
    assert f"{type(error).__name__}: busy" in record.traceback


def test_a_cause_that_cannot_be_sent_does_not_lose_the_text() -> None:
    error = ValueError("x")
    error.__cause__ = WithLockError()
    record = record_exception(raised(error))
    assert "WithLockError: busy" in record.traceback
    assert record.summary == "ValueError: x"


def test_a_broken_str_does_not_hide_the_failure() -> None:
    record = record_exception(raised(BrokenStrError("x")))
    assert record.summary.endswith("BrokenStrError: <str() failed with RuntimeError>")
    assert "BrokenStrError" in record.traceback
    assert isinstance(record.rebuild(), BrokenStrError)


def test_a_broken_repr_does_not_hide_the_failure() -> None:
    group = BaseException(BrokenReprError("x"))
    assert record_exception(raised(group)).type_name == "BaseException"


def test_a_summary_without_a_message_is_the_type() -> None:
    assert record_exception(raised(KeyboardInterrupt())).summary == "KeyboardInterrupt"


def test_the_traceback_begins_in_the_users_code() -> None:
    def users_function() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        users_function()
    text = record_exception(caught.value).traceback
    assert "in users_function" in text
    assert text.startswith("Traceback (most recent call last)")
    assert text.rstrip().endswith("KeyError: 'x'")


def test_the_traceback_leaves_out_the_frames_of_ddpkit_above_the_users_function() -> None:
    class Failing:
        def __reduce__(self) -> Any:
            raise KeyError("x")

    try:
        dump_value(Failing())
    except KeyError as error:
        error.__traceback__ = cast(Any, error.__traceback__).tb_next  # this test's own frame
        text = record_exception(error).traceback
    assert str(Path(ddpkit.__file__).parent) not in text
    assert "in __reduce__" in text


# ----------------------------------------------------------------------------------- the check


@dataclasses.dataclass
class Config:
    width: int
    loader: Any


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with socket.socket() as opened:
        yield opened


def closure_over(value: object) -> Callable[[], object]:
    return lambda: value


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda x: x, "data"),
        (lambda x: {"train": x}, r"data\['train'\]"),
        (lambda x: {7: x}, r"data\[7\]"),
        (lambda x: [1, x], r"data\[1\]"),
        (lambda x: (1, [2, {"a": x}]), r"data\[1\]\[1\]\['a'\]"),
        (lambda x: frozenset([x]), r"data\{\.\.\.\}"),
        (lambda x: Config(3, x), r"data\.loader"),
        (lambda x: Config(3, {"x": x}), r"data\.loader\['x'\]"),
        (Holder, r"data\.value"),
        (lambda x: Holder([Holder(x)]), r"data\.value\[0\]\.value"),
        (closure_over, "data.<closure value>"),
        (lambda x: {"f": closure_over([x])}, r"data\['f'\].<closure value>\[0\]"),
    ],
)
def test_what_cannot_be_sent_is_named_with_path_and_type(
    connection: socket.socket, wrap: Callable[[object], object], path: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{path} is a socket.socket, which cannot be sent"):
        check_sendable({"fine": 1, "data": wrap(connection)})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (threading.Lock(), "_thread.lock"),
        ((n for n in range(3)), "generator"),
        (sys.stdout.buffer, "_io."),
    ],
    ids=["lock", "generator", "file"],
)
def test_other_kinds_that_cannot_be_sent(value: object, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^data is a {kind}"):
        check_sendable({"data": value})


def test_a_part_of_a_partial_that_cannot_be_sent_is_named(connection: socket.socket) -> None:
    with pytest.raises(ConfigError, match=r"^data.* is a .*cannot be sent"):
        check_sendable({"data": functools.partial(print, file=connection)})


def test_an_error_of_the_users_reduce_is_shown() -> None:
    class Failing:
        def __reduce__(self) -> Any:
            raise KeyError("no way")

    with pytest.raises(ConfigError, match=r"Failing.*KeyError: 'no way'"):
        check_sendable({"data": Failing()})


def test_a_self_containing_list_can_be_checked(connection: socket.socket) -> None:
    endless: list[object] = []
    endless.append(endless)
    check_sendable({"data": endless})
    endless.append(connection)
    with pytest.raises(ConfigError, match="cannot be sent"):
        check_sendable({"data": endless})


def test_what_can_be_sent_passes() -> None:
    model = torch.nn.Linear(2, 2)
    data = {"model": model, "array": np.ones(3), "f": lambda: model, "text": "x", "bytes": b"x"}
    check_sendable({"data": data, "buffer": io.BytesIO(b"x")})


def test_an_array_of_objects_is_looked_into() -> None:
    array = np.empty(1, dtype=object)
    array[0] = threading.Lock()
    with pytest.raises(ConfigError, match="ndarray"):
        check_sendable({"data": array})


@pytest.mark.parametrize(
    "big",
    [
        torch.zeros(16 << 20, dtype=torch.uint8),
        torch.nn.Parameter(torch.zeros(4 << 20)),
        np.zeros(16 << 20, dtype=np.uint8),
        bytes(16 << 20),
    ],
    ids=["tensor", "parameter", "array", "bytes"],
)
def test_big_data_is_not_copied_by_the_check(big: object, monkeypatch: pytest.MonkeyPatch) -> None:
    # tracemalloc does not see torch's own memory; a copy of a tensor passes through its storage.
    def refuse(*args: object) -> None:
        raise AssertionError("the storage was pickled")

    monkeypatch.setattr(torch.UntypedStorage, "__reduce__", refuse)
    monkeypatch.setattr(torch.storage.TypedStorage, "__reduce__", refuse)
    tracemalloc.start()
    try:
        check_sendable({"data": {"nested": [big]}})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_the_parameters_of_a_module_are_not_copied_by_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the storage was pickled")

    monkeypatch.setattr(torch.UntypedStorage, "__reduce__", refuse)
    monkeypatch.setattr(torch.storage.TypedStorage, "__reduce__", refuse)
    check_sendable({"model": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))})
