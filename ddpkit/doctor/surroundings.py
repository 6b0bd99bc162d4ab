"""What surrounds this process: environment variables, the launcher they tell of, its ancestors."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ddpkit.doctor.facts import Launcher
from ddpkit.errors import ConfigError
from ddpkit.topology import describe, read_topology

_OURS = re.compile(
    r"(SLURM|OMPI|PMI|PMIX|MPI|I_MPI|PRTE|PET|TORCH|TORCHELASTIC|PYTORCH|NCCL|GLOO|CUDA|NVIDIA|HIP"
    r"|ROCR|OMP|GOMP|MKL|KMP|OPENBLAS|DDPKIT|UCX)_\w+"
    r"|(LOCAL_|GROUP_|NODE_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|TMPDIR|LD_PRELOAD|PYTHONPATH|RES_OPTIONS|USE_LIBUV",
    re.ASCII,
)
_SECRET = re.compile(r"SECRET|TOKEN|JWT|PASSW|CREDENTIAL|_KEY$")
_SET_BY_DDPKIT = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_MOST_ANCESTORS = 64


def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that matter to distributed training, without the values of secrets.

    Args:
        environ: Environment variables.

    Example:
        >>> select_variables({"HOME": "/root", "RANK": "0", "DDPKIT_SECRET": "s3"})
        {'DDPKIT_SECRET': '(hidden)', 'RANK': '0'}
    """
    return {
        name: "(hidden)" if _SECRET.search(name) else environ[name]
        for name in sorted(environ)
        if _OURS.fullmatch(name) and (name, environ[name]) != _SET_BY_DDPKIT
    }


def read_launcher(environ: Mapping[str, str], pid: int) -> Launcher:
    """Read the environment as `distributed` and `process_group` do.

    Args:
        environ: Environment variables.
        pid: Id of this process.
    """
    ancestors, interactive = read_ancestors(pid), _is_interactive()
    try:
        topology = read_topology(environ, pid)
    except ConfigError as error:
        return Launcher(None, str(error), ancestors, interactive)
    if topology.source == "none":
        reading = "none: ddpkit starts the ranks itself"
        return Launcher(topology, reading, ancestors, interactive)
    return Launcher(topology, describe(topology), ancestors, interactive)


def _is_interactive() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def read_ancestors(pid: int) -> tuple[str, ...]:
    """Name the processes above one, the nearest first; nothing where /proc does not tell.

    Args:
        pid: Its id.
    """
    names: list[str] = []
    pid = _parent(pid)
    while pid > 0 and len(names) < _MOST_ANCESTORS:
        name = _read(f"/proc/{pid}/comm").strip()
        # The name of a script's process is that of its interpreter: what it runs says more.
        words = _read(f"/proc/{pid}/cmdline").split("\0")[:3]
        names.append(" ".join([name, *(Path(word).name for word in words if word)]).strip())
        pid = _parent(pid)
    return tuple(filter(None, names))


def _parent(pid: int) -> int:
    found = re.search(r"^PPid:\s*(\d+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
