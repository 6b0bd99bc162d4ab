"""Share a small data set between ranks, and show which samples each of them gets."""

import argparse
from collections import Counter

import torch
from torch.utils.data import Dataset

from ddpkit import ShardedLoader, distributed, rank0_print, reduce_sum, sharded_loader

Batches = list[list[int]]


class RandomDataset(Dataset[tuple[int, torch.Tensor]]):
    """Random vectors, each with its index, by which it can be told apart."""

    def __init__(self, size: int, length: int) -> None:
        # Seeded, because every rank makes the data set and all must make the same.
        self.vectors = torch.randn(length, size, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.vectors[index]


def load_once(loader: ShardedLoader[tuple[int, torch.Tensor]]) -> Batches:
    return [indices.tolist() for indices, _ in loader]


@distributed
def main(length: int, batch_size: int) -> tuple[dict[str, Batches], int]:
    dataset = RandomDataset(size=5, length=length)
    train = sharded_loader(dataset, batch_size=batch_size, shuffle=True)
    test = sharded_loader(dataset, batch_size=batch_size, uneven="exact")
    loaded = {f"epoch {epoch + 1}": load_once(train) for epoch in range(2)}
    loaded["evaluation"] = load_once(test)
    counted = reduce_sum(sum(len(batch) for batch in loaded["evaluation"]))
    return loaded, counted


def describe_together(shares: list[Batches], length: int) -> str:
    times = Counter(index for batches in shares for batch in batches for index in batch)
    repeated = sorted((times - Counter(range(length))).elements())
    rest = f"repeated as padding: {repeated}" if repeated else "none repeated"
    return f"{len(times)} of {length} samples, {rest}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=11, help="samples; default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=2, help="of a rank; default: %(default)s")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=torch.cuda.device_count() or 2,
        help="ranks to start, unless a launcher has started them; default: %(default)s",
    )
    args = parser.parse_args()
    run = main.with_options(nproc_per_node=args.nproc_per_node)
    values = run.run_all(args.length, args.batch_size)  # one value for each rank
    for name in ("epoch 1", "epoch 2", "evaluation"):
        shares = [loaded[name] for loaded, _ in values]
        for rank, batches in enumerate(shares):
            rank0_print(f"{name}, rank {rank}: {batches}")
        rank0_print(f"{name}, together: {describe_together(shares, args.length)}")
    rank0_print(f"the evaluation counted {values[0][1]} of {args.length} samples")
