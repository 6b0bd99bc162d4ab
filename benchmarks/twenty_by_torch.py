"""Twenty tests of two ranks on torch's own test base, which starts the ranks of each test anew."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase


class TestSum(MultiProcessTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def check(self, number: int) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        value = torch.tensor(float(number + self.rank))
        dist.all_reduce(value)
        assert value.item() == 2 * number + 1
        dist.destroy_process_group()


def make_test(number: int) -> Callable[[TestSum], None]:
    return lambda self: self.check(number)


for index in range(20):
    setattr(TestSum, f"test_sum_{index}", make_test(index))
