"""Save on rank 0, load everywhere: a training that can be stopped at any moment and goes on."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from ddpkit import (
    barrier_load,
    ddp,
    distributed,
    latest_checkpoint,
    rank0_print,
    rank0_save,
    reduce_mean,
    sharded_loader,
)

LENGTH = 96


def make_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make points and what a line says of them, alike on every rank."""
    points = torch.linspace(-1, 1, LENGTH).unsqueeze(1)
    return list(zip(points, 3 * points + 1, strict=True))


@distributed
def main(folder: Path, epochs: int, stop_at: int | None) -> float | None:
    torch.manual_seed(0)
    train = sharded_loader(make_data(), global_batch_size=8, shuffle=True)
    model = ddp(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    state = {"model": model, "optimizer": optimizer, "train": train}
    if newest := latest_checkpoint(folder):  # the same file on every rank, or none
        barrier_load(newest, into=state)
        rank0_print(f"going on from {newest.name}: epoch {train.epoch + 1}")
    loss = torch.zeros(())
    steps = 0
    while train.epoch < epochs:
        epoch = train.epoch
        for x, y in train:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == stop_at:  # in the middle of an epoch, as a job that is out of time
                rank0_save(state, folder / f"epoch-{epoch}.pt", keep_last=2)
                return None
        # Written while the next epoch is computed; the state is that of the end of this one.
        rank0_save(state, folder / f"epoch-{train.epoch}.pt", keep_last=2, background=True)
        rank0_print(f"epoch {epoch + 1}: loss {reduce_mean(loss.item()):.6f}")
    return float(sum(parameter.item() for parameter in model.state_dict().values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stop-at", type=int, help="stop after so many steps of this run")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=torch.cuda.device_count() or 2,
        help="ranks to start, unless a launcher has started them; default: %(default)s",
    )
    args = parser.parse_args()
    run = main.with_options(nproc_per_node=args.nproc_per_node)
    total = run(args.folder, args.epochs, args.stop_at)
    rank0_print("stopped" if total is None else f"sum of the parameters: {total:.6f}")
