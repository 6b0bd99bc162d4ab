"""Streams of two and three ranks from one seed."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from ddpkit.group import get_rank
from ddpkit.seeding import seed_everything
from ddpkit.testing import assert_replicas_equal, run_ranks
from ddpkit.wrap import ddp


def drawn() -> list[Any]:
    seed_everything(11)
    return [torch.randn(4).tolist(), random.random(), np.random.rand()]


def test_rank_0_is_as_one_process_and_others_differ_at_any_world_size() -> None:
    alone = run_ranks(drawn, 1)
    torch.manual_seed(11)
    assert alone[0][0] == torch.randn(4).tolist()
    two, three = run_ranks(drawn, 2), run_ranks(drawn, 3)
    assert two[:1] == alone
    assert three[:2] == two
    for of_stream in zip(*three, strict=True):
        assert len({str(values) for values in of_stream}) == 3


def test_ranks_may_seed_at_different_times_or_alone() -> None:
    def alone() -> None:
        if get_rank() == 1:
            seed_everything(3)

    run_ranks(alone)


def test_dropout_differs_between_ranks_and_weights_do_not() -> None:
    def build() -> list[float]:
        seed_everything(5)
        model = ddp(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)))
        assert_replicas_equal(model)
        torch.manual_seed(5)
        assert torch.equal(model.get_parameter("0.weight"), nn.Linear(3, 2).weight)
        seed_everything(5)
        mask: torch.Tensor = nn.functional.dropout(torch.ones(64))
        return mask.tolist()

    first, second = run_ranks(build)
    assert first != second
