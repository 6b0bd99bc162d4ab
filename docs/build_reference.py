"""Makes reference.md, beside this file, out of the docstrings: `python docs/build_reference.py`.

A test compares what this makes with the file, so run it after a docstring has changed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("reference.md")

GROUPS = {
    "Starting ranks": "distributed process_group World",
    "Who am I": "get_rank get_world_size get_local_rank get_device is_rank0",
    "Agreeing": "on_rank0 rank0_first broadcast_value any_rank all_ranks barrier",
    "Sums, means and lists": "reduce_sum reduce_mean gather gather_cat",
    "The model and its gradients": "ddp unwrap accumulate sync_gradients loss_weight",
    "Data": "sharded_loader ShardedLoader",
    "Checkpoints and stopping": "rank0_save barrier_load latest_checkpoint stop_requested",
    "Models over several devices": "plan_split split_model_across_devices",
    "Printing, logging and seeds": "rank0_print get_logger seed_everything",
}
RETURNED = {
    "DistributedFunction": "ddpkit.entry",
    "MicroBatch": "ddpkit.accumulation",
    "SaveHandle": "ddpkit.checkpoint",
    "SplitPlan": "ddpkit.plan",
    "Block": "ddpkit.plan",
}
# What is read elsewhere than in the doctor, which shows many more.
VARIABLES = {
    "DDPKIT_NPROC_PER_NODE": "Number of ranks that `@distributed` starts. An explicit "
    "`nproc_per_node` wins, and so does a launcher.",
    "DDPKIT_LAUNCHER": "`none` makes ddpkit ignore all launchers.",
    "DDPKIT_LOG": "A level, such as `info` or `debug`: shows what ddpkit itself logs, on standard "
    "error as long as `logging` has no handler of its own. Read once, when ddpkit is imported.",
    "DDPKIT_LOG_ALL_RANKS": "`1` shows the debug and info lines of all ranks, from `get_logger` "
    "and from ddpkit.",
    "DDPKIT_SECRET": "Key of the signatures of messages between ranks that a launcher has started: "
    "the same random value for all of them. `@distributed` makes one for those that it starts.",
    "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT": "Set by torchrun, or all of them by hand. "
    "`MASTER_ADDR` and `MASTER_PORT` alone say under SLURM and MPI where rank 0 is to be.",
    "LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK": "The place of a rank on "
    "its machine, and which machine it is; set by torchrun, optional by hand.",
    "TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE PET_NPROC_PER_NODE": "By these torchrun, and "
    "containers that set its options, are recognised.",
    "SLURM_JOB_ID SLURM_JOBID SLURM_STEP_ID SLURM_STEPID SLURM_PROCID SLURM_LOCALID SLURM_NODEID "
    "SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES "
    "SLURM_NTASKS SLURM_TASKS_PER_NODE SLURM_JOB_NODELIST SLURM_NODELIST SLURM_HET_SIZE "
    "SLURM_PACK_SIZE SLURM_RESTART_COUNT": "The task of a SLURM step.",
    "SLURM_CPUS_PER_TASK": "The cores of each task of a SLURM step; see OMP_NUM_THREADS.",
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE OMPI_MCA_ess_base_jobid OMPI_MCA_orte_ess_jobid": "The rank of an "
    "Open MPI launch.",
    "PMI_RANK PMI_SIZE PMI_PORT PMI_FD MPI_LOCALRANKID MPI_LOCALNRANKS I_MPI_HYDRA_UUID I_MPI_ROOT "
    "PMIX_RANK PMIX_NAMESPACE": "The rank of a launch by MPICH, Hydra, Intel MPI or PMIx.",
    "OMP_NUM_THREADS": "CPU threads of each rank. Without it the cores are divided among the ranks "
    "of a machine. The 1 that torchrun sets by itself does not count.",
    "GLOO_SOCKET_IFNAME": "The interface that gloo listens at. It is checked, and chosen where it "
    "is not set and the host name stands for loopback.",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "Set to `1` when ddpkit is imported, unless it is set, so "
    "that counting devices does not open the CUDA driver.",
}

_SECTIONS = ("Args", "Returns", "Yields", "Raises", "Warns", "Attributes", "Example")
_TITLES = {"Args": "Arguments", "Warns": "Warnings"}
_COLLECTIVE = "Collective: every rank must call this"


def build() -> str:
    """Return the text of the reference."""
    parts = [
        "# Reference",
        "Made from the docstrings by `docs/build_reference.py`; the examples in it are run by a "
        "test. What each primitive promises is in [promises.md](promises.md).",
        "\n".join(_overview()),
        *(part for group, names in GROUPS.items() for part in _group(group, names.split())),
        *_returned(),
        *_testing(),
        *_errors(),
        *_variables(),
        *_command_line(),
    ]
    text = "\n\n".join(part.strip("\n") for part in parts)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


# -------------------------------------------------------------------------------------- the parts


def _overview() -> Iterator[str]:
    import ddpkit

    yield "| name | what it does | collective |"
    yield "|---|---|---|"
    for names in GROUPS.values():
        for name in names.split():
            text = inspect.getdoc(getattr(ddpkit, name)) or ""
            first = text.split("\n\n")[0].replace("\n", " ")
            says_so = "yes" if _COLLECTIVE in text else ""
            yield f"| [`{name}`](#{name.lower()}) | {first} | {says_so} |"
    yield ""
    yield "All ranks must call what is collective, in the same order. Further down:"
    yield "[what these return](#what-these-return), [testing](#testing), [errors](#errors),"
    yield "[environment variables](#environment-variables), [the command line](#the-command-line)."


def _group(title: str, names: Iterable[str]) -> Iterator[str]:
    import ddpkit

    yield f"## {title}"
    for name in names:
        yield from _item(name, getattr(ddpkit, name))


def _returned() -> Iterator[str]:
    yield "## What these return"
    for name, module in RETURNED.items():
        yield from _item(name, getattr(importlib.import_module(module), name), module)


def _testing() -> Iterator[str]:
    import ddpkit.testing
    from ddpkit import pytest_plugin, rank_mark

    yield "## Testing"
    for name in ddpkit.testing.__all__:
        yield from _item(name, getattr(ddpkit.testing, name), "ddpkit.testing")
    yield "### The pytest mark `ranks`"
    yield _prose(inspect.cleandoc(pytest_plugin.__doc__ or ""))
    yield f"As `pytest --markers` has it: `{rank_mark.DESCRIPTION.partition(':')[0]}`: " + (
        rank_mark.DESCRIPTION.partition(":")[2].strip()
    )


def _errors() -> Iterator[str]:
    from ddpkit import errors

    yield "## Errors"
    yield _prose(inspect.cleandoc(errors.__doc__ or ""))
    for name in errors.__all__:
        yield from _item(name, getattr(errors, name), "ddpkit.errors")


def _variables() -> Iterator[str]:
    yield "## Environment variables"
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split())} | {meaning} |"
        for names, meaning in VARIABLES.items()
    ]
    yield "\n".join(["| variable | what it is for |", "|---|---|", *rows])
    yield "In which order launchers are looked for: [promises.md](promises.md#launchers)."


def _command_line() -> Iterator[str]:
    from ddpkit import __main__ as program

    parser = program._parser()  # noqa: SLF001
    yield "## The command line"
    for name, command in _commands(parser).items():
        yield f"### `{parser.prog} {name}`"
        yield " ".join((command.description or "").split())
        yield "\n".join(map(_option, _optional(command)))
        yield " ".join((command.epilog or "").split())


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (choices,) = (each.choices for each in parser._actions if isinstance(each.choices, dict))  # noqa: SLF001
    return choices


def _optional(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest != "help"]  # noqa: SLF001


def _option(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar}"
    return f"- `{', '.join(action.option_strings)}{value}`: {(action.help or '') % vars(action)}"


# ----------------------------------------------------------------------------------- one definition


def _item(name: str, item: Any, module: str = "ddpkit") -> Iterator[str]:
    yield f"### {name}"
    is_class = inspect.isclass(item)
    if not is_class:
        yield f"```\n{_signature(name, item)}\n```"
    if module not in ("ddpkit", *RETURNED.values()):
        yield f"In `{module}`."
    yield from _docstring(inspect.getdoc(item) or "")
    if is_class:
        yield from _members(item)


def _members(item: type) -> Iterator[str]:
    documented = dict(_fields(item))
    if documented:
        yield "**Attributes**"
        yield "\n".join(f"- `{name}`: {text}" for name, text in documented.items())
    for name, member in vars(item).items():
        if name.startswith("_") or name in documented:
            continue
        if isinstance(member, property) and member.__doc__:
            yield f"**`.{name}`**: {' '.join(inspect.cleandoc(member.__doc__).split())}"
        elif inspect.isfunction(member) and member.__doc__:
            yield f"#### {item.__name__}.{name}"
            yield f"```\n{_signature(name, member)}\n```"
            yield from _docstring(inspect.getdoc(member) or "")


def _fields(item: type) -> Iterator[tuple[str, str]]:
    """Find the fields of a dataclass and the strings below them, those of its bases first."""
    for owner in reversed(item.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        below = definition.body[1:]
        for field, text in zip(definition.body, below, strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                yield ast.unparse(field.target), " ".join(ast.literal_eval(text.value).split())


def _signature(name: str, item: Any) -> str:
    """Write a signature, the same with every version of Python: annotations are the source's."""
    signature = inspect.signature(item)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    returned = _annotation(signature.return_annotation)
    words = list(_parameters(parameters))
    line = f"{name}({', '.join(words)}){returned}"
    if len(line) <= 88:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returned}"])


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    kinds = [each.kind for each in parameters]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    for number, each in enumerate(parameters):
        if each.kind == keyword_only and not {*kinds[:number]} & {
            each.VAR_POSITIONAL,
            keyword_only,
        }:
            yield "*"
        yield _parameter(each)
        is_last = kinds[number + 1 : number + 2] != [each.kind]
        if each.kind == each.POSITIONAL_ONLY and is_last:
            yield "/"


