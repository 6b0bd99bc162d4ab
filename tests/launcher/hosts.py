"""Hosts for tests: network namespaces of this machine, joined by a switch that is one, too.

Each host has an address, a host name, a loopback and process ids of its own, so that nothing of one
can be seen from another but over the network. They share the files. Nothing is set up outside of
the namespaces, whose names hold the process id of the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORT = 29400
"""A port that is free on every host, because nothing else runs there."""
_PATIENCE = 10.0
# Runs in a host: it takes its name and its /etc/hosts, which nobody else sees. The program is not
# the first process of its host, for that one would be deaf to signals.
_ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; "$@"; exit $?'


@dataclass(frozen=True)
class Host:
    """One of the hosts."""

    number: int
    name: str
    """Host name."""
    address: str
    """The address that the other hosts reach it by."""
    namespace: str
    """Name of its network namespace."""
    names: Path
    """What it has for /etc/hosts."""


@dataclass(frozen=True)
class Program:
    """A program on a host; what it and its children write goes to one file."""

    process: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        """Return what it has written so far."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Return its status, once it has ended."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()  # what it runs goes with it
            self.process.wait()
            raise AssertionError(f"not ended in {timeout} s:\n{self.output()}") from None

    def succeed(self, timeout: float = 100.0) -> str:
        """Wait for its end, which must be a good one, and return what it has written."""
        assert self.wait(timeout) == 0, self.output()
        return self.output()

    def fail(self, timeout: float = 100.0) -> str:
        """Wait for its end, which must be a bad one, and return what it has written."""
        assert self.wait(timeout) != 0, self.output()
        return self.output()


@dataclass
class Hosts:
    """The hosts of one test.

    Args:
        folder: Folder for their /etc/hosts and for what they run; all of them see it.
        count: How many.
        own_name: What a host's own name means to it: its `address`, `loopback`, as in a fresh
            Debian, or `nothing`. It never knows the names of others.
    """

    folder: Path
    count: int
    own_name: str = "address"
    all: list[Host] = field(default_factory=list)
    _programs: list[Program] = field(default_factory=list)

    @property
    def _switch(self) -> str:
        return f"ddpkit-{os.getpid()}-switch"

    def open(self) -> None:
        """Make the namespaces and join them."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for number in range(self.count):
            self.all.append(self._describe(number))
            self._plug_in(self.all[-1])

    def _describe(self, number: int) -> Host:
        name, address = f"host-{number}", f"10.77.0.{number + 1}"
        meaning = {"address": f"{address} {name}\n", "loopback": f"127.0.1.1 {name}\n"}
        names = self.folder / f"hosts-of-{name}"
        names.write_text("127.0.0.1 localhost\n" + meaning.get(self.own_name, ""))
        return Host(number, name, address, f"ddpkit-{os.getpid()}-{name}", names)

    def _plug_in(self, host: Host) -> None:
        inside, outside = ("-n", host.namespace), ("-n", self._switch)
        socket = f"port{host.number}"
        _ip("netns", "add", host.namespace)
        cable = ("link", "add", "eth0", "type", "veth", "peer", "name", socket)
        _ip(*inside, *cable, "netns", self._switch)
        _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*outside, "link", "set", socket, "master", "bridge", "up")

    def start(self, host: Host, *command: str, **environment: str) -> Program:
        """Start a program on a host."""
        namespaces = ("--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        within = ("ip", "netns", "exec", host.namespace, "unshare", *namespaces)
        log = self.folder / f"{host.name}-{len(self._programs)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*within, "sh", "-c", _ENTER, "sh", host.name, str(host.names), *command],
                cwd=self.folder,
                env=plain_environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._programs.append(Program(process, log))
        return self._programs[-1]

    def cut_off(self, host: Host) -> None:
        """Pull the cable of a host; its programs run on."""
        _ip("-n", self._switch, "link", "set", f"port{host.number}", "down")

    def join_again(self, host: Host) -> None:
        """Put the cable of a host back."""
        _ip("-n", self._switch, "link", "set", f"port{host.number}", "up")

    def kill(self, host: Host) -> None:
        """End all processes of a host; its network answers as before."""
        deadline = time.monotonic() + _PATIENCE
        while (pids := self.pids(host)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def pids(self, host: Host) -> list[int]:
        """List the processes of a host, by the ids that they have outside of it."""
        return [int(pid) for pid in _ip("netns", "pids", host.namespace).split()]

    def close(self) -> None:
        """End what runs, and remove the namespaces."""
        for host in self.all:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.kill(host)
        for program in self._programs:
            program.process.kill()
            program.process.wait()
        for namespace in [*(host.namespace for host in self.all), self._switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", namespace)


@contextlib.contextmanager
def opened_hosts(folder: Path, count: int, own_name: str = "address") -> Iterator[Hosts]:
    """Make hosts for a block; skip the test where this machine does not allow it."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    hosts = Hosts(folder, count, own_name)
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()


def why_not() -> str | None:
    """Say why there can be no hosts on this machine, None if there can be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts in network namespaces need Linux and root"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"hosts in network namespaces need {' and '.join(missing)} (iproute2, util-linux)"
    probe = f"ddpkit-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


def plain_environment(**variables: str) -> dict[str, str]:
    """Return an environment for a program that finds ddpkit, without a thread number of ours."""
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**clean, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}


def _ip(*arguments: str) -> str:
    finished = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return finished.stdout
