"""torchrun with nodes that leave and come: the world changes, and no sample is lost or doubled."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launcher.counting import (
    PROGRAM,
    attempts_in,
    await_step,
    check_complete,
    check_repeated,
    read_notes,
)
from tests.launcher.hosts import plain_environment
from tests.launcher.test_launchers import free_port

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.drill,
    pytest.mark.timeout(240),
]

EPOCHS = 8
_SOON = "last_call_timeout=1,join_timeout=30,keep_alive_interval=1"


@dataclass
class Nodes:
    """Agents of torchrun on this machine, each of which counts as a node."""

    folder: Path
    port: int = field(default_factory=free_port)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        log = self.folder / f"agent-{len(self.agents)}.log"
        with log.open("wb") as file:
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
                    *("--nproc-per-node", "1", "--max-restarts", "1"),
                    *("--monitor-interval", "0.1", "--local-addr", "127.0.0.1"),
                    *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"),
                    *("--rdzv-id", "counting", "--rdzv-conf", _SOON),
                    *("--log-dir", str(self.folder / f"logs-{len(self.agents)}")),
                    *(PROGRAM, str(self.folder), "--epochs", str(EPOCHS), "--pause", "0.1"),
                ],
                cwd=self.folder,
                # Otherwise a node that comes later is never told where the store is (torch 2.14).
                env=plain_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(agent)
        return agent

    def await_rendezvous(self, timeout: float = 60.0) -> None:
        """Wait until the first agent serves the rendezvous, which ends with whoever serves it."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
            except OSError:
                assert time.monotonic() < deadline, self.text()
                time.sleep(0.05)

    def text(self) -> str:
        return "\n=====\n".join(log.read_text() for log in sorted(self.folder.glob("agent-*.log")))

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()  # it ends its ranks first, which it would leave if it was killed
        for agent in self.agents:
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    try:
        yield nodes
    finally:
        nodes.close()


def test_a_node_leaves_and_another_one_comes(nodes: Nodes) -> None:
    stays = nodes.start()
    nodes.await_rendezvous()
    leaves = nodes.start()
    await_step(nodes.folder, 6, world_size=2)
    leaves.terminate()
    leaves.wait(60)
    await_step(nodes.folder, 12, world_size=1)
    comes = nodes.start()
    await_step(nodes.folder, 20, world_size=2)
    assert [stays.wait(100), comes.wait(60)] == [0, 0], nodes.text()
    notes = read_notes(nodes.folder)
    worlds = [attempt[0].world_size for attempt in attempts_in(notes)]
    assert [size for size, _ in itertools.groupby(worlds)][-3:] == [2, 1, 2]
    check_complete(notes, EPOCHS)
    check_repeated(notes)
