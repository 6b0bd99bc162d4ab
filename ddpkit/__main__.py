"""`python -m ddpkit doctor`: is this machine, and this environment, fit for training."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from ddpkit.doctor.installed import own_version

_DESCRIPTION = """Look at this machine and this environment as a distributed training would:
versions, devices, cores and their limits, network, the variables of launchers, and two ranks that
add up tensors. Every problem comes with its remedy."""
_EPILOG = """Exit status: 0 if all is well (there may be notes), 1 if there is a problem, 2 for a
wrong command line."""
_DEFAULT_TIMEOUT = 120.0
_INTERRUPTED = 128 + signal.SIGINT
_LONGEST_TIMEOUT = 86_400.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the name of the program; those of this process by default.

    Returns:
        The exit status: 0 if all is well, 1 if there is a problem, 130 after Ctrl-C.

    Raises:
        SystemExit: The command line is wrong (2), or only help was asked for (0).
    """
    options = _parser().parse_args(arguments)
    # Imported when needed: --help and --version need none of it.
    from ddpkit.doctor.checks import find_problems
    from ddpkit.doctor.examination import examine
    from ddpkit.doctor.render import is_well, render_json, render_text

    try:
        facts = examine(time_limit=options.timeout, with_ranks=options.smoke)
    except KeyboardInterrupt:  # what it had started has ended
        return _INTERRUPTED
    findings = find_problems(facts)
    render = render_json if options.json else render_text
    sys.stdout.write(render(facts, findings) + "\n")
    return 0 if is_well(findings) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddpkit")
    parser.add_argument("--version", action="version", version=f"ddpkit {own_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="look for what would go wrong", description=_DESCRIPTION, epilog=_EPILOG
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--no-smoke", dest="smoke", action="store_false", help="do not start two ranks"
    )
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=_DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="for everything that needs torch; what has not finished then is stopped and reported "
        "(default: %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise argparse.ArgumentTypeError(
            f"{text!r} was given, expected is a number of seconds up to {_LONGEST_TIMEOUT:g}"
        )
    return seconds


if __name__ == "__main__":
    sys.exit(main())
