"""Character-level language model: a GRU reads a text and then writes like it.

For a longer text: --input book.txt --hidden 256 --steps 5000
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ddpkit import (
    barrier_load,
    ddp,
    distributed,
    get_rank,
    get_world_size,
    rank0_save,
    reduce_mean,
    reduce_sum,
    sync_gradients,
)
from ddpkit import rank0_print as print

parser = argparse.ArgumentParser()
parser.add_argument("--input", type=Path, default=Path(__file__).parents[2] / "README.md")
parser.add_argument("--out", type=Path, default=Path("charlm.pt"))
parser.add_argument("--hidden", type=int, default=96)
parser.add_argument("--block-size", type=int, default=48, help="characters in one crop")
parser.add_argument("--batch-size", type=int, default=16, help="crops in one micro-batch")
parser.add_argument("--grad-accum", type=int, default=2, help="micro-batches in one step")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--warmup", type=int, default=20)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--eval-every", type=int, default=50)
parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
parser.add_argument("--seed", type=int, default=1337)

device = "cuda" if torch.cuda.is_available() else "cpu"


class CharGRU(nn.Module):
    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = self.gru(self.embed(x), state)
        return self.head(out), state


def get_batch(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ix = torch.randint(len(data) - args.block_size, (args.batch_size,))
    ix = ix[get_rank() :: get_world_size()]  # all ranks draw the same; each keeps its own crops
    x = torch.stack([data[i : i + args.block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in ix])
    return x.to(device), y.to(device)


@torch.no_grad()
def perplexity(model: nn.Module, data: torch.Tensor) -> float:
    model.eval()
    total, count = 0.0, 0
    starts = range(0, len(data) - 1, args.block_size)
    for start in starts[get_rank() :: get_world_size()]:
        chunk = data[start : start + args.block_size + 1].to(device)
        logits, _ = model(chunk[None, :-1])
        total += F.cross_entropy(logits[0], chunk[1:], reduction="sum").item()
        count += len(chunk) - 1
    model.train()
    total, count = reduce_sum((total, count))
    return math.exp(total / count)


@torch.no_grad()
def generate(model: nn.Module, chars: list[str], length: int) -> str:
    model.eval()
    text, state = [0], None
    for _ in range(length):
        logits, state = model(torch.tensor([text[-1:]], device=device), state)
        text.append(int(torch.multinomial(logits[0, -1].softmax(0), 1)))
    return "".join(chars[i] for i in text[1:])


@distributed
def main() -> None:
    torch.manual_seed(args.seed)
    text = args.input.read_text()
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text])
    n = int(0.9 * len(data))
    train_data, val_data = data[:n], data[n:]
    print(f"{len(text)} characters, {len(chars)} different ones")

    model = ddp(CharGRU(len(chars), args.hidden))
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    optimizer = torch.optim.Adam(model.parameters())

    best = float("inf")
    t0 = time.time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / args.warmup)
        train_loss = 0.0
        for micro_step in range(args.grad_accum):
            x, y = get_batch(train_data)
            with sync_gradients(model, when=micro_step == args.grad_accum - 1):
                logits, _ = model(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / args.grad_accum
                loss.backward()
            train_loss += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()

        if (step + 1) % args.eval_every == 0:
            train_loss = reduce_mean(train_loss)
            ppl = perplexity(model, val_data)
            ms = 1000 * (time.time() - t0) / (step + 1)
            print(
                f"step {step + 1}: loss {train_loss:.4f}, grad norm {norm:.4f}, "
                f"val perplexity {ppl:.4f}, {ms:.1f} ms/step"
            )
            if ppl < best:
                best = ppl
                rank0_save(model.state_dict(), args.out)

    model.load_state_dict(barrier_load(args.out))
    print(f"best perplexity {best:.4f}")
    print(generate(model, chars, args.sample))


if __name__ == "__main__":
    args = parser.parse_args()
    main()
