"""What may be wrong with the installation, the accelerators and the test with two ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ddpkit.doctor.facts import Device, Exercise, Facts, Installation
from ddpkit.doctor.finding import Finding, note, problem

__all__ = ["CHECKS", "check_exercise"]

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_OLDEST_TORCH = (2, 6)
_SLOW_BANDWIDTH = 50e6


def _check_torch(facts: Facts) -> Iterator[Finding]:
    failure = facts.failures.get("torch")
    if failure is not None:
        path = facts.installation.executable if facts.installation else "this interpreter"
        yield problem(
            "torch-unusable",
            f"torch cannot be imported by {path}: {failure}",
            "Run doctor with the interpreter of the environment in which torch is installed, or "
            "install it there anew: pip install --force-reinstall torch. Where it is only slow, as "
            "from a network disk, give doctor a longer --timeout.",
            error=failure,
        )
    elif facts.torch is not None and _numbers(facts.torch.version) < _OLDEST_TORCH:
        yield problem(
            "torch-too-old",
            f"torch is of version {facts.torch.version}, but ddpkit needs 2.6 or later.",
            "Update it: pip install --upgrade torch",
            version=facts.torch.version,
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _check_metadata(facts: Facts) -> Iterator[Finding]:
    installed = facts.installation
    if installed is None:
        return
    for name, recorded in installed.recorded.items():
        if recorded is None and name not in installed.missing:
            yield problem(
                "metadata-missing",
                f"{name} can be imported, but there is no package metadata of it: it was not "
                "installed into this environment, and is found by the search path alone. What it "
                "depends on was not checked, and its entry points (plugins) are unknown.",
                _remedy_of_metadata(name, installed),
                name=name,
                interpreter=installed.executable,
            )
    recorded = installed.recorded.get("ddpkit")
    if recorded is not None and recorded != installed.ddpkit:
        yield note(
            "metadata-differs",
            f"ddpkit {installed.ddpkit} runs from {installed.folder}, but the package metadata "
            f"says {recorded}: the search path leads to other files than those installed, or they "
            "have changed since.",
            f"Install it again: {_remedy_of_metadata('ddpkit', installed)}",
            runs=installed.ddpkit,
            recorded=recorded,
        )


def _remedy_of_metadata(name: str, installed: Installation) -> str:
    if name != "ddpkit":
        return f"{installed.executable} -m pip install {name}"
    source = installed.folder.rpartition("/")[0]
    return f"{installed.executable} -m pip install --editable {source}"


def _check_dependencies(facts: Facts) -> Iterator[Finding]:
    missing = facts.installation.missing if facts.installation else ()
    others = [name for name in missing if name != "torch"]  # which has a finding of its own
    if others:
        yield problem(
            "dependency-missing",
            f"ddpkit needs {' and '.join(others)}, which cannot be found.",
            f"pip install {' '.join(name.replace('_', '-') for name in others)}",
            missing=others,
        )


def _check_copies(facts: Facts) -> Iterator[Finding]:
    installed = facts.installation
    if installed is not None and installed.copies:
        yield problem(
            "two-installations",
            f"ddpkit runs from {installed.folder}, but the search path has another one at "
            f"{', '.join(installed.copies)}. A program that is started in another folder may get "
            "that.",
            "Keep one: pip uninstall ddpkit, unset PYTHONPATH, or start programs elsewhere than in "
            "the folder of its sources.",
            used=installed.folder,
            others=list(installed.copies),
        )


def _check_visible(facts: Facts) -> Iterator[Finding]:
    """Compare the devices that variables name with those that torch sees."""
    seen, torch = facts.accelerators, facts.torch
    if seen is None or torch is None or (torch.cuda is None and torch.hip is None):
        return
    for name in _VISIBLE:
        named = _devices_in(facts.variables.get(name))
        if named and seen.count < len(named):
            yield problem(
                "devices-missing",
                f"{name}={facts.variables[name]!r} names {len(named)} devices, but torch sees "
                f"{seen.count}. Where one does not exist, those after it are left out, too.",
                f"Set {name} to devices that this machine has, or unset it.",
                named=named,
                seen=seen.count,
            )


def _devices_in(setting: str | None) -> list[str]:
    """List the devices that a variable names; -1 ends the list."""
    names: list[str] = []
    for name in map(str.strip, (setting or "").split(",")):
        if name in ("", "-1", "NoDevFiles", "none", "void"):
            break
        names.append(name)
    return names


def _check_unused_nvidia(facts: Facts) -> Iterator[Finding]:
    """Explain why torch uses none of the NVIDIA devices that are there."""
    torch, seen = facts.torch, facts.accelerators
    nodes = facts.nvidia.nodes if facts.nvidia else ()
    if not nodes or torch is None or seen is None or seen.count:
        return
    setting = facts.variables.get("CUDA_VISIBLE_DEVICES")
    evidence = {"devices": list(nodes), "driver": facts.nvidia and facts.nvidia.driver}
    have = f"This machine has {len(nodes)} NVIDIA device{'s' if len(nodes) > 1 else ''}, but "
    if torch.cuda is None:
        yield problem(
            "torch-without-cuda",
            f"{have}torch {torch.version} was built without CUDA, so that training uses the CPU.",
            "Install a torch that was built for CUDA: https://pytorch.org/get-started/locally",
            **evidence,
        )
    elif setting is not None and not _devices_in(setting):
        yield problem(
            "devices-hidden",
            f"{have}CUDA_VISIBLE_DEVICES={setting!r} hides all of them, so that training uses the "
            "CPU.",
            "Unset it, or ask the scheduler for devices (srun --gres=gpu:N), unless the CPU is "
            "what you want.",
            **evidence,
        )
    elif setting is None:  # otherwise it names devices that do not exist
        yield problem(
            "driver-unusable",
            f"{have}torch {torch.version}, built for CUDA {torch.cuda}, sees none of them.",
            "Look whether nvidia-smi works and shows a driver that is new enough for CUDA "
            f"{torch.cuda}, and whether this user (or container) may open {nodes[0]}.",
            **evidence,
        )


def _check_devices(facts: Facts) -> Iterator[Finding]:
    devices = facts.devices or ()
    for device in devices:
        if device.error is not None:
            yield problem(
                "device-broken",
                f"{device.name} cannot be used: {device.error}",
                "Restart what uses it, look at it with nvidia-smi (or its maker's tool), or leave "
                "it out with CUDA_VISIBLE_DEVICES.",
                device=device.name,
            )
    taken = [device for device in devices if _is_taken(device)]
    if taken:
        yield note(
            "device-memory-taken",
            f"Less than half of the memory of {_names(taken)} is free: another program uses it.",
            "Look with nvidia-smi who does; a run that has been killed may have left processes.",
            free={device.name: device.free for device in taken},
        )


def _is_taken(device: Device) -> bool:
    return bool(device.total and device.free is not None and 2 * device.free < device.total)


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)


def check_exercise(facts: Facts) -> Iterator[Finding]:
    """Judge the tests with two ranks. What made one fail may have a finding of its own.

    Args:
        facts: What is known.
    """
    for section, what in (("exercise", "on the CPU"), ("accelerator_exercise", "on accelerators")):
        if section in facts.failures:
            yield problem(
                "ranks-failed",
                f"Two ranks {what} did not do their work: {facts.failures[section]}",
                "Mend what else is found here first. What ddpkit does is shown by "
                "DDPKIT_LOG=debug python -m ddpkit doctor",
                error=facts.failures[section],
            )
    for found in (facts.exercise, facts.accelerator_exercise):
        if found is not None and found.bandwidth < _SLOW_BANDWIDTH:
            yield _slow(found)


def _slow(found: Exercise) -> Finding:
    return note(
        "ranks-slow",
        f"Two ranks ({found.device}) add up only {found.bandwidth / 1e6:.0f} MB in a second, less "
        "than what is usual within a machine.",
        "Look whether other programs keep the cores busy (uptime), and whether the cores are "
        "enough for the ranks.",
        bytes_per_second=found.bandwidth,
    )


def _check_fork(facts: Facts) -> Iterator[Finding]:
    verdict = facts.fork
    if verdict is not None and verdict.reason is not None:
        yield note(
            "no-fork",
            f"Ranks are started by {verdict.method} and not by fork, because {verdict.reason}. "
            "Everything works, but a launch takes seconds and not a tenth of one.",
            "Look what is loaded by LD_PRELOAD, sitecustomize or the torch of this environment; "
            "with torch 2.6 a fork is possible before the first computation only.",
            reason=verdict.reason,
        )


CHECKS = (
    _check_torch,
    _check_metadata,
    _check_dependencies,
    _check_copies,
    _check_visible,
    _check_unused_nvidia,
    _check_devices,
    _check_fork,
)
"""The checks of this file, in the order in which they are shown."""
