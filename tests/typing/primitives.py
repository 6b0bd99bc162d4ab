"""What a type checker must know about the functions that a training script calls."""

import torch
from torch import nn
from typing_extensions import assert_type

from ddpkit import (
    all_ranks,
    any_rank,
    broadcast_value,
    ddp,
    get_device,
    get_rank,
    is_rank0,
    on_rank0,
    process_group,
    rank0_first,
    rank0_print,
    unwrap,
)


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

assert_type(on_rank0(read_words, "words.txt", limit=3), list[str])
on_rank0(read_words, 3)  # type: ignore[arg-type]

assert_type(broadcast_value({"run": 7}), dict[str, int])
assert_type(any_rank(torch.zeros(1)), bool)
assert_type(all_ranks(True), bool)

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