def _parameter(each: inspect.Parameter) -> str:
    stars = "*" if each.kind == each.VAR_POSITIONAL else "**" * (each.kind == each.VAR_KEYWORD)
    annotation = "" if each.annotation is each.empty else f": {_plain(each.annotation)}"
    if each.default is each.empty:
        return f"{stars}{each.name}{annotation}"
    equals = " = " if annotation else "="
    return f"{stars}{each.name}{annotation}{equals}{each.default!r}"


def _annotation(annotation: Any) -> str:
    return "" if annotation is inspect.Signature.empty else f" -> {_plain(annotation)}"


def _plain(annotation: Any) -> str:
    if not isinstance(annotation, str):
        raise TypeError(f"{annotation!r}: its module lacks `from __future__ import annotations`")
    return annotation


# --------------------------------------------------------------------------- Google's style as text


def _docstring(text: str) -> Iterator[str]:
    pattern = rf"^({'|'.join(_SECTIONS)}):\n"
    head, *rest = re.split(pattern, text, flags=re.MULTILINE)
    yield _prose(head)
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        yield f"**{_TITLES.get(title, title)}**"
        content = textwrap.dedent(body).strip("\n")
        if title == "Example":
            yield from _example(content)
        elif title in ("Returns", "Yields"):
            yield _prose(content)
        else:
            yield "\n".join(_entries(content))


def _entries(content: str) -> Iterator[str]:
    for entry in re.split(r"\n(?=\S)", content):
        name, _, meaning = entry.partition(":")
        first, _, more = meaning.strip().partition("\n")
        lines = [f"- `{name}`: {first}", *textwrap.dedent(more).splitlines()]
        yield "\n  ".join(lines)


def _example(content: str) -> Iterator[str]:
    for part in re.split(r"\n\n(?!\s*<BLANKLINE>)", content):
        is_code = part.lstrip().startswith(">>>")
        yield f"```pycon\n{part.strip()}\n```" if is_code else _prose(part)


def _prose(text: str) -> str:
    return text.strip()


if __name__ == "__main__":
    TARGET.write_text(build(), encoding="utf-8")
