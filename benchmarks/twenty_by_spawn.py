"""Twenty tests of two ranks, each with `mp.spawn`, as most people write them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def check_sum(rank: int, file: str, number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    value = torch.tensor(float(number + rank))
    dist.all_reduce(value)
    assert value.item() == 2 * number + 1
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(20))
def test_sum(tmp_path: Path, number: int) -> None:
    mp.spawn(check_sum, args=(str(tmp_path / "store"), number), nprocs=2)
