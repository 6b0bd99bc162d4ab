"""Bytes of every rank on their way to rank 0, or to all ranks.

How many each rank sends is known beforehand. They go from rank to rank in chunks, right to where
they are wanted if that place is on the device that is sent from. Rank 0 takes the ranks in turn,
and the others wait for it as they do in `on_rank0`: as long as it lives and works. What fails on
one rank when it makes room or uses what it got is an error on all, with nothing left under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist

from ddpkit.agree import exchange, run_on_rank0
from ddpkit.errors import GroupError
from ddpkit.group import get_rank, get_world_size
from ddpkit.serialize import ExceptionRecord, record_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Delivery", "Receiver"]

T = TypeVar("T")

_CHUNK = 64 * 1024 * 1024
_TAG = 0xDD9  # so that messages of the user's own between two ranks are never taken for these


class Receiver(Protocol):
    """What becomes of data that arrives."""

    def prepare(self) -> None:
        """Make room for what is kept."""

    def places(self, rank: int) -> list[torch.Tensor]:
        """Say where the data of a rank is to be put."""

    def accept(self, rank: int) -> None:
        """Use the data of a rank, which is there."""


class _Guarded:
    """A receiver that fails at most once: what comes after that is thrown away.

    What was announced is on its way, and has to be taken, so that no later message is mistaken for
    it.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.failure: Exception | None = None

    def prepare(self) -> None:
        """Make room for what is kept."""
        self._try(self._receiver.prepare)

    def places(self, rank: int) -> list[torch.Tensor] | None:
        """Say where the data of a rank is to be put; None where nobody needs it any more."""
        return self._try(lambda: self._receiver.places(rank))

    def accept(self, rank: int) -> None:
        """Use the data of a rank, which is there."""
        self._try(lambda: self._receiver.accept(rank))

    def _try(self, call: Callable[[], T]) -> T | None:
        if self.failure is None:
            try:
                return call()
            except Exception as error:  # noqa: BLE001  # all ranks raise it, when all has come
                self.failure = error
        return None


@dataclass(frozen=True)
class Delivery:
    """Bytes of every rank on their way to rank 0, or to all ranks."""

    name: str
    """What messages call it."""
    sizes: list[list[int]]
    """Numbers of bytes, by rank and by part."""
    device: torch.device
    """Where they are sent from."""
    to_all: bool

    def run(self, own: Sequence[torch.Tensor | None], receiver: Receiver) -> None:
        """Send what is this rank's own; let a receiver take what the others send."""
        guarded = _Guarded(receiver)
        if self.to_all:
            self._take(range(get_world_size()), guarded, own)
            _raise_first(exchange(_record(guarded.failure), name=self.name))
            return
        # Sent in the background: rank 0 takes the others in turn, however long it works on each.
        pieces = self._outgoing(own) if get_rank() > 0 else []
        sent = [dist.isend(piece, 0, tag=_TAG) for piece in pieces]
        run_on_rank0(lambda: self._take_on_rank0(guarded), name=self.name)
        for work in sent:
            if work is not None:  # as it is for a rank outside of the group
                work.wait()

    def _take_on_rank0(self, receiver: _Guarded) -> None:
        self._take(range(1, get_world_size()), receiver, [])
        if receiver.failure is not None:
            raise receiver.failure

    def _take(
        self, ranks: Sequence[int], receiver: _Guarded, own: Sequence[torch.Tensor | None]
    ) -> None:
        receiver.prepare()
        for rank in ranks:
            if rank == get_rank():
                for piece in self._outgoing(own):
                    dist.broadcast(piece, rank)
            else:
                self._take_from(rank, receiver.places(rank))
                receiver.accept(rank)

    def _outgoing(self, own: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor]:
        parts = [part for part in own if part is not None and len(part)]
        return (piece.to(self.device) for part in parts for piece in part.split(_CHUNK))

    def _take_from(self, rank: int, places: list[torch.Tensor] | None) -> None:
        for index, size in enumerate(self.sizes[rank]):
            for begin in range(0, size, _CHUNK):
                place = None if places is None else places[index][begin : begin + _CHUNK]
                self._take_piece(rank, min(_CHUNK, size - begin), place)

    def _take_piece(self, rank: int, size: int, place: torch.Tensor | None) -> None:
        if place is not None and place.device == self.device:
            self._receive(rank, place)
            return
        piece = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._receive(rank, piece)
        if place is not None:
            place.copy_(piece)

    def _receive(self, rank: int, piece: torch.Tensor) -> None:
        if self.to_all:
            dist.broadcast(piece, rank)
        else:
            dist.recv(piece, rank, tag=_TAG)


def _record(failure: Exception | None) -> ExceptionRecord | None:
    return None if failure is None else record_exception(failure)


def _raise_first(records: Sequence[ExceptionRecord | None]) -> None:
    """Raise what went wrong on the first rank on which something did."""
    for rank, record in enumerate(records):
        if record is not None:
            peer = GroupError(f"[rank {rank}/{len(records)}] {record.summary}")
            raise record.rebuild() or peer
