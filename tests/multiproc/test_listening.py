"""On one machine nothing listens where another machine could connect: the kernel's own tables."""

import ipaddress
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpkit import barrier, process_group
from ddpkit.testing import run_ranks
from tests.multiproc.hand_set import with_hand_set_variables, with_variables_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's own tables")

_LISTENS = "0A"


def addresses_listened_on(pid: int) -> list[str]:
    """List the addresses that a process listens on, with their ports."""
    inodes = set(_socket_inodes(pid))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [_decode(row[1]) for row in rows if row[3] == _LISTENS and row[9] in inodes]


def _socket_inodes(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the listing's own descriptor
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _decode(text: str) -> str:
    """Read an address of the kernel's tables: words in the machine's byte order, and the port."""
    words, port = text.split(":")
    data = b"".join(
        int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8)
    )
    return f"{ipaddress.ip_address(data)} {int(port, 16)}"


def reachable_from_outside(addresses: list[str]) -> list[str]:
    found = []
    for text in addresses:
        address = ipaddress.ip_address(text.split()[0])
        mapped = getattr(address, "ipv4_mapped", None)
        if not (mapped or address).is_loopback:
            found.append(text)
    return found


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0100007F:B409", "127.0.0.1 46089"),
        ("00000000:1F90", "0.0.0.0 8080"),
        ("00000000000000000000000001000000:0050", "::1 80"),
        ("00000000000000000000000000000000:0050", ":: 80"),
        ("0000000000000000FFFF00000100007F:0050", "::ffff:127.0.0.1 80"),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="these were written by such a machine")
def test_the_addresses_of_the_kernel_are_read(text: str, address: str) -> None:
    number = address.split()
    assert _decode(text) == f"{ipaddress.ip_address(number[0])} {number[1]}"
    outside = [address] if number[0] in ("0.0.0.0", "::") else []
    assert reachable_from_outside([address]) == outside


def as_ddpkits_own(function: Callable[[], Any]) -> Callable[[], Any]:
    return function


@pytest.mark.parametrize(
    "launched",
    [
        pytest.param(as_ddpkits_own, id="ddpkit"),
        pytest.param(with_hand_set_variables, id="environment"),
        pytest.param(lambda function: with_variables_of("slurm", function), id="slurm"),
        pytest.param(lambda function: with_variables_of("mpich", function), id="mpich"),
    ],
)
def test_nothing_listens_beyond_loopback(
    launched: Callable[[Callable[[], Any]], Callable[[], Any]],
) -> None:
    def function() -> tuple[list[str], list[str]]:
        with process_group(timeout=20, device="cpu"):
            dist.all_reduce(torch.ones(1))
            pair = dist.new_group([0, 1])
            assert isinstance(pair, dist.ProcessGroup)
            dist.all_reduce(torch.ones(1), group=pair)
            found = addresses_listened_on(os.getpid()), addresses_listened_on(os.getppid())
            barrier()
        return found

    for own, of_the_parent in run_ranks(launched(function), init_group=False):
        assert own  # gloo listens in every rank
        assert reachable_from_outside(own + of_the_parent) == []
