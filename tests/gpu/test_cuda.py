"""What only a machine with CUDA devices can show."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ddpkit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def all_reduce_on_device() -> tuple[str, str, float]:
    total = torch.ones(1, device=ddpkit.get_device())
    dist.all_reduce(total)
    on_cpu = torch.ones(1)
    dist.all_reduce(on_cpu)  # the gloo half of the group
    assert total.item() == on_cpu.item()
    return str(ddpkit.get_device()), str(dist.get_backend_config()), total.item()


def test_counting_devices_does_not_spoil_a_fork() -> None:
    from ddpkit.launch.forksafe import prepare_fork

    assert torch.cuda.device_count() >= 1
    if not torch.cuda.is_initialized():
        assert prepare_fork() is None


def test_one_rank_for_each_device_by_default() -> None:
    values = ddpkit.distributed(all_reduce_on_device).run_all()
    count = torch.cuda.device_count()
    assert [device for device, _, _ in values] == [f"cuda:{index}" for index in range(count)]
    assert all("cuda:nccl" in backend and total == count for _, backend, total in values)


def test_more_ranks_than_devices_is_refused_before_any_process_starts() -> None:
    too_many = torch.cuda.device_count() + 1
    launched = ddpkit.distributed(all_reduce_on_device, nproc_per_node=too_many)
    with pytest.raises(ddpkit.errors.ConfigError, match="no cuda device of its own"):
        launched()


def train_two_steps() -> tuple[str, torch.Tensor]:
    torch.manual_seed(0)
    model = ddpkit.ddp(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    loader = ddpkit.sharded_loader(data, global_batch_size=4, device=ddpkit.get_device())
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return str(inputs.device), ddpkit.unwrap(model).weight.detach()


def test_training_step_moves_model_and_batches() -> None:
    device, weight = ddpkit.distributed(train_two_steps, nproc_per_node=1)()
    assert device == "cuda:0"
    assert weight.isfinite().all()


def test_results_arrive_on_the_cpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    weights = [weight for _, weight in ddpkit.distributed(train_two_steps).run_all()]
    assert all(weight.device.type == "cpu" for weight in weights)
    assert torch.equal(weights[0], weights[1])
