"""What a type checker must know about @distributed, in its three spellings."""

from typing_extensions import assert_type

from ddpkit import distributed
from ddpkit.testing import run_ranks


@distributed
def bare(epochs: int, *, resume: bool = False) -> float:
    return epochs / 2 if resume else 0.0


@distributed(nproc_per_node=2, start_method="forkserver", timeout=60.0, init_group=True)
def with_options(name: str) -> list[str]:
    return [name]


def plain(values: dict[str, int]) -> tuple[int, str]:
    return len(values), "values"


called = distributed(plain, nproc_per_node=2)

assert_type(bare(3), float)
assert_type(bare(3, resume=True), float)
assert_type(with_options("a"), list[str])
assert_type(called({"a": 1}), tuple[int, str])

assert_type(bare.run_all(3), list[float])
assert_type(with_options.run_all(name="a"), list[list[str]])

assert_type(bare.with_options(nproc_per_node=4)(3), float)
assert_type(bare.with_options(start_method="spawn").run_all(3, resume=True), list[float])

assert_type(run_ranks(plain, 2, args=({"a": 1},)), list[tuple[int, str]])

# Each of these must be an error: an ignore that is not needed is reported itself.
bare("three")  # type: ignore[arg-type]
bare(3, True)  # type: ignore[call-arg]
bare.run_all()  # type: ignore[call-arg]
with_options(name=1)  # type: ignore[arg-type]
called.with_options(nproc_per_node=2)([1])  # type: ignore[arg-type]
distributed(nproc_per_node="2")  # type: ignore[call-overload]
