"""Checkpoints: one writer, whole files, and loads that every rank agrees on.

Saving happens on rank 0 and its outcome goes to the others through the side channel, so that a slow
disk trips no time-out of a collective and an error on rank 0 is everybody's error. The parts that
later grow (a copy of the state for saves in the background, a series of files) have their seams
here: `plain_state` makes the state, `check_loadable` judges it, `write_whole` puts it on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import hashlib
import io
import json
import logging
import os
import pickle
import stat
import threading
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.agree import exchange, run_on_rank0
from ddpkit.control import this_machine
from ddpkit.durable import FolderSyncError, write_whole
from ddpkit.errors import CheckpointError, ConfigError, PeerError
from ddpkit.group import communication_device, get_rank, get_world_size
from ddpkit.nested import with_items
from ddpkit.pending import finish_before_end
from ddpkit.randomness import read_global_streams, write_global_streams
from ddpkit.serialize import type_name_of
from ddpkit.series import is_whole, numbered, older_members, sorted_by_number
from ddpkit.snapshot import CopySpace, check_loadable, on_cpu, one_line, plain_state
from ddpkit.state_names import without_prefix, wrapper_prefix
from ddpkit.wrap import plain_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_RECORD = "archive/ddpkit.json"  # "archive" is torch's name for the root of files like ours
_STREAMS = "archive/ddpkit-rng.pt"
_CHUNK_BYTES = 32 << 20
_WITH_RNG = "(include_rng=True)"  # in the name of a call


# ---------------------------------------------------------------------------------- public calls


def rank0_save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    background: bool = False,
    include_rng: bool = False,
) -> SaveHandle:
    """Save an object from rank 0, whole or not at all; return on all ranks when it is on disk.

    Collective: every rank must call this. Only rank 0 looks at the object. The others wait as long
    as rank 0 lives, whatever the time-out of collectives. In a world of one it just saves.

    The file is an ordinary `torch.save` file. It is written beside the target and moved into place
    when it is complete and on disk: whatever is killed when, a reader finds the old file or the new
    one. Missing folders are made, and a target that is a symbolic link stays one. Tensors are saved
    as tensors of the CPU, without the parts of their storages that they do not use.

    Args:
        obj: What to save. Every value with a `state_dict()` in it, at any depth of dicts, lists and
            tuples, is replaced by that; models without the names of DDP or of `torch.compile`.
        path: Where to. Relative paths are relative to rank 0's working folder.
        keep_last: How many of a series are kept, the new one included: of the files in that folder
            whose names differ from its name in their last digits alone, all with lower numbers but
            the highest are removed once the new one is on disk. Default: nothing is removed.
        background: Whether to return as soon as rank 0 has copied the state, and to write it while
            training goes on. One save is written at a time: the next one waits for it. An error of
            the writing is raised by `wait()`, by the next save, or at the end of the program. The
            memory for the copy is kept for the next one.
        include_rng: Whether the global random streams of every rank (torch's, `random`'s and
            numpy's) are kept beside the data, where `torch.load` does not look, for
            `barrier_load(include_rng=True)`.

    Returns:
        A handle, whose `wait()` returns when the save is on disk.

    Raises:
        ConfigError: The path is none, or `keep_last` is not possible.
        CheckpointError: On every rank, if rank 0 could not save, or if the object holds something
            that a safe load would refuse, named with the keys that lead to it. The file that was
            there before is untouched. The original error is the `__cause__`.

    Example:
        >>> for epoch in range(3):
        ...     state = {"model": torch.nn.Linear(4, 2), "epoch": epoch}
        ...     save = rank0_save(state, f"runs/epoch-{epoch}.pt", keep_last=2, background=True)
        >>> save.wait()
        >>> latest_checkpoint("runs").name
        'epoch-2.pt'
    """
    target = _checked_path("rank0_save", path)
    if target.endswith(os.sep):
        raise ConfigError(f"rank0_save() was given path={path!r}, a folder; name a file in it.")
    _check_keep_last(keep_last, target)
    # Named by themselves, so that ranks that were given different options are told so.
    streams = exchange(read_global_streams(), name=f"rank0_save{_WITH_RNG}") if include_rng else []
    with _original_cause():
        run_on_rank0(
            lambda: _save(obj, target, streams, keep_last, in_background=background),
            name="rank0_save",
        )
    return SaveHandle(target, _background.current)


class SaveHandle:
    """A save that may still be under way; `rank0_save` returns it.

    Example:
        >>> rank0_save({"epoch": 3}, "last.pt", background=True).wait()
    """

    def __init__(self, path: str, save: _BackgroundSave | None = None) -> None:
        self.path = path
        self._save = save

    def wait(self) -> None:
        """Wait until this save is on disk, on all ranks.

        Collective: every rank must call this. It returns at once where nothing is being written.

        Raises:
            CheckpointError: On every rank, if rank 0 could not write it, also where another call
                has raised that before.
        """
        with _original_cause():
            run_on_rank0(self._join, name="SaveHandle.wait")

    def _join(self) -> None:
        if self._save is not None:
            self._save.join()


def latest_checkpoint(
    folder: str | os.PathLike[str], pattern: str = "*.pt", *, verify: bool = False
) -> Path | None:
    """Find the newest checkpoint of a folder that is whole, the same on every rank.

    Collective: every rank must call this, and only rank 0 looks. In a world of one it just looks.

    Args:
        folder: Where checkpoints are. One that does not exist holds none.
        pattern: Which names count, as in a shell.
        verify: Whether checksums are computed too, which reads the files; else a file counts as
            whole if nothing of its structure is missing.

    Returns:
        The file with the highest number in its name (its last digits), or of those without a number
        the one that was changed last. Damaged files are skipped with a warning. None if there is no
        whole one.

    Raises:
        CheckpointError: On every rank, if rank 0 cannot read the folder.

    Example:
        >>> rank0_save({"epoch": 3}, "run-7/epoch-3.pt").wait()
        >>> latest_checkpoint("run-7").name
        'epoch-3.pt'
    """
    place = _checked_path("latest_checkpoint", folder)
    with _original_cause():
        return run_on_rank0(lambda: _latest(place, pattern, verify), name="latest_checkpoint")


def _latest(folder: str, pattern: str, verify: bool) -> Path | None:
    _background.join()  # it may be the one
    try:
        files = sorted_by_number([file for file in Path(folder).glob(pattern) if file.is_file()])
    except OSError as error:
        raise CheckpointError(
            f"Could not read {folder}: {one_line(error)}.", path=folder
        ) from error
    for file in files:
        if is_whole(file, verify=verify):
            return file
        warnings.warn(f"{file} is damaged or cut short, and was skipped.", stacklevel=2)
    return None


def barrier_load(
    path: str | os.PathLike[str],
    *,
    into: Mapping[str, Any] | None = None,
    map_location: Any = None,
    weights_only: bool = True,
    include_rng: bool = False,
    verify: bool = False,
) -> Any:
    """Load what `rank0_save` or `torch.save` has written, the same on every rank.

    Collective: every rank must call this. Rank 0 decides whether the file can be loaded. Ranks that
    see the very same file map it into memory; if one does not, rank 0 reads it and broadcasts it
    tensor by tensor. In a world of one it just loads.

    Args:
        path: Where the file is. Only rank 0 needs to see it.
        into: Live objects by the key under which the file holds their state. They are restored in
            place by their `load_state_dict()`. Names of models may be those of the plain, the
            DDP-wrapped or the compiled model, whatever the live model is.
        map_location: As in `torch.load`. Default: the CPU; what is restored into a live object
            ends on that object's device. Where rank 0 broadcasts, a function or dict sees `cpu`.
        weights_only: False also loads files that can run code while they are read.
        include_rng: Whether every rank goes on with its global random streams, which were saved by
            `rank0_save(include_rng=True)`. With another number of ranks than saved them they are
            left alone, with a warning.
        verify: Whether the checksums of the data are computed before, which reads the file once
            more. Without it a file is refused if anything of its structure is missing or damaged,
            but bits of its tensors that have been changed on the disk go unnoticed.

    Returns:
        The whole object. With `into`, the entries that were restored are the live objects. Its
        tensors do not depend on the file any more.

    Raises:
        ConfigError: `into` is not a dict of objects with `load_state_dict()`, or the path is none.
        CheckpointError: On every rank, if the file is missing, damaged or refused by the safe
            loader, if an entry of `into` is not in the file, or if a state does not fit its object
            on some rank; missing and unexpected names are listed.

    Example:
        >>> rank0_save({"epoch": 3}, "last.pt").wait()
        >>> barrier_load("last.pt")
        {'epoch': 3}
    """
    target = _checked_path("barrier_load", path)
    _check_into(into)
    with _original_cause():
        loaded, streams = _load(
            target, map_location, weights_only, verify=verify, streams=include_rng
        )
    if into is None:
        value = loaded.own(loaded.value)
    else:
        _agree_on_outcome(
            target,
            lambda: _restore(loaded.value, into, loaded, target),
            name="barrier_load(into=...)",
        )
        rest = loaded.own({key: item for key, item in loaded.value.items() if key not in into})
        value = {key: into[key] if key in into else rest[key] for key in loaded.value}
    if streams is not None:
        write_global_streams(streams)  # last, for restoring an object may draw
    return value


def _checked_path(caller: str, path: object) -> str:
    if (
        isinstance(path, (str, os.PathLike))
        and isinstance(target := os.fspath(path), str)
        and target
    ):
        return target
    raise ConfigError(f"{caller}() was given path={path!r}; expected the path of a file.")


def _check_keep_last(keep_last: object, target: str) -> None:
    if keep_last is None:
        return
    if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1:
        raise ConfigError(f"keep_last={keep_last!r} was given; expected an integer of at least 1.")
    if numbered(Path(target).name) is None:
        raise ConfigError(
            f"keep_last={keep_last} was given, but there is no number in the name of {target}, so "
            "it is no member of a series. Put one into it, such as f'epoch-{epoch}.pt'."
        )


def _check_into(into: object) -> None:
    if into is None:
        return
    if not isinstance(into, Mapping):
        raise ConfigError(
            f"barrier_load() was given into={type(into).__qualname__}; expected a dict such as "
            '{"model": model, "opt": optimizer}.'
        )
    for key, value in into.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise ConfigError(
                f"barrier_load() cannot restore into[{key!r}]: a {type(value).__qualname__} has no "
                "load_state_dict(). Leave it out and take its value from the dict that is returned."
            )


@contextlib.contextmanager
def _original_cause() -> Iterator[None]:
    """Show the same cause on every rank: elsewhere than on rank 0 a PeerError stands between."""
    try:
        yield
    except CheckpointError as error:
        if isinstance(error.__cause__, PeerError):
            raise error from error.__cause__.__cause__
        raise


# ------------------------------------------------------------------------------- what is saved


def _save(
    obj: object,
    target: str,
    streams: list[Any],
    keep_last: int | None,
    *,
    in_background: bool,
) -> None:
    _background.join()
    state = _state_to_save(obj, target, _background.space if in_background else None)
    records = _records(streams)
    place = str(Path(target).absolute())  # the working folder may be another one by then

    def write() -> None:
        _write(state, records, target, place)
        if keep_last is not None:
            _remove_older(place, keep_last)

    if in_background:
        _background.start(write)
    else:
        write()


def _records(streams: list[Any]) -> dict[str, bytes]:
    """Make what lies beside the data, where torch does not look."""
    origin = {"ddpkit": _version(), "world_size": get_world_size()}
    records = {_RECORD: json.dumps(origin).encode()}
    if streams:
        contents = io.BytesIO()
        torch.save(streams, contents)
        records[_STREAMS] = contents.getvalue()
    return records


def _remove_older(target: str, keep: int) -> None:
    try:
        for file in older_members(Path(os.path.realpath(target)), keep):
            file.unlink(missing_ok=True)
    except OSError as error:  # the save itself is well
        _logger.warning("could not remove the checkpoints before %s: %s", target, error)


class _BackgroundSave:
    """A save that a thread writes.

    No daemon: a program that ends has its last save written.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self.was_told: bool = False
        self._write = write
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ddpkit-save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # noqa: BLE001  # raised again by whoever joins
            self._error = error
        del self._write  # and the copy of the state with it

    def join(self) -> None:
        """Wait for it, and raise what it has raised."""
        self._thread.join()
        self.was_told = True
        if self._error is not None:
            raise self._error


class _Background:
    """The one save that may be under way in this process."""

    def __init__(self) -> None:
        self.space = CopySpace()
        self.current: _BackgroundSave | None = None

    def start(self, write: Callable[[], None]) -> None:
        finish_before_end(self.join)
        # So that an error of the last one is shown at the end of the program.
        atexit.unregister(self.join)
        atexit.register(self.join)
        self.current = _BackgroundSave(write)

    def join(self) -> None:
        """Wait for it, and raise what it has raised, unless somebody has heard of that."""
        save = self.current
        if save is not None and not save.was_told:
            save.join()
        self.current = None


_background = _Background()


def _state_to_save(obj: object, target: str, space: CopySpace | None) -> Any:
    """Make what is written, and judge it before anything is."""
    try:
        state = plain_state(obj)
    except Exception as error:
        raise CheckpointError(
            f"Could not save {target}: a state_dict() failed: {one_line(error)}.", path=target
        ) from error
    check_loadable(state, target)
    try:
        return on_cpu(state, space=space)
    except Exception as error:  # memory, for one
        raise CheckpointError(
            f"Could not save {target}: its state could not be copied: {one_line(error)}.",
            path=target,
        ) from error


def _write(state: object, records: Mapping[str, bytes], target: str, place: str) -> None:
    try:
        write_whole(Path(place), lambda file: _write_archive(state, records, file))
    except FolderSyncError as error:
        raise CheckpointError(
            f"{target} is in place, but the system could not be made to keep it there if the power "
            f"fails: {one_line(error.__cause__ or error)}.",
            path=target,
        ) from error.__cause__
    except Exception as error:
        raise CheckpointError(
            f"Could not save {target}: {one_line(error)}. What was there before is untouched.",
            path=target,
        ) from error


def _write_archive(state: object, records: Mapping[str, bytes], file: IO[bytes]) -> None:
    """Write what `torch.save` writes, and our records beside it."""
    torch.save(state, file)
    with zipfile.ZipFile(file, "a") as archive:
        for name, contents in records.items():
            archive.writestr(name, contents)


def _version() -> str:
    try:
        return metadata.version("ddpkit")
    except (metadata.PackageNotFoundError, OSError):  # run from its source, or no file can be read
        return "unknown"


def _tell_of_origin(target: str, name: str) -> None:
    """Say how many ranks had saved a file, if they were not as many as now."""
    try:
        with zipfile.ZipFile(name) as archive:
            record = json.loads(archive.read(_RECORD))
            saved_by, version = int(record["world_size"]), str(record["ddpkit"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return  # torch.save has written it, or something else
    if saved_by != get_world_size():
        _logger.info(
            "%s was saved by %d ranks (ddpkit %s), and %d load it",
            *(target, saved_by, version, get_world_size()),
        )


# ------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class _Identity:
    """What tells one file from another without reading all of it."""

    machine: str
    file: tuple[int, int]
    """Its device and number, which mean nothing on another machine."""
    size: int
    modified: int
    contents: str
    """Digest of the recorded checksums of all parts, or of everything where there are none."""

    def is_that_of(self, other: _Identity | None) -> bool:
        """Tell whether another rank sees the same file, or the same contents from afar."""
        if other is None:
            return False
        if self.machine == other.machine:
            return self == other
        mine, theirs = (replace(one, machine="", file=(0, 0)) for one in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class _Loaded:
    value: Any
    is_mapped: bool
    """Its tensors on the CPU are views of the file."""

    def own(self, value: Any) -> Any:
        """Return a part of the value, independent of the file."""
        return copy.deepcopy(value) if self.is_mapped else value


def _load(
    target: str, map_location: Any, weights_only: bool, *, verify: bool, streams: bool
) -> tuple[_Loaded, Mapping[str, Any] | None]:
    on_rank0: list[_Loaded] = []
    name_of_call = f"barrier_load{_WITH_RNG if streams else ''}"
    run_on_rank0(_background.join, name=name_of_call)  # it may write this very file
    with _pinned(target) as name:

        def read_on_rank0() -> tuple[_Identity, bytes | None]:
            identity = _identity_or_error(target, name)
            _check_whole(target, name, verify)
            on_rank0.append(_read(target, name, "cpu", weights_only))
            _check_unchanged(target, name, identity)
            _tell_of_origin(target, name)
            return identity, _read_streams(target, name) if streams else None

        wanted, saved_streams = run_on_rank0(read_on_rank0, name="barrier_load")
        seen = _identity(name)

        def read_here() -> _Loaded:
            if on_rank0 and _is_cpu(map_location):
                return on_rank0[0]
            if seen is not None and seen.machine != wanted.machine:
                _check_whole(target, name, verify)  # it may be another copy
            loaded = _read(target, name, map_location, weights_only)
            _check_unchanged(target, name, seen)
            return loaded

        if all(exchange(wanted.is_that_of(seen), name="barrier_load")):
            loaded = _agree_on_outcome(target, read_here)
        else:
            value = on_rank0[0].value if on_rank0 else None
            loaded = _receive(target, value, map_location, weights_only)
    return loaded, _streams_of_this_rank(target, saved_streams)


@contextlib.contextmanager
def _pinned(target: str) -> Iterator[str]:
    """Yield a name that stays that of one file, also when another one is moved to its path.

    torch opens a file that it maps a second time, by its name, and would get parts of both.
    """
    descriptor = -1
    with contextlib.suppress(OSError):
        if Path(target).is_file():
            descriptor = os.open(target, os.O_RDONLY)
    name = f"/proc/self/fd/{descriptor}"
    try:
        yield name if descriptor >= 0 and Path(name).exists() else target
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _check_whole(target: str, name: str, verify: bool) -> None:
    """Look at what torch does not look at in a file that it maps."""
    if zipfile.is_zipfile(name) and not is_whole(Path(name), verify=verify):
        raise CheckpointError(_damaged_message(target), path=target)


def _streams_of_this_rank(target: str, saved: bytes | None) -> Mapping[str, Any] | None:
    """Return the random streams that this rank has saved, None if other ranks have saved them."""
    if saved is None:
        return None
    streams = torch.load(io.BytesIO(saved), weights_only=True)
    if len(streams) != get_world_size():
        warnings.warn(
            f"{target} holds the random streams of {len(streams)} ranks, and {get_world_size()} "
            "load it, so the streams are left as they are.",
            stacklevel=4,
        )
        return None
    return cast("Mapping[str, Any]", streams[get_rank()])


def _read_streams(target: str, name: str) -> bytes:
    try:
        with zipfile.ZipFile(name) as archive:
            return archive.read(_STREAMS)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{target} holds no random streams. Save it with rank0_save(..., include_rng=True), or "
            "load it without include_rng.",
            path=target,
        ) from error


def _is_cpu(map_location: Any) -> bool:
    return map_location is None or map_location in ("cpu", torch.device("cpu"))


def _check_unchanged(target: str, name: str, before: _Identity | None) -> None:
    if _identity(name) != before:
        raise CheckpointError(
            f"{target} was changed while it was being loaded. Load it again.", path=target
        )


def _identity(name: str) -> _Identity | None:
    """Return what identifies a file, None where this rank cannot read it."""
    try:
        status = Path(name).stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        return _Identity(
            this_machine(),
            (status.st_dev, status.st_ino),
            status.st_size,
            status.st_mtime_ns,
            _contents_digest(Path(name)),
        )
    except Exception:  # noqa: BLE001  # of a damaged archive, zipfile may make anything
        return None


def _contents_digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            for part in zipfile.ZipFile(file).infolist():
                digest.update(repr((part.filename, part.CRC, part.file_size)).encode())
        else:
            file.seek(0)
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _identity_or_error(target: str, name: str) -> _Identity:
    identity = _identity(name)
    if identity is not None:
        return identity
    path = Path(target)
    if path.exists() and not path.is_file() and not path.is_dir():  # opening it might block
        raise CheckpointError(
            f"{target} is no ordinary file, so nothing can be loaded from it.", path=target
        )
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(_unreadable_message(target, error), path=target) from error
    raise CheckpointError(_damaged_message(target), path=target)


def _read(target: str, name: str, map_location: Any, weights_only: bool) -> _Loaded:
    # What runs code while it is read may keep hold of the file in ways that no copy undoes.
    is_mapped = weights_only and zipfile.is_zipfile(name)
    location = "cpu" if map_location is None else map_location
    try:
        value = torch.load(name, map_location=location, weights_only=weights_only, mmap=is_mapped)
    except (FileNotFoundError, PermissionError) as error:
        raise CheckpointError(_unreadable_message(target, error), path=target) from error
    except Exception as error:
        raise CheckpointError(_refusal_message(target, error), path=target) from error
    return _Loaded(value, is_mapped and _is_cpu(map_location))


def _unreadable_message(target: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"There is no checkpoint {target} (working folder {Path.cwd()}). Check the path; the "
            "file must be visible to rank 0, the other ranks need not see it."
        )
    return f"Could not read {target}: {one_line(error)}."


def _refusal_message(target: str, error: Exception) -> str:
    detail = _loader_detail(error)
    if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in detail:
        return (
            f"{target} holds something that the safe loader refuses: {detail} If you trust whoever "
            "wrote the file, allow the type with torch.serialization.add_safe_globals(), or pass "
            "weights_only=False, which lets the file run any code."
        )
    return f"{_damaged_message(target)} ({type(error).__name__}: {detail})"


def _loader_detail(error: Exception) -> str:
    """Return what torch's loader says beside its general advice."""
    text = str(error).strip() or "no message"
    told = next((line for line in text.splitlines() if "nsupported" in line), text.splitlines()[0])
    return told.rpartition("WeightsUnpickler error: ")[2].split(" Please use")[0].strip()


def _damaged_message(target: str) -> str:
    return (
        f"{target} is not a whole torch.save file: it is damaged, cut short, or of another kind. "
        "Load an earlier checkpoint."
    )


def _agree_on_outcome(target: str, work: Callable[[], T], *, name: str = "barrier_load") -> T:
    """Do something on every rank; if it fails on one, fail on all with the same error."""
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(work())
    except Exception as error:  # noqa: BLE001  # raised below, when the others know
        failure = error
    texts = exchange(None if failure is None else str(failure), name=name)
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if not failed:
        return results[0]
    who = "" if len(failed) == len(texts) else f"[rank {failed[0]}/{len(texts)}] "
    cause = failure.__cause__ if isinstance(failure, CheckpointError) else failure
    raise CheckpointError(f"{who}{texts[failed[0]]}", path=target) from cause


# ------------------------------------------------------------------------------- restoring


def _restore(state: Any, into: Mapping[str, Any], loaded: _Loaded, target: str) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{target} holds a {type_name_of(state)}; barrier_load(into=...) needs a dict. Load it "
            "without into, and restore by hand.",
            path=target,
        )
    missing = [key for key in into if key not in state]
    if missing:
        raise CheckpointError(
            f"{target} has no entry {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, state))}. Nothing was restored.",
            path=target,
        )
    for key, live in into.items():
        try:
            _restore_one(live, state[key], loaded)
        except Exception as error:
            raise CheckpointError(
                f"The entry {key!r} of {target} does not fit the {type_name_of(live)} that it "
                f"should be restored into: {str(error).strip()}",
                path=target,
            ) from error


def _restore_one(live: Any, state: Any, loaded: _Loaded) -> None:
    if not isinstance(live, nn.Module):
        # Optimizers and their like keep the tensors that they are given.
        live.load_state_dict(loaded.own(state))
        return
    plain = plain_model(live)
    if isinstance(state, Mapping):
        state = without_prefix(state, wrapper_prefix(state, plain.state_dict(keep_vars=True)))
        state = _independent(state, plain, loaded)
    plain.load_state_dict(state)


def _independent(state: dict[str, Any], model: nn.Module, loaded: _Loaded) -> dict[str, Any]:
    """Leave as parts of the file only what the model copies into its parameters and buffers."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return cast("dict[str, Any]", loaded.own(state))  # it may keep what it is given
    copied = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return with_items(state, {name: loaded.own(state[name]) for name in state.keys() - copied})


# ------------------------------------------------------------------------------- from rank 0


@dataclass(frozen=True)
class _TensorPlace:
    """Where a tensor lies in the storages that are broadcast."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    def build(self, storages: list[torch.UntypedStorage]) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype)
        tensor.set_(storages[self.storage], self.offset, self.shape, self.stride)
        return tensor.requires_grad_(self.requires_grad)


class _StructurePickler(pickle.Pickler):
    """Pickles everything but the data of dense tensors, whose storages it collects."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=4)
        self.storages: list[torch.UntypedStorage] = []
        self._index: dict[tuple[int, int], int] = {}

    def persistent_id(self, obj: Any) -> _TensorPlace | None:
        # Parameters and sparse tensors are pickled as what they consist of: dense tensors.
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return None
        if obj.is_quantized or obj.is_conj() or obj.is_neg() or vars(obj):
            return None
        storage = obj.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._index:
            self._index[key] = len(self.storages)
            self.storages.append(storage)
        place = (obj.dtype, int(obj.storage_offset()), tuple(obj.shape), obj.stride())
        return _TensorPlace(self._index[key], *place, obj.requires_grad)


class _StructureUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(data))
        self._storages = storages

    def persistent_load(self, pid: _TensorPlace) -> torch.Tensor:
        return pid.build(self._storages)


def _receive(target: str, value: Any, map_location: Any, weights_only: bool) -> _Loaded:
    """Give every rank what rank 0 has read: the structure first, then one storage after another."""
    own: list[torch.UntypedStorage] = []

    def take_apart() -> tuple[bytes, list[int]]:
        file = io.BytesIO()
        pickler = _StructurePickler(file)
        pickler.dump(value)
        own.extend(pickler.storages)
        return file.getvalue(), [storage.nbytes() for storage in own]

    structure, sizes = run_on_rank0(take_apart, name="barrier_load")
    storages = own or [torch.UntypedStorage(size) for size in sizes]
    for storage in storages:
        _broadcast_storage(storage)

    def put_together() -> _Loaded:
        received = _StructureUnpickler(structure, storages).load()
        if _is_cpu(map_location):
            return _Loaded(received, is_mapped=bool(own))
        return _Loaded(_relocated(received, map_location, weights_only), is_mapped=False)

    return _agree_on_outcome(target, put_together)


def _broadcast_storage(storage: torch.UntypedStorage) -> None:
    data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    device = communication_device()
    for chunk in data.split(_CHUNK_BYTES):
        staged = chunk.to(device)
        dist.broadcast(staged, 0)
        if staged is not chunk:
            chunk.copy_(staged)


def _relocated(value: Any, map_location: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location=map_location, weights_only=weights_only)
