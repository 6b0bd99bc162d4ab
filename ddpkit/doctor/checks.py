"""From what is known of a machine to what is wrong with it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ddpkit.doctor import checks_launcher, checks_machine, checks_network, checks_torch
from ddpkit.doctor.facts import Facts
from ddpkit.doctor.finding import Finding, problem

__all__ = ["find_problems"]

# Sections whose failure a check explains.
_EXPLAINED = frozenset({"torch", "exercise", "accelerator_exercise"})


def find_problems(facts: Facts) -> list[Finding]:
    """Check everything that is known.

    Args:
        facts: What is known.

    Returns:
        Problems first, then notes.

    Example:
        >>> from ddpkit.doctor.facts import Space
        >>> full = Facts(shared_memory=Space("/dev/shm", total=2**26, free=2**26))
        >>> [finding.id for finding in find_problems(full)]
        ['shared-memory-small']
    """
    checks = (
        *checks_torch.CHECKS,
        *checks_launcher.CHECKS,
        *checks_network.CHECKS,
        *checks_machine.CHECKS,
        checks_torch.check_exercise,  # a consequence of others, often
        _check_failures,
    )
    found = [finding for check in checks for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.severity != "problem")


def _check_failures(facts: Facts) -> Iterator[Finding]:
    for section, why in facts.failures.items():
        if section not in _EXPLAINED:
            yield problem(
                "not-looked-at",
                f"The section {section!r} could not be looked at: {why}",
                "Mend what else is found here and try again, with a longer --timeout where it "
                "took too long. If it stays, please report it with the output of --json.",
                section=section,
                error=why,
            )
