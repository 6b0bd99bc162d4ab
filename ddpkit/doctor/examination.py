"""Looking at everything: what is quick here, while torch is imported in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ddpkit.doctor import machine, resolver
from ddpkit.doctor.facts import Facts, Launcher
from ddpkit.doctor.installed import read_installation
from ddpkit.doctor.surroundings import read_launcher, select_variables
from ddpkit.doctor.torch_process import TorchProcess
from ddpkit.doctor.torch_side import describe_error

__all__ = ["examine"]

_LONGEST_EXERCISE = 60.0


def examine(*, time_limit: float, with_ranks: bool = True) -> Facts:
    """Find out everything about this machine and this environment.

    Starts a process, which starts two ranks; all have ended when it returns. Nothing is changed.

    Args:
        time_limit: Seconds for everything that needs torch.
        with_ranks: Whether to try two ranks.

    Returns:
        What was found out. Nothing is raised for what could not be: it is noted.
    """
    limit = min(_LONGEST_EXERCISE, time_limit / 2) if with_ranks else 0.0
    sections: dict[str, Any] = {}
    failures: dict[str, str] = {}
    try:
        with TorchProcess(time_limit, limit) as process:
            sections, failures = look_at_all(here())
            for known, more in zip((sections, failures), process.collect(), strict=True):
                known.update(more)
    except OSError as error:  # no process can be started
        failures["torch"] = describe_error(error)
    return Facts(variables=select_variables(os.environ), **sections, failures=failures)


def here() -> dict[str, Callable[[], Any]]:
    """List what is looked at in this process, by the names of the fields of `Facts`."""
    launcher: list[Launcher] = []

    def look_at_launcher() -> Launcher:
        launcher.append(read_launcher(os.environ, os.getpid()))
        return launcher[0]

    return {
        "installation": read_installation,
        "cores": machine.read_cores,
        "limits": machine.read_limits,
        "shared_memory": machine.read_shared_memory,
        "temporary": machine.read_temporary,
        "interfaces": machine.read_interfaces,
        "nvidia": machine.read_nvidia,
        "launcher": look_at_launcher,
        "master": lambda: resolver.read_master(os.environ, launcher[0] if launcher else None),
        "names": resolver.read_names,
    }


def look_at_all(
    probes: Mapping[str, Callable[[], Any]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Look at several sections; one that fails does not keep the others from it.

    Args:
        probes: Section -> what looks at it.

    Returns:
        The sections that were found, and for each that was not, why.

    Example:
        >>> look_at_all({"cores": lambda: 2, "limits": lambda: [][0]})
        ({'cores': 2}, {'limits': 'IndexError: list index out of range'})
    """
    sections: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for section, look in probes.items():
        try:
            sections[section] = look()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what was looked for
            failures[section] = describe_error(error)
    return sections, failures
