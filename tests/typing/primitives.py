"""What a type checker must know about the functions that a training script calls."""

import logging

import torch
from torch import nn
from typing_extensions import assert_type

from ddpkit import (
    accumulate,
    all_ranks,
    any_rank,
    broadcast_value,
    ddp,
    gather,
    gather_cat,
    get_device,
    get_logger,
    get_rank,
    is_rank0,
    loss_weight,
    on_rank0,
    plan_split,
    process_group,
    rank0_first,
    rank0_print,
    seed_everything,
    sync_gradients,
    unwrap,
)
from ddpkit.accumulation import MicroBatch
from ddpkit.plan import SplitPlan
from ddpkit.testing import assert_replicas_equal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 2)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.hidden(x)
        return embedded


def read_words(path: str, *, limit: int = 10) -> list[str]:
    return [path][:limit]


wrapped = ddp(Net(), find_unused_parameters=True)
assert_type(wrapped, Net)
assert_type(wrapped.embed(torch.zeros(1, 2)), torch.Tensor)
assert_type(unwrap(wrapped), Net)
ddp(Net(), compress="powersgd")
ddp(Net(), compress="fp8")  # type: ignore[arg-type]

for batch, micro in accumulate(wrapped, [(1, "a")], every=2, count=len):
    assert_type(batch, tuple[int, str])
    assert_type(micro.window, int)
    assert_type(micro.weight, float)
    assert_type(micro.is_last, bool)
    with micro as entered:
        assert_type(entered, MicroBatch)
accumulate(wrapped, [1], 2)  # type: ignore[call-arg]
with sync_gradients([wrapped, torch.nn.Linear(1, 1)], when=False):
    pass
assert_type(loss_weight(torch.tensor(3)), float)

assert_type(on_rank0(read_words, "words.txt", limit=3), list[str])
on_rank0(read_words, 3)  # type: ignore[arg-type]

assert_type(broadcast_value({"run": 7}), dict[str, int])
assert_type(any_rank(torch.zeros(1)), bool)
assert_type(all_ranks(True), bool)

assert_type(gather("worst.png"), list[str] | None)
assert_type(gather("worst.png", to_all=True), list[str])
assert_type(gather_cat(torch.zeros(1)), torch.Tensor | None)
assert_type(gather_cat((torch.zeros(1), torch.zeros(2))), tuple[torch.Tensor, torch.Tensor] | None)
assert_type(gather_cat({"label": torch.zeros(1)}, to_all=True), dict[str, torch.Tensor])
gather_cat(torch.zeros(1), True)  # type: ignore[call-overload]

with rank0_first(per_node=True) as nothing:
    assert_type(nothing, None)
rank0_first(True)  # type: ignore[call-arg]


@rank0_first()
def load_words(path: str) -> list[str]:
    return read_words(path)


assert_type(load_words("words.txt"), list[str])

assert_type(get_rank(), int)
assert_type(is_rank0(), bool)
assert_type(get_device(), torch.device)

with process_group(timeout=60.0) as world:
    assert_type(world.world_size, int)
    assert_type(world.device, torch.device)

rank0_print("epoch", 3, sep="=", end="")
rank0_print(3, colour="red")  # type: ignore[call-arg]

seed_everything(7)
seed_everything("7")  # type: ignore[arg-type]

logger: "logging.LoggerAdapter[logging.Logger]" = get_logger(__name__)
logger.info("epoch %d", 3)
assert_type(get_logger().isEnabledFor(20), bool)

assert_type(assert_replicas_equal(wrapped, gradients=True), None)
assert_replicas_equal(wrapped, True)  # type: ignore[call-arg]

plan = plan_split(Net(), ["cuda:0", torch.device("cpu")], limits={"cuda:0": 10}, no_split=[Net])
assert_type(plan, SplitPlan)
assert_type(plan.assignment, dict[str, torch.device])
assert_type(plan.loads, dict[torch.device, int])
plan_split(Net(), ["cpu"], limits=[None, 10], no_split=["Net"])
plan_split(Net(), 2)  # type: ignore[arg-type]
