import copy
import pickle

import pytest

from ddpkit import errors

FAILURE = errors.RankFailure(1, "node1", "signal", "killed by SIGKILL", signal_name="SIGKILL")

EXAMPLES: list[errors.DdpkitError] = [
    errors.DdpkitError("base"),
    errors.ConfigError("bad argument"),
    errors.GroupError("no group"),
    errors.WorkerError(
        "rank 1 failed",
        rank=1,
        host="node1",
        exit_code=7,
        signal_name="SIGKILL",
        traceback="Traceback ...",
        failures=(FAILURE,),
    ),
    errors.WorkerTimeoutError("too late", stacks={0: "at train.py:4"}, rank=2, host="node2"),
    errors.PeerError("rank 1 left", rank=1, traceback="Traceback ..."),
    errors.CheckpointError("cannot write", path="last.pt"),
]

each_error = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


def test_the_examples_are_all_exceptions_there_are() -> None:
    public = {getattr(errors, name) for name in errors.__all__} - {errors.RankFailure}
    assert {type(error) for error in EXAMPLES} == public


@each_error
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_type_message_and_attributes(
    error: errors.DdpkitError, protocol: int
) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@each_error
def test_pickling_keeps_notes(error: errors.DdpkitError) -> None:
    noted = copy.copy(error)
    noted.__notes__ = ["while saving last.pt"]  # add_note() is of Python 3.11
    assert pickle.loads(pickle.dumps(noted)).__notes__ == ["while saving last.pt"]


@each_error
def test_copying_keeps_attributes(error: errors.DdpkitError) -> None:
    assert vars(copy.deepcopy(error)) == vars(error)


def test_pickling_keeps_attributes_of_a_subclass_with_another_constructor() -> None:
    again = pickle.loads(pickle.dumps(SubclassError("x", 3)))
    assert (str(again), again.path, again.line) == ("x at line 3", "x", 3)


class SubclassError(errors.CheckpointError):
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path} at line {line}", path=path)
        self.line = line


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (errors.ConfigError, (errors.DdpkitError, ValueError)),
        (errors.GroupError, (errors.DdpkitError, RuntimeError)),
        (errors.WorkerError, (errors.DdpkitError, RuntimeError)),
        (errors.WorkerTimeoutError, (errors.WorkerError,)),
        (errors.PeerError, (errors.DdpkitError, RuntimeError)),
        (errors.CheckpointError, (errors.DdpkitError, RuntimeError)),
    ],
)
def test_hierarchy(kind: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    assert kind.__bases__ == bases


def test_a_worker_error_says_nothing_that_is_not_known() -> None:
    error = errors.WorkerError("failed")
    assert vars(error) == {
        "rank": -1,
        "host": "",
        "exit_code": None,
        "signal_name": None,
        "traceback": "",
        "failures": (),
    }


def test_a_timeout_error_has_the_fields_of_a_worker_error_too() -> None:
    error = errors.WorkerTimeoutError("late", rank=1, failures=(FAILURE,))
    assert (error.rank, error.failures, error.stacks) == (1, (FAILURE,), {})


def test_a_rank_failure_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        FAILURE.rank = 2  # type: ignore[misc]
