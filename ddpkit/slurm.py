"""What srun tells the tasks of a step: their numbers, the tasks of each node, and the nodes.

Everything here is pure. Only the variables of the *step* say what runs. Those of the job shown
the allocation: a batch script and a shell of `salloc` have them, too, and a step may be smaller.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpkit.errors import ConfigError
from ddpkit.variables import LAUNCHER_SWITCH, first_set, incomplete, integer, require, shown

__all__ = ["SlurmStep", "expand_node_list", "expand_task_counts", "read_step"]

_IDS = ("SLURM_STEP_ID", "SLURM_STEPID")
_JOBS = ("SLURM_JOB_ID", "SLURM_JOBID")
_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_TOTAL, _JOB_TOTAL = "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"
_COUNTS, _JOB_COUNTS = "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"
_NODES, _JOB_NODES = "SLURM_STEP_NODELIST", ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NUM_NODES = "SLURM_STEP_NUM_NODES"
_RESTARTS = "SLURM_RESTART_COUNT"
_HETEROGENEOUS = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")

# Ids from here on stand for what is no step of srun: the shell of salloc, the batch script, ...
_FIRST_SPECIAL_ID = 0xFFFF_FFF0
_LARGEST_LIST = 100_000

_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_HOSTS = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


@dataclass(frozen=True)
class SlurmStep:
    """The place of this process in a step of several tasks."""

    rank: int
    """Number of the task in the step."""
    local_rank: int
    """Number of the task on its node."""
    node: int
    """Number of the node in the step."""
    tasks_per_node: tuple[int, ...]
    """How many tasks each node has. Which ones depends on the distribution that was asked for."""
    nodes: tuple[str, ...]
    """Names of the nodes; empty where the variables do not tell them."""
    name: str
    """Job and step, such as `12.0`; what differs between two steps that run at the same time."""
    variables: tuple[str, ...]
    """Names of what was read."""

    @property
    def world_size(self) -> int:
        """Number of tasks in all."""
        return sum(self.tasks_per_node)

    @property
    def local_world_size(self) -> int:
        """Number of tasks on this node."""
        return self.tasks_per_node[self.node]


def read_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """Decode the variables of a SLURM step.

    The parts of a heterogeneous step (`srun ... : ...`) are one step. A copy of these variables in
    a container or in a shell that a task has started cannot be told from the task itself; neither
    can the shell of `srun --ntasks=4 --pty bash`. `DDPKIT_LAUNCHER=none` is for these.

    Args:
        environ: Environment variables.

    Returns:
        The step; None outside of one (a job alone, the shell of `salloc`), and in one of one task.

    Raises:
        ConfigError: The variables are incomplete, contradict each other, or are no numbers.

    Example:
        >>> step = read_step({
        ...     "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5",
        ...     "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "7",
        ...     "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "n[07-10]",
        ... })
        >>> (step.rank, step.world_size, step.local_rank, step.local_world_size, step.nodes[0])
        (5, 7, 1, 2, 'n07')
    """
    if not _is_step(environ):
        return None
    tasks_per_node, counted = _tasks_per_node(environ)
    if sum(tasks_per_node) == 1:
        return None
    require(environ, _TASK, "a SLURM step", also_shown=(*_IDS, *counted))
    rank, local_rank, node = (integer(environ, name) for name in _TASK)
    _check_task(environ, rank, local_rank, node, tasks_per_node, counted)
    nodes, listed = _nodes(environ, tasks_per_node, counted)
    ids = [first_set(environ, *names) for names in (_JOBS, _IDS)]
    return SlurmStep(
        rank=rank,
        local_rank=local_rank,
        node=node,
        tasks_per_node=tasks_per_node,
        nodes=nodes,
        name=_name(environ),
        variables=(*filter(None, ids), *_TASK, *counted, *listed),
    )


def _is_step(environ: Mapping[str, str]) -> bool:
    name = first_set(environ, *_IDS)
    if name is None or integer(environ, name) >= _FIRST_SPECIAL_ID:
        return False
    return first_set(environ, "SLURM_PROCID", _TOTAL, _COUNTS) is not None


def _name(environ: Mapping[str, str]) -> str:
    job, step = first_set(environ, *_JOBS), first_set(environ, *_IDS)
    name = f"{environ[job] if job else '?'}.{environ[step] if step else '?'}"
    # A job that is queued again counts its steps from 0 again.
    return f"{name}+{environ[_RESTARTS]}" if _RESTARTS in environ else name


def _tasks_per_node(environ: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Count the tasks of each node, and name the variables that told it."""
    if _COUNTS in environ:
        counts = expand_task_counts(environ[_COUNTS], _COUNTS)
        _check_counts(environ, counts)
        return counts, tuple(name for name in (_TOTAL, _COUNTS) if name in environ)
    total_name = _TOTAL if _TOTAL in environ else _JOB_TOTAL
    total = integer(environ, total_name, 0)
    if total_name in environ and total < 1:
        raise ConfigError(f"{total_name}={total} was given, but a step has at least one task.")
    if total == 1 or (total and integer(environ, _NUM_NODES, 0) == 1):
        return (total,), (total_name,)
    # srun writes the counts of the job anew for its step; only if they add up, it has done so.
    if total and _JOB_COUNTS in environ:
        counts = expand_task_counts(environ[_JOB_COUNTS], _JOB_COUNTS)
        if sum(counts) == total:
            return counts, (total_name, _JOB_COUNTS)
    others = (*_IDS, *_TASK, _NUM_NODES, _JOB_TOTAL, _JOB_COUNTS)
    raise incomplete(environ, (_TOTAL, _COUNTS), "a SLURM step", also_shown=others)


