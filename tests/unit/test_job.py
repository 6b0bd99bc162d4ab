import random
import socket
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ddpkit import distributed
from ddpkit.errors import ConfigError
from ddpkit.launch import inherited
from ddpkit.launch import job as jobs
from ddpkit.launch.job import Job, decode, encode, register

OPENED = socket.socket()  # what a function of this module can read, and nobody can send
OPENED.close()


def registered(function: Callable[..., Any]) -> Callable[..., Any]:
    register(function)
    return function


@distributed
def double(x: int) -> int:
    return 2 * x


inner_double = double.__wrapped__


def undecorated(x: int) -> int:
    return 3 * x


def hidden_by_another_decorator(x: int) -> int:
    return 4 * x


register(hidden_by_another_decorator)
original = hidden_by_another_decorator
hidden_by_another_decorator = None  # type: ignore[assignment]


# ----------------------------------------------------------------------------------- the job


def test_a_job_is_called_with_its_arguments() -> None:
    assert Job(divmod, (7, 2))() == (3, 1)


def test_a_job_travels_with_its_arguments() -> None:
    step = 10

    def add(x: int, *, y: int) -> int:
        return x + y + step

    assert decode(encode(Job(add, (1,), {"y": 2})))() == 13


def test_a_fresh_process_draws_what_a_fork_would() -> None:
    states = torch.get_rng_state(), random.getstate()
    data = encode(Job(lambda: (torch.rand(1).item(), random.random())))
    expected = torch.rand(1).item(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    assert decode(data)() == expected
    torch.set_rng_state(states[0])
    random.setstate(states[1])


def test_a_module_that_the_call_imports_changes_neither_random_state_nor_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sets_and_draws.py").write_text(
        "import torch\nONE = torch.ones(1)\ntorch.set_default_dtype(torch.float32)\n"
        "torch.manual_seed(0)\ndef draw(): return torch.rand(1), ONE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    import sets_and_draws  # type: ignore[import-not-found]

    torch.set_rng_state(state)
    torch.set_default_dtype(torch.float64)
    try:
        data = encode(Job(sets_and_draws.draw))
        expected = torch.rand(1)
        torch.set_default_dtype(dtype)
        monkeypatch.delitem(sys.modules, "sets_and_draws")
        drawn, one = decode(data)()
    finally:
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)
    assert torch.equal(drawn, expected)
    assert (drawn.dtype, one.dtype) == (torch.float64, torch.float64)


def test_settings_that_mix_old_and_new_names_of_torch_travel_too() -> None:
    flags = {"b": 1}

    def refuse() -> None:
        raise RuntimeError("a mix of the legacy and new names")

    settings = {"a": (refuse, refuse), "b": (lambda: flags["b"], lambda b: flags.update(b=b))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inherited, "_SETTINGS", settings)
        captured = inherited.Inherited.capture()
        flags["b"] = 2
        captured.restore()
    assert (captured.settings, flags) == ({"b": 1}, {"b": 1})


# --------------------------------------------------------------------------- by name or by value


def test_a_decorated_function_of_a_module_goes_by_name() -> None:
    assert jobs._find_reference(inner_double) == jobs._Reference(__name__, "double")
    assert decode(encode(Job(inner_double, (4,))))() == 8


def test_a_function_that_was_decorated_elsewhere_is_left_to_pickle() -> None:
    distributed(undecorated)
    assert jobs._find_reference(undecorated) is None
    assert decode(encode(Job(undecorated, (4,))))() == 12


def test_a_function_whose_name_stands_for_something_else_now_goes_by_name() -> None:
    assert jobs._find_reference(original) == jobs._Reference(
        __name__, "hidden_by_another_decorator"
    )
    assert decode(encode(Job(original, (4,))))() == 16


def test_a_function_that_was_not_decorated_is_left_to_pickle() -> None:
    assert jobs._find_reference(undecorated) is None
    assert decode(encode(Job(undecorated, (4,))))() == 12


def test_a_function_that_was_decorated_and_replaced_goes_by_value() -> None:
    def replaced(x: int) -> int:
        return x

    replaced.__qualname__ = "double"
    assert jobs._find_reference(replaced) is None


def test_a_local_function_goes_by_value() -> None:
    @registered
    def local(x: int) -> int:
        return 5 * x

    assert jobs._find_reference(local) is None
    assert decode(encode(Job(local, (4,))))() == 20


def test_a_function_of_main_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    @registered
    def function() -> None: ...

    monkeypatch.setattr(function, "__module__", "__main__")
    monkeypatch.setattr(function, "__qualname__", "function")
    register(function)
    assert jobs._find_reference(function) is None


