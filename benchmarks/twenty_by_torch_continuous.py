"""Twenty tests of two ranks on torch's other test base, whose ranks serve all tests of a class."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest


class TestSum(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def check(self, number: int) -> None:
        value = torch.tensor(float(number + self.rank))
        dist.all_reduce(value)
        assert value.item() == 2 * number + 1


def make_test(number: int) -> Callable[[TestSum], None]:
    return lambda self: self.check(number)


for index in range(20):
    setattr(TestSum, f"test_sum_{index}", make_test(index))
