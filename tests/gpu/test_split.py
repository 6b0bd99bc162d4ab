"""Models split over real devices; what needs none is tested on pretended ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ddpkit
from ddpkit.entrance import is_split
from tests.split_models import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

STEPS = 5


def train(model: torch.nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for batch in inputs:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses


@pytest.mark.parametrize("name", ["tutorial", "resnet18", "tied", "unet"])
def test_a_model_on_two_devices_trains_like_one_on_the_first(name: str) -> None:
    make, draw = MODELS[name]
    torch.manual_seed(0)
    plain = make().cuda()
    split = ddpkit.split_model_across_devices(copy.deepcopy(plain), ["cuda:0", "cuda:1"])
    plain.eval(), split.eval()  # dropout draws from a stream for each device
    inputs = [draw() for _ in range(STEPS)]
    expected = train(plain, [batch.cuda() for batch in inputs])
    torch.testing.assert_close(train(split, inputs), expected, rtol=1e-3, atol=1e-4)
    assert {tensor.device.index for tensor in split.parameters()} == {0, 1}
    state = {key: tensor.cpu() for key, tensor in split.state_dict().items()}
    wanted = {key: tensor.cpu() for key, tensor in plain.state_dict().items()}
    torch.testing.assert_close(state, wanted, rtol=1e-2, atol=1e-3)
    assert torch._C._len_torch_function_stack() == 0


def train_in_ranks(each: int) -> tuple[set[int], dict[str, Any]]:
    make, draw = MODELS["unet"]
    torch.manual_seed(ddpkit.get_rank())
    model = ddpkit.split_model_across_devices(make(), devices_per_rank=each)
    wrapped = ddpkit.ddp(model)
    assert is_split(ddpkit.unwrap(wrapped))
    train(wrapped, [draw() for _ in range(STEPS)])
    devices = {tensor.device.index for tensor in model.parameters()}
    return devices, {name: tensor.cpu() for name, tensor in wrapped.state_dict().items()}


def test_one_rank_trains_on_two_devices() -> None:
    ((devices, _),) = ddpkit.distributed(train_in_ranks, nproc_per_node=1).run_all(2)
    assert devices == {0, 1}


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_two_ranks_with_two_devices_each_stay_equal() -> None:
    first, second = ddpkit.distributed(train_in_ranks, nproc_per_node=2).run_all(2)
    assert (first[0], second[0]) == ({0, 1}, {2, 3})
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)


def test_devices_that_do_not_exist_are_named() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ddpkit.errors.ConfigError, match=f"cuda:{count}, but this process sees"):
        ddpkit.split_model_across_devices(MODELS["tutorial"][0](), ["cuda:0", f"cuda:{count}"])
