"""Twenty tests of two ranks by ddpkit's mark; `testing.py` has pytest run this file."""

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(20))
def test_sum(number: int) -> None:
    value = torch.tensor(float(number + dist.get_rank()))
    dist.all_reduce(value)
    assert value.item() == 2 * number + 1
