"""Twenty tests of two ranks by ddpkit's mark, where ranks cannot be forked from pytest."""

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2, start_method="forkserver")
@pytest.mark.parametrize("number", range(20))
def test_sum(number: int) -> None:
    value = torch.tensor(float(number + dist.get_rank()))
    dist.all_reduce(value)
    assert value.item() == 2 * number + 1
