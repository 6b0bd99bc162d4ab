"""A training whose samples are numbers, and which notes who saw which of them at which step.

It goes on from the newest checkpoint that it finds, as the README says how.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddpkit import (
    barrier_load,
    broadcast_value,
    ddp,
    distributed,
    get_rank,
    get_world_size,
    latest_checkpoint,
    on_rank0,
    rank0_save,
    sharded_loader,
)

SAMPLES = 96
GLOBAL_BATCH = 8
STEPS = SAMPLES // GLOBAL_BATCH


def inputs_of(samples: torch.Tensor) -> torch.Tensor:
    return (samples.float().unsqueeze(1) - SAMPLES / 2) / SAMPLES


def misbehave(folder: Path, how: str) -> None:
    """End as one is told to, once in the life of the job."""
    try:
        (folder / "misbehaved").touch(exist_ok=False)
    except FileExistsError:
        return
    if how == "raise":
        raise KeyError("the cause")
    os.kill(os.getpid(), signal.SIGKILL)


@distributed(timeout=120)
def main(folder: Path, options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    train = sharded_loader(
        TensorDataset(torch.arange(SAMPLES)), global_batch_size=options.global_batch, shuffle=True
    )
    model = ddp(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "train": train}
    step = 0
    newest = latest_checkpoint(folder / "saved")
    if newest is not None:
        step = barrier_load(newest, into=state)["step"]
    attempt = on_rank0(time.time_ns)
    line = {"attempt": attempt, "host": socket.gethostname(), "rank": get_rank()}
    line |= {"world_size": get_world_size(), "first step": step}
    with (folder / f"seen-{attempt}-{get_rank()}").open("w") as seen:
        while train.epoch < options.epochs:
            epoch = train.epoch
            for (samples,) in train:
                loss = (model(inputs_of(samples)) - inputs_of(samples).abs()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                place = {"epoch": epoch, "step": step, "samples": samples.tolist()}
                seen.write(json.dumps(line | place) + "\n")
                seen.flush()
                step += 1
                if step % options.save_every == 0:
                    saved = folder / "saved" / f"step-{step}.pt"
                    rank0_save({**state, "step": step}, saved, keep_last=2)
                if (step, get_rank()) == (options.at_step, options.by_rank):
                    misbehave(folder, options.how)
                time.sleep(options.pause)
    rank0_save(model, folder / "final.pt")
    return int(broadcast_value(step))


def read_options(arguments: list[str]) -> tuple[Path, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=GLOBAL_BATCH)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--how", choices=["kill", "raise"], default="kill")
    parser.add_argument("--at-step", type=int, default=-1)
    parser.add_argument("--by-rank", type=int, default=-1)
    options = parser.parse_args(arguments)
    return options.folder, options


if __name__ == "__main__":
    main(*read_options(sys.argv[1:]))
