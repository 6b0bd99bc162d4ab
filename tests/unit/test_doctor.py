"""How the doctor looks, bears what it meets, and shows it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpkit import __main__ as program
from ddpkit.cgroup import quota_of_groups
from ddpkit.doctor import examination, installed, machine, resolver, surroundings
from ddpkit.doctor.checks import find_problems
from ddpkit.doctor.exercise import exchange
from ddpkit.doctor.facts import Facts, Installation, Lookup, Space, TorchBuild
from ddpkit.doctor.finding import Finding, note, problem
from ddpkit.doctor.render import render_json, render_text
from ddpkit.doctor.resolver import bounded, look_up, look_up_address, read_master
from ddpkit.doctor.surroundings import read_launcher, select_variables
from ddpkit.doctor.torch_side import try_device

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's own files")


# ------------------------------------------------------------------------------- control groups


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("membership", "groups", "quota"),
    [
        ("0::/\n", {".": {"cpu__max": "max 100000\n"}}, None),
        ("0::/\n", {".": {"cpu__max": "250000 100000\n"}}, 2.5),
        ("0::/user/job\n", {"user": {"cpu__max": "300000 100000"}}, 3.0),
        (
            "0::/user/job\n",
            {"user": {"cpu__max": "300000 100000"}, "user/job": {"cpu__max": "50000 100000"}},
            0.5,
        ),
        # A container sees its host's path, but its own group at the top.
        ("0::/docker/4711\n", {".": {"cpu__max": "200000 100000"}}, 2.0),
        (
            "4:cpu,cpuacct:/job\n3:memory:/x\n",
            {"cpu,cpuacct/job": {"cpu__cfs_quota_us": "400000", "cpu__cfs_period_us": "100000"}},
            4.0,
        ),
        ("4:cpu:/\n", {"cpu": {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}}, None),
        ("4:cpu:/\n", {"cpu": {"cpu__cfs_quota_us": "1", "cpu__cfs_period_us": "0"}}, None),
        ("", {".": {"cpu__max": "100000 100000"}}, None),
        ("nonsense\n", {}, None),
    ],
)
def test_quota_of_groups(
    membership: str, groups: dict[str, dict[str, str]], quota: float | None, tmp_path: Path
) -> None:
    written(tmp_path, membership=membership)
    for group, files in groups.items():
        written(tmp_path / "mounted" / group, **files)
    assert quota_of_groups(tmp_path / "membership", tmp_path / "mounted") == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_of_groups(tmp_path / "membership", tmp_path) is None


# ----------------------------------------------------------------------------- names and ports


@pytest.fixture
def answer_late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every question to the resolver wait until the end of the test."""
    released = threading.Event()

    def wait(*_: object, **__: object) -> None:
        released.wait(60)

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    monkeypatch.setattr(socket, "getnameinfo", wait)
    yield
    released.set()


@pytest.mark.usefixtures("answer_late")
@pytest.mark.parametrize("ask", [look_up, look_up_address])
def test_a_resolver_that_hangs_is_not_waited_for(ask: Callable[[str, float], Lookup]) -> None:
    found = ask("127.0.0.1", 0.05)
    assert (found.timed_out, found.answers) == (True, ())
    assert found.error == "there was no answer within 0.05 s"
    assert found.seconds >= 0.05


def test_a_host_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody")
    names = resolver.read_names()
    assert (names.host.asked, names.host.error) == ("nobody", "Name or service not known")
    assert [finding.id for finding in find_problems(Facts(names=names))] == ["host-name-unresolved"]


def test_a_name_that_cannot_be_one() -> None:
    assert look_up("a" * 70 + ".example").error is not None


def test_bounded_passes_results_and_errors_on() -> None:
    assert bounded(lambda: 3, 5.0) == 3
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, 5.0)


def test_loopback_is_known_and_here() -> None:
    master = read_master({"MASTER_ADDR": "127.0.0.1"}, None)
    assert master is not None
    assert (master.is_here, master.port, master.port_error) == (True, None, None)


