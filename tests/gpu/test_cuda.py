"""What only a machine with CUDA devices can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddpkit
import ddpkit.testing

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


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_copied_ahead_are_those_of_the_dataset(workers: int) -> None:
    numbers = torch.arange(4096.0).reshape(1024, 4)
    data = torch.utils.data.TensorDataset(numbers)
    loader = ddpkit.sharded_loader(data, batch_size=64, num_workers=workers, device="cuda")
    for _ in range(3):
        seen = []
        for (batch,) in loader:
            assert batch.is_cuda
            torch.cuda._sleep(1_000_000)  # the next copy runs meanwhile
            seen.append(batch * 2)
        assert torch.equal(torch.cat(seen).cpu(), 2 * numbers)


@pytest.mark.parametrize("background", [False, True])
def test_tensors_of_a_device_are_saved_as_tensors_of_the_cpu(
    tmp_path: Path, background: bool
) -> None:
    weight = torch.arange(8.0, device="cuda")
    state = {"view": weight[2:4], "whole": weight, "parameter": torch.nn.Parameter(weight[:2])}
    save = ddpkit.rank0_save(state, tmp_path / "x.pt", background=background)
    with torch.no_grad():
        weight.zero_()
    save.wait()
    loaded = torch.load(tmp_path / "x.pt")
    assert all(value.device.type == "cpu" for value in loaded.values())
    assert loaded["whole"].tolist() == list(range(8))
    assert (
        loaded["view"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
    )


def test_the_random_stream_of_the_device_goes_on(tmp_path: Path) -> None:
    torch.rand(1, device="cuda")
    ddpkit.rank0_save({"n": 1}, tmp_path / "x.pt", include_rng=True)
    went_on = torch.rand(3, device="cuda")
    ddpkit.barrier_load(tmp_path / "x.pt", include_rng=True)
    assert torch.equal(torch.rand(3, device="cuda"), went_on)


class Partial(torch.nn.Module):
    """Leaves a layer out when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.second(x) if whole else x


def accumulate_then_leave_out() -> str:
    torch.manual_seed(ddpkit.get_rank())
    model = ddpkit.ddp(Partial())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(torch.randn(5, 8, 4, device=ddpkit.get_device()))
    for x, micro in ddpkit.accumulate(model, batches, every=2):
        with micro:
            (model(x).square().mean() * micro.weight).backward()
        if micro.is_last:
            optimizer.step()
            optimizer.zero_grad()
    ddpkit.testing.assert_replicas_equal(model)
    with pytest.raises(ddpkit.errors.GroupError, match=r"second\.weight") as caught:
        model(batches[0], whole=False).sum().backward()
    return str(caught.value)


def test_windows_are_averaged_and_left_out_parameters_named() -> None:
    for text in ddpkit.distributed(accumulate_then_leave_out).run_all():
        assert "find_unused_parameters=True" in text
