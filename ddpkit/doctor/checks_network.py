"""What may be wrong with interfaces, host names and the port of rank 0. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpkit.doctor.facts import Facts, Lookup
from ddpkit.doctor.finding import Finding, note, problem
from ddpkit.topology import is_loopback
from ddpkit.wording import shortened

__all__ = ["CHECKS", "interfaces_of_nccl"]

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SLOW = 1.0
_SERVED = ("torchrun", "ddpkit")  # where the port is held by who started the ranks
_IN_USE = "EADDRINUSE"


def _check_gloo(facts: Facts) -> Iterator[Finding]:
    gloo = facts.gloo
    setting = facts.variables.get(_GLOO)
    if gloo is None:
        return
    if gloo.refusal is not None:
        names = [name for name, each in gloo.addresses.items() if not all(map(is_loopback, each))]
        yield problem(
            "interface-refused",
            gloo.refusal,
            f"unset {_GLOO}" + (f", or export {_GLOO}={names[0]}" if names else ""),
            setting=setting,
            addresses=dict(gloo.addresses),
        )
    elif setting is not None and _num_nodes(facts) > 1 and _is_only_loopback(facts, setting):
        yield problem(
            "interface-is-loopback",
            f"{_GLOO}={setting!r} is the loopback, by which no other machine can be reached, but "
            f"there are {_num_nodes(facts)} machines.",
            f"unset {_GLOO}; ddpkit finds the interface that leads to rank 0.",
            setting=setting,
        )
    elif gloo.chosen is not None:
        yield note(
            "host-name-is-loopback",
            f"This host's name stands for {gloo.advertised or 'nothing'}, which other machines "
            f"cannot use. ddpkit names the interface {gloo.chosen} to gloo; other programs fail to "
            "connect.",
            f"For those: export {_GLOO}={gloo.chosen}",
            advertised=gloo.advertised,
            chosen=gloo.chosen,
        )


def _num_nodes(facts: Facts) -> int:
    topology = facts.launcher.topology if facts.launcher else None
    return topology.num_nodes if topology is not None else 1


def _is_only_loopback(facts: Facts, setting: str) -> bool:
    known = facts.gloo.addresses if facts.gloo else {}
    addresses = [each for name in setting.split(",") for each in known.get(name, ())]
    return bool(addresses) and all(map(is_loopback, addresses))


def _check_nccl(facts: Facts) -> Iterator[Finding]:
    setting, existing = facts.variables.get(_NCCL), facts.interfaces
    if setting and existing and not interfaces_of_nccl(setting, existing):
        yield problem(
            "nccl-interface-missing",
            f"{_NCCL}={setting!r} leaves no interface of this machine, which has "
            f"{shortened(existing)}: NCCL cannot start.",
            f"unset {_NCCL}, or name the one that the other machines reach this one by.",
            setting=setting,
            existing=list(existing),
        )


def interfaces_of_nccl(setting: str, existing: Sequence[str]) -> list[str]:
    """List the interfaces that NCCL may use.

    Args:
        setting: Beginnings of names, separated by commas; after `^` those to leave out, after `=`
            whole names.
        existing: The interfaces of the machine.

    Example:
        >>> interfaces_of_nccl("^docker,lo", ["lo", "eth0", "docker0"])
        ['eth0']
        >>> interfaces_of_nccl("=eth", ["lo", "eth0"])
        []
    """
    leaves_out, rest = setting.startswith("^"), setting.removeprefix("^")
    whole, rest = rest.startswith("="), rest.removeprefix("=")
    named = [name.partition(":")[0] for name in rest.split(",") if name]

    def is_named(interface: str) -> bool:
        return any(interface == name if whole else interface.startswith(name) for name in named)

    return [interface for interface in existing if is_named(interface) is not leaves_out]


def _check_lookups(facts: Facts) -> Iterator[Finding]:
    """Judge how long the resolver took."""
    names = [facts.names.host, facts.names.loopback] if facts.names else []
    for lookup in [*names, *([facts.master.lookup] if facts.master else [])]:
        if not lookup.timed_out and lookup.seconds < _SLOW:
            continue
        make = problem if lookup.timed_out else note
        took = (
            f"more than {lookup.seconds:.0f} s" if lookup.timed_out else f"{lookup.seconds:.1f} s"
        )
        yield make(
            "resolver-slow",
            f"To resolve {lookup.asked!r} takes {took}. Programs stand still for that long when "
            "they start, for each connection, and look as if they hung.",
            "Put this host's name and 127.0.0.1 into /etc/hosts, with `files` first in the line "
            "`hosts:` of /etc/nsswitch.conf; or mend the name servers in /etc/resolv.conf, or "
            'shorten the wait: export RES_OPTIONS="timeout:1 attempts:1"',
            asked=lookup.asked,
            seconds=lookup.seconds,
        )


def _check_host(facts: Facts) -> Iterator[Finding]:
    lookup = facts.names.host if facts.names else None
    if lookup is not None and _is_unknown(lookup):
        yield problem(
            "host-name-unresolved",
            f"This host's own name, {lookup.asked!r}, does not resolve: {lookup.error}. gloo and "
            "torchrun ask for it. ddpkit does without on one machine; others fail or stand still.",
            f'Add it to /etc/hosts: echo "127.0.1.1 {lookup.asked}" >> /etc/hosts; between several '
            "machines with the address that they reach this one by.",
            host=lookup.asked,
            error=lookup.error,
        )


def _is_unknown(lookup: Lookup) -> bool:
    return lookup.error is not None and not lookup.timed_out


def _check_master(facts: Facts) -> Iterator[Finding]:
    master = facts.master
    topology = facts.launcher.topology if facts.launcher else None
    if master is None:
        return
    host = master.lookup.asked
    if _is_unknown(master.lookup):
        yield problem(
            "master-unresolved",
            f"The host of rank 0, {host!r}, does not resolve here: {master.lookup.error}. No rank "
            "of this machine can join.",
            "Set MASTER_ADDR to a name or address that all machines know, such as the output of "
            "`hostname -i` there.",
            host=host,
            error=master.lookup.error,
        )
    elif master.is_here is False and topology is not None and _is_rank0(facts):
        yield problem(
            "master-elsewhere",
            f"This is rank 0, but {host!r} ({shortened(master.lookup.answers)}) is not an address "
            "of this machine, so that rank 0 cannot listen there.",
            "Set MASTER_ADDR on all machines to an address of this one, or start rank 0 there.",
            host=host,
            addresses=list(master.lookup.answers),
        )


def _is_rank0(facts: Facts) -> bool:
    topology = facts.launcher.topology if facts.launcher else None
    return topology is not None and topology.source != "none" and topology.rank == 0


def _check_port(facts: Facts) -> Iterator[Finding]:
    master = facts.master
    topology = facts.launcher.topology if facts.launcher else None
    if master is None or master.port is None or master.port_error is None:
        return
    if topology is not None and (topology.source in _SERVED or topology.rank != 0):
        return  # held by those that this rank is to meet
    taken = master.port_error.startswith(_IN_USE)
    yield problem(
        "port-busy" if taken else "port-unusable",
        f"MASTER_PORT={master.port} cannot be served on {master.lookup.asked}: "
        + (
            "another process holds it. It may be an earlier run of yours that goes on."
            if taken
            else f"{master.port_error}."
        ),
        f"Set MASTER_PORT to a free port for all ranks, or unset it. Who holds it is shown by: "
        f"ss -ltnp 'sport = :{master.port}'",
        port=master.port,
        error=master.port_error,
    )


CHECKS = (
    _check_gloo,
    _check_nccl,
    _check_lookups,
    _check_host,
    _check_master,
    _check_port,
)
"""The checks of this file, in the order in which they are shown."""