def test_a_port_that_somebody_holds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        held = read_master({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, None)
        assert held is not None
        assert (held.port_error or "").startswith("EADDRINUSE")
        assert [finding.id for finding in find_problems(Facts(master=held))] == ["port-busy"]
    free = read_master({"MASTER_PORT": port}, None)
    assert free is not None
    assert (free.is_here, free.port, free.port_error) == (True, int(port), None)


def test_an_address_of_another_machine_is_not_here() -> None:
    master = read_master({"MASTER_ADDR": "192.0.2.77", "MASTER_PORT": "29500"}, None)
    assert master is not None
    assert (master.is_here, master.port_error) == (False, None)


@pytest.mark.parametrize("port", ["", "port", "70000", "-1"])
def test_what_is_no_port_is_not_tried(port: str) -> None:
    master = read_master({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, None)
    assert master is not None
    assert master.port is None


def test_no_master_is_nothing_to_look_at() -> None:
    assert read_master({}, read_launcher({}, 1)) is None


# ------------------------------------------------------------------------------- surroundings


def test_secrets_are_not_shown() -> None:
    shown = select_variables({"SLURM_JWT": "a", "DDPKIT_SECRET": "b", "NCCL_DEBUG": "INFO"})
    assert shown == {"DDPKIT_SECRET": "(hidden)", "NCCL_DEBUG": "INFO", "SLURM_JWT": "(hidden)"}


def test_what_ddpkit_itself_sets_is_not_shown() -> None:
    assert select_variables({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}) == {}
    assert select_variables({"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}) != {}


@on_linux
def test_the_processes_above_are_named() -> None:
    above = surroundings.read_ancestors(os.getpid())
    parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    assert above[0].split()[0] == parent.split()[0]


def test_a_process_that_does_not_exist_has_none_above() -> None:
    assert surroundings.read_ancestors(2**22 + 1) == ()


# ------------------------------------------------------------------------------ the machine


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    space = machine.read_space(tmp_path / "nonesuch")
    assert (space.total, space.free) == (None, None)
    assert "nonesuch" in (space.error or "")


def test_a_folder_leaves_no_file(tmp_path: Path) -> None:
    space = machine.read_space(tmp_path)
    assert (space.error, list(tmp_path.iterdir())) == (None, [])
    assert space.total is not None


def test_the_folder_that_is_set_is_the_one_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python itself falls back to another one without a word.
    monkeypatch.setenv("TMPDIR", "/nonesuch")
    assert machine.read_temporary().path == "/nonesuch"
    monkeypatch.delenv("TMPDIR")
    assert machine.read_temporary().path == tempfile.gettempdir()


def test_copies_are_other_installations(tmp_path: Path) -> None:
    for name in ("one", "two"):
        written(tmp_path / name / "ddpkit")
        (tmp_path / name / "ddpkit" / "__init__.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    (tmp_path / "three" / "ddpkit").mkdir(parents=True)  # such as a folder of data
    path = [str(tmp_path / name) for name in ("one", "link", "two", "two", "three", "four")]
    used = (tmp_path / "one" / "ddpkit").resolve()
    assert installed.find_copies(path, used) == (str((tmp_path / "two" / "ddpkit").resolve()),)


def test_metadata_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_RECORDED", ("ddpkit-of-nobody",))
    assert installed.read_installation().recorded == {"ddpkit-of-nobody": None}


def test_a_look_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(machine, "read_cores", fail)
    sections, failures = examination.look_at_all(examination.here())
    assert failures == {"cores": "OSError: no /proc here"}
    assert {"installation", "limits", "launcher", "names"} <= sections.keys()
    facts = Facts(cores=None, failures=failures)
    assert [finding.id for finding in find_problems(facts)] == ["not-looked-at"]
    assert "failed: OSError: no /proc here" in render_text(facts, [])


# ------------------------------------------------------------------------- what needs torch


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    facts = examination.examine(time_limit=5.0)
    assert facts.failures["torch"].startswith("BlockingIOError")
    assert facts.torch is None


def test_a_device_that_is_not_there_is_broken_not_raised() -> None:
    assert try_device("cuda", 99).error is not None


def test_the_exchange_tells_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="gave 1 wrong elements of 1; "):
        exchange()


# --------------------------------------------------------------------------------------- output

FINDINGS = [
    problem("port-busy", "A port is taken\nby somebody.", "Take another.", port=80),
    note("no-fork", "word " * 40, "unset " + "X" * 120),
]


def test_text_tells_what_is_and_ends_with_the_summary() -> None:
    text = render_text(
        Facts(
            variables={"RANK": "0", "LONG": "x " * 100},
            installation=Installation("3.11", "/p", "Linux", "1.0", "/d", {}),
            torch=TorchBuild("2.14", "/t", None, None, None, ("gloo",), 4, 1.5),
            temporary=Space("/tmp", 3 * 2**40, 1023, "OSError: full"),
        ),
        FINDINGS,
    )
    assert "  torch           2.14, imported in 1.5 s (/t)\n" in text
    assert "  built with      neither CUDA nor ROCm\n" in text
    assert "  temporary files /tmp, 1023 B free of 3.0 TiB; FAILED: OSError: full\n" in text
    assert "  variable        RANK=0\n" in text
    assert "PROBLEM port-busy: A port is taken\n    by somebody.\n  -> Take another.\n" in text
    assert "X" * 120 in text  # to be copied
    assert text.endswith("\nNot all is well: 1 problem, and 1 note.")
    assert max(map(len, text.replace("X" * 120, "").splitlines())) <= 100


@pytest.mark.parametrize(
    ("findings", "summary"),
    [
        ([], "All is well."),
        (FINDINGS[1:], "All is well, with 1 note."),
        (FINDINGS[:1] * 2, "Not all is well: 2 problems."),
    ],
)
def test_summary(findings: list[Finding], summary: str) -> None:
    assert render_text(Facts(), findings).splitlines()[-1] == summary


def test_json_has_its_documented_shape() -> None:
    shown = json.loads(render_json(Facts(temporary=Space("/tmp")), FINDINGS))
    assert shown.keys() == {"version", "ok", "facts", "findings"}
    assert (shown["version"], shown["ok"]) == (1, False)
    assert shown["facts"].keys() == Facts.__dataclass_fields__.keys()
    assert shown["facts"]["temporary"]["path"] == "/tmp"
    assert shown["findings"][0] == {
        "id": "port-busy",
        "severity": "problem",
        "message": "A port is taken\nby somebody.",
        "remedy": "Take another.",
        "evidence": {"port": 80},
    }


# --------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "arguments",
    [[], ["nurse"], ["doctor", "--what"], ["doctor", "--timeout", "0"], ["doctor", "--timeout=x"]],
)
def test_a_wrong_command_line_ends_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        program.main(arguments)
    assert raised.value.code == 2
    assert "usage: python -m ddpkit" in capsys.readouterr().err


def test_ctrl_c_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(**_: object) -> Facts:
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "examine", examine)
    assert program.main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["--version"]])
def test_help_ends_with_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        program.main(arguments)
    assert raised.value.code == 0
    assert "ddpkit" in capsys.readouterr().out


@pytest.mark.parametrize(("findings", "status"), [(FINDINGS, 1), (FINDINGS[1:], 0), ([], 0)])
def test_exit_status(
    findings: list[object],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {}

    def examine(**options: object) -> Facts:
        asked.update(options)
        return Facts()

    monkeypatch.setattr(examination, "examine", examine)
    monkeypatch.setattr("ddpkit.doctor.checks.find_problems", lambda _: findings)
    assert program.main(["doctor", "--json", "--no-smoke", "--timeout", "7"]) == status
    assert asked == {"time_limit": 7.0, "with_ranks": False}
    assert json.loads(capsys.readouterr().out)["ok"] is (status == 0)
