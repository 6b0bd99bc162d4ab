"""What the doctor shows: text for a person, or one JSON object for a program. Pure."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence

from ddpkit.doctor.checks_machine import count_ranks, threads_of_rank
from ddpkit.doctor.facts import Device, Exercise, Facts, Lookup, Space
from ddpkit.doctor.finding import Finding

__all__ = ["render_json", "render_text"]

_WIDTH = 100
_LABEL = 16
_MOST_VARIABLES = 40
_LONGEST_VALUE = 60

Rows = Iterator[tuple[str, str]]


def render_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Write everything as one JSON object.

    Args:
        facts: What is known.
        findings: What was found.

    Returns:
        An object with `version` (1, which changes with the meaning of the others), `ok` (whether
        there is no problem), `facts` (the fields of `Facts`; null for what was not looked at) and
        `findings`, each with `id`, `severity`, `message`, `remedy` and `evidence`.

    Example:
        >>> json.loads(render_json(Facts(), []))["ok"]
        True
    """
    content = {
        "version": 1,
        "ok": is_well(findings),
        "facts": dataclasses.asdict(facts),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    return json.dumps(content, indent=2, default=str)


def is_well(findings: Sequence[Finding]) -> bool:
    """Tell whether there is no problem.

    Args:
        findings: What was found.

    Example:
        >>> is_well([])
        True
    """
    return all(finding.severity != "problem" for finding in findings)


def render_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Write everything for a person: what is there, what was found, and whether all is well.

    Args:
        facts: What is known.
        findings: What was found.

    Example:
        >>> print(render_text(Facts(), []).splitlines()[-1])
        All is well.
    """
    sections = {
        "Versions": _versions(facts),
        "Devices": _devices(facts),
        "Cores": _cores(facts),
        "Limits": _limits(facts),
        "Network": _network(facts),
        "Launcher": _launcher(facts),
        "Two ranks": _ranks(facts),
    }
    lines = []
    for title, rows in sections.items():
        lines += [title, *(line for label, text in rows for line in _row(label, text)), ""]
    for finding in findings:
        lines += [*_finding_lines(finding), ""]
    return "\n".join([*lines, _summary(findings)])


def _finding_lines(finding: Finding) -> list[str]:
    message, *rest = finding.message.splitlines() or [""]
    return [
        *_wrapped(message, f"{finding.severity.upper()} {finding.id}: ", 4),
        *(f"    {line}" for line in rest),  # such as a traceback, which keeps its form
        *_wrapped(finding.remedy, "  -> ", 5),
    ]


def _row(label: str, text: str) -> list[str]:
    return _wrapped(text, f"  {label:<{_LABEL - 1}} ", 2 + _LABEL)


def _wrapped(text: str, label: str, indent: int) -> list[str]:
    # Commands and paths are to be copied: they are not broken.
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(findings: Sequence[Finding]) -> str:
    problems = sum(finding.severity == "problem" for finding in findings)
    notes = _counted(len(findings) - problems, "note")
    if problems:
        also = f", and {notes}" if len(findings) > problems else ""
        return f"Not all is well: {_counted(problems, 'problem')}{also}."
    return f"All is well, with {notes}." if findings else "All is well."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


# ------------------------------------------------------------------------------------- sections


def _missing(facts: Facts, section: str) -> str:
    why = facts.failures.get(section)
    return "not looked at" if why is None else f"failed: {why.splitlines()[0]}"


def _versions(facts: Facts) -> Rows:
    installed, torch = facts.installation, facts.torch
    if installed is None:
        yield "installed", _missing(facts, "installation")
    else:
        yield "python", f"{installed.python} ({installed.executable})"
        yield "ddpkit", f"{installed.ddpkit} ({installed.folder})"
        yield "system", installed.platform
    if torch is None:
        yield "torch", _missing(facts, "torch")
    else:
        builds = {"CUDA": torch.cuda, "ROCm": torch.hip, "NCCL": torch.nccl}
        built = [f"{name} {version}" for name, version in builds.items() if version]
        yield "torch", f"{torch.version}, imported in {torch.seconds:.1f} s ({torch.folder})"
        yield "built with", ", ".join(built) or "neither CUDA nor ROCm"
        yield "backends", ", ".join(torch.backends) or "none"


def _devices(facts: Facts) -> Rows:
    seen = facts.accelerators
    if seen is None:
        yield "accelerators", _missing(facts, "accelerators")
    else:
        yield "accelerators", f"{seen.count} x {seen.kind}" if seen.kind else "none, so the CPU"
    for device in facts.devices or ():
        yield device.name, _describe_device(device)
    if facts.nvidia is not None and facts.nvidia.nodes:
        yield "NVIDIA devices", f"{len(facts.nvidia.nodes)}, {facts.nvidia.driver or 'no driver'}"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in facts.variables:
            yield name, f"{facts.variables[name]!r}"


def _describe_device(device: Device) -> str:
    if device.error is not None:
        return f"FAILED: {device.error.splitlines()[0]}"
    if device.total is None or device.free is None:
        return f"{device.model} works"
    return f"{device.model} works, {_size(device.free)} free of {_size(device.total)}"


def _cores(facts: Facts) -> Rows:
    cores = facts.cores
    if cores is None:
        yield "cores", _missing(facts, "cores")
        return
    quota = "no quota" if cores.quota is None else f"a quota of {cores.quota:g}"
    there = f"{cores.machine} in the machine, bound to {cores.affinity}, {quota}"
    yield "cores", f"{cores.usable} usable ({there})"
    yield "OMP_NUM_THREADS", facts.variables.get("OMP_NUM_THREADS", "not set")
    ranks = _counted(count_ranks(facts), "rank")
    yield "threads", f"{threads_of_rank(facts)} for each of {ranks}" + _alone(facts)


def _alone(facts: Facts) -> str:
    return f" (torch alone uses {facts.torch.threads})" if facts.torch is not None else ""


def _limits(facts: Facts) -> Rows:
    limits = facts.limits
    if limits is None:
        yield "limits", _missing(facts, "limits")
    else:
        most = _limit(limits.most_descriptors)
        yield "open files", f"{_limit(limits.descriptors)} (may be raised to {most})"
        locked = limits.locked_memory
        yield "locked memory", "unlimited" if locked is None else _size(locked)
    yield "shared memory", _describe_space(facts, facts.shared_memory, "shared_memory")
    yield "temporary files", _describe_space(facts, facts.temporary, "temporary")


def _limit(number: int | None) -> str:
    return "unlimited" if number is None else str(number)


def _describe_space(facts: Facts, space: Space | None, section: str) -> str:
    if space is None:
        return _missing(facts, section)
    room = f"{space.path}, {_size(space.free)} free of {_size(space.total)}"
    return room if space.error is None else f"{room}; FAILED: {space.error}"


def _network(facts: Facts) -> Rows:
    addresses = facts.gloo.addresses if facts.gloo else {}
    names = facts.interfaces if facts.interfaces is not None else list(addresses)
    texts = [
        f"{name} ({', '.join(addresses[name])})" if addresses.get(name) else name for name in names
    ]
    yield "interfaces", ", ".join(texts) or _missing(facts, "interfaces")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name in facts.variables:
            yield name, facts.variables[name]
    if facts.names is None:
        yield "host name", _missing(facts, "names")
    else:
        yield "host name", _describe_lookup(facts.names.host)
        yield "loopback", _describe_lookup(facts.names.loopback)
    if facts.master is not None:
        port = "" if facts.master.port is None else f", port {facts.master.port}"
        error = f" ({facts.master.port_error})" if facts.master.port_error else ""
        yield "rank 0", _describe_lookup(facts.master.lookup) + port + error


def _describe_lookup(lookup: Lookup) -> str:
    answer = f"{lookup.asked} -> {', '.join(lookup.answers) or 'nothing'}"
    error = "" if lookup.error is None else f": {lookup.error}"
    return f"{answer}{error} ({lookup.seconds * 1000:.0f} ms)"


def _launcher(facts: Facts) -> Rows:
    launcher = facts.launcher
    if launcher is None:
        yield "read", _missing(facts, "launcher")
    else:
        yield "read", launcher.reading.splitlines()[0]
    shown = list(facts.variables.items())
    for name, value in shown[:_MOST_VARIABLES]:
        yield "variable", f"{name}={textwrap.shorten(value, _LONGEST_VALUE, placeholder=' ...')}"
    if len(shown) > _MOST_VARIABLES:
        yield "variable", f"and {len(shown) - _MOST_VARIABLES} more, shown by --json"


def _ranks(facts: Facts) -> Rows:
    verdict = facts.fork
    if verdict is None:
        yield "start method", _missing(facts, "fork")
    else:
        because = "which is safe here" if verdict.reason is None else f"because {verdict.reason}"
        yield "start method", f"{verdict.method}, {because}"
    yield "on the CPU", _describe_exercise(facts, facts.exercise, "exercise")
    if facts.accelerators is not None and facts.accelerators.count > 1:
        found = facts.accelerator_exercise
        yield "on accelerators", _describe_exercise(facts, found, "accelerator_exercise")


def _describe_exercise(facts: Facts, found: Exercise | None, section: str) -> str:
    if found is None:
        return _missing(facts, section)
    return (
        f"started and finished in {found.seconds:.2f} s; an all-reduce of one number takes "
        f"{found.latency * 1e6:.0f} us, of {_size(found.tensor_bytes)} goes at "
        f"{found.bandwidth / 1e9:.2f} GB/s"
    )


def _size(size: int | None) -> str:
    if size is None:
        return "?"
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit != "GiB" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