@pytest.mark.parametrize("function", [divmod, [].append, str.upper])
def test_what_has_no_module_of_its_own_is_left_to_pickle(function: Callable[..., Any]) -> None:
    assert jobs._find_reference(function) is None


@pytest.fixture
def odd_module(tmp_path: Path) -> Iterator[ModuleType]:
    """A module whose file cannot be imported by its name: `train-v2.py`, run by a runner."""
    file = tmp_path / "train-v2.py"
    file.write_text("SCALE = 3\ndef scale(x): return helper(x)\ndef helper(x): return SCALE * x\n")
    module = ModuleType("train-v2")
    module.__file__ = str(file)
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    sys.modules["train-v2"] = module
    yield module
    del sys.modules["train-v2"]


def test_a_module_that_cannot_be_imported_goes_by_value(odd_module: ModuleType) -> None:
    register(odd_module.scale)
    assert jobs._find_reference(odd_module.scale) is None
    data = encode(Job(odd_module.scale, (4,)))
    vars(odd_module).clear()  # nothing of it exists in another process
    assert decode(data)() == 12


def test_another_file_of_the_same_name_is_not_the_module(
    odd_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train_v3.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    monkeypatch.setitem(sys.modules, "train_v3", odd_module)
    assert not jobs._is_importable("train_v3")


def test_modules_that_can_be_imported() -> None:
    assert jobs._is_importable("ddpkit.launch.job")
    assert not jobs._is_importable("__main__")
    assert not jobs._is_importable("not.there")


# ---------------------------------------------------------------------------- what cannot be sent


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with socket.socket() as opened:
        yield opened


def takes(first: object, second: object = None, *others: object, **named: object) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        (["X"], {}, r"argument 'first'"),
        ([1], {"second": "X"}, r"argument 'second'"),
        ([1, {"a": ["X"]}], {}, r"argument 'second'\['a'\]\[0\]"),
        ([1, 2, 3, "X"], {}, r"argument 'others'\[1\]"),
        ([1], {"name": "X"}, r"argument 'named'\['name'\]"),
    ],
)
def test_an_argument_that_cannot_be_sent_is_named(
    args: list[Any], kwargs: dict[str, Any], path: str, connection: socket.socket
) -> None:
    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(item) for item in value]
        if isinstance(value, dict):
            return {key: put(item) for key, item in value.items()}
        return connection if value == "X" else value

    job = Job(takes, tuple(put(args)), put(kwargs))
    with pytest.raises(ConfigError, match=rf"^{path} is a socket\.socket"):
        job.check_arguments()


def test_arguments_that_do_not_fit_are_named_by_position(connection: socket.socket) -> None:
    with pytest.raises(ConfigError, match=r"^args\[1\] is a socket\.socket"):
        Job(lambda x: x, (1, connection)).check_arguments()


def test_an_unsendable_global_is_named(connection: socket.socket) -> None:
    names: dict[str, Any] = {"shared": {"socket": connection}, "__name__": "__main__"}
    exec("def train(): return shared", names)
    with pytest.raises(
        ConfigError, match=r"^function train\['shared'\]\['socket'\] is a socket\.socket"
    ):
        encode(Job(names["train"]))


def test_an_unsendable_variable_of_a_closure_is_named(connection: socket.socket) -> None:
    with pytest.raises(ConfigError, match=r"\['connection'\] is a socket\.socket"):
        encode(Job(lambda: connection))


def test_a_global_that_another_process_makes_itself_does_not_matter() -> None:
    @registered
    def reads_global() -> bool:
        return OPENED is not None

    reads_global.__qualname__ = "reads_global"
    register(reads_global)
    assert jobs._find_reference(reads_global) is not None


# ------------------------------------------------------------------------------------ a reminder


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: [x],
        lambda x: {"model": x},
        lambda x: (1, x),
        lambda x: types.SimpleNamespace(model=x),  # as a trainer whose method is decorated
    ],
)
def test_a_model_among_the_arguments_is_a_copy(wrap: Callable[[object], object]) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="argument 'first' holds a model or an optimizer"):
        Job(takes, (wrap(model),)).check_arguments()


def test_an_optimizer_among_the_arguments_is_a_copy() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="argument 'second' holds"):
        Job(takes, (1, optimizer)).check_arguments()


def test_no_reminder_without_a_model() -> None:
    Job(takes, (1, torch.ones(2)), {"x": [torch.ones(2)]}).check_arguments()