def _check_counts(environ: Mapping[str, str], counts: Sequence[int]) -> None:
    for name, what, number in (
        (_TOTAL, "tasks", sum(counts)),
        (_NUM_NODES, "nodes", len(counts)),
    ):
        if name in environ and integer(environ, name) != number:
            raise _contradiction(
                f"by {name}={environ[name]!r} it has {environ[name]} {what}, by "
                f"{_COUNTS}={environ[_COUNTS]!r} {number}"
            )


def _check_task(
    environ: Mapping[str, str],
    rank: int,
    local_rank: int,
    node: int,
    tasks_per_node: Sequence[int],
    counted: Sequence[str],
) -> None:
    total, nodes = sum(tasks_per_node), len(tasks_per_node)
    if not 0 <= node < nodes:
        problem = f"SLURM_NODEID={node} is no number of one of {nodes} nodes"
    elif not 0 <= rank < total:
        problem = f"SLURM_PROCID={rank} is no number of one of {total} tasks"
    elif not 0 <= local_rank < tasks_per_node[node]:
        problem = (
            f"SLURM_LOCALID={local_rank} is no number of one of the {tasks_per_node[node]} tasks "
            f"of node {node}"
        )
    else:
        return
    raise _contradiction(f"{problem}, which was read from {shown(environ, counted)}")


def _nodes(
    environ: Mapping[str, str], tasks_per_node: Sequence[int], counted: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the nodes of the step, and the variable that told them."""
    if _NODES in environ:
        nodes = expand_node_list(environ[_NODES], _NODES)
        if len(nodes) == len(tasks_per_node):
            return nodes, (_NODES,)
        # Some releases list the nodes of one part of a heterogeneous step only.
        if first_set(environ, *_HETEROGENEOUS) is None:
            raise _contradiction(
                f"by {_NODES}={environ[_NODES]!r} it has {len(nodes)} nodes, by "
                f"{shown(environ, counted)} {len(tasks_per_node)}"
            )
        return (), ()
    name = first_set(environ, *_JOB_NODES)
    nodes = expand_node_list(environ[name], name) if name is not None else ()
    # The job's nodes are the step's if there are as many; a step may use a part of them.
    return (nodes, (name,)) if name and len(nodes) == len(tasks_per_node) else ((), ())


def _contradiction(problem: str) -> ConfigError:
    return ConfigError(
        f"The variables of a SLURM step contradict each other: {problem}. Leave what srun sets as "
        f"it is, or set {LAUNCHER_SWITCH}=none to run every task alone."
    )


def expand_task_counts(text: str, name: str = _COUNTS) -> tuple[int, ...]:
    """Write out how many tasks each node has.

    Args:
        text: Such as `2(x3),1`.
        name: Variable that it comes from, for the message.

    Raises:
        ConfigError: It has another form.

    Example:
        >>> expand_task_counts("2(x3),1")
        (2, 2, 2, 1)
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if count < 1 or times < 1 or len(counts) + times > _LARGEST_LIST:
            raise ConfigError(f"{name}={text!r} was given, but expected is a form like '2(x3),1'.")
        counts.extend([count] * times)
    return tuple(counts)


def expand_node_list(text: str, name: str = _NODES) -> tuple[str, ...]:
    """Write out the names of nodes, in the order in which SLURM numbers them.

    Args:
        text: Such as `n[1-3,07],gpu-[01-02]-[1-2],login`. A number has as many digits, at least,
            as the first one of its range.
        name: Variable that it comes from, for the message.

    Raises:
        ConfigError: It has another form, or more than 100,000 names.

    Example:
        >>> expand_node_list("n[09-11,3],login,r[1-2]c[3-4]")
        ('n09', 'n10', 'n11', 'n3', 'login', 'r1c3', 'r1c4', 'r2c3', 'r2c4')
    """
    nodes: list[str] = []
    text, position = text.strip(), 0
    try:
        while True:
            item = _HOSTS.match(text, position)
            if item is None:
                raise ValueError("a name is missing")
            nodes.extend(_expand_hosts(item[0], _LARGEST_LIST - len(nodes)))
            position = item.end()
            if position == len(text):
                return tuple(nodes)
            if text[position] != ",":
                raise ValueError(f"{text[position]!r} does not belong there")
            position += 1
    except ValueError as error:
        raise ConfigError(
            f"{name}={text!r} was given, but expected is a list of nodes like 'n[1-3,07],login' "
            f"({error})."
        ) from None


def _expand_hosts(item: str, limit: int) -> Iterator[str]:
    """Write out one item of a list; its last bracket runs fastest."""
    parts = re.split(r"\[([^\[\]]*)\]", item)  # those at odd places stood in brackets
    brackets = [_ranges(part) for part in parts[1::2]]
    if math.prod(sum(len(numbers) for numbers, _ in ranges) for ranges in brackets) > limit:
        raise ValueError(f"it has more than {_LARGEST_LIST:,} names")
    choices = [[part] for part in parts]
    choices[1::2] = [
        [f"{number:0{width}d}" for numbers, width in ranges for number in numbers]
        for ranges in brackets
    ]
    return map("".join, itertools.product(*choices))


def _ranges(text: str) -> list[tuple[range, int]]:
    """Read what stands in a bracket: ranges, and how many digits their numbers have at least."""
    ranges = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise ValueError(f"{item!r} is no range of numbers")
        ranges.append((range(int(match[1]), int(match[2] or match[1]) + 1), len(match[1])))
    return ranges
