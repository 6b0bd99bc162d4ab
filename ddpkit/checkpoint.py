"""Checkpoints: one writer, whole files, and loads that every rank agrees on.

Saving happens on rank 0 and its outcome goes to the others through the side channel, so that a slow
disk trips no time-out of a collective and an error on rank 0 is everybody's error. The parts that
later grow (a copy of the state for saves in the background, a series of files) have their seams
here: `plain_state` makes the state, `check_loadable` judges it, `write_whole` puts it on disk.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import fcntl
import hashlib
import io
import os
import pickle
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.agree import exchange, run_on_rank0
from ddpkit.errors import CheckpointError, ConfigError, PeerError
from ddpkit.group import communication_device
from ddpkit.serialize import type_name_of
from ddpkit.wrap import unwrap, without_prefix, wrapper_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_TEMPORARY_PREFIX = ".ddpkit-"
_TEMPORARY_SUFFIX = ".tmp"
_CHUNK_BYTES = 32 << 20
_END_BYTES = 64 << 10
_MAX_SHOWN = 8
_PLAIN_LEAVES = frozenset({bool, int, float, complex, str, bytes, bytearray, type(None)})
_PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_PLAIN_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter})


# ---------------------------------------------------------------------------------- public calls


def rank0_save(obj: object, path: str | os.PathLike[str]) -> None:
    """Save an object from rank 0, whole or not at all; return on all ranks when it is on disk.

    Collective: every rank must call this. Only rank 0 looks at its arguments. The others wait as
    long as rank 0 lives, whatever the time-out of collectives. In a world of one it just saves.

    The file is an ordinary `torch.save` file. It is written beside the target and moved into place
    when it is complete and on disk: whatever is killed when, a reader finds the old file or the new
    one. Missing folders are made, and a target that is a symbolic link stays one.

    Args:
        obj: What to save. Every value with a `state_dict()` in it, at any depth of dicts, lists and
            tuples, is replaced by that; models without the names of DDP or of `torch.compile`.
        path: Where to. Relative paths are relative to rank 0's working folder.

    Raises:
        ConfigError: The path is none.
        CheckpointError: On every rank, if rank 0 could not save, or if the object holds something
            that a safe load would refuse, named with the keys that lead to it. The file that was
            there before is untouched. The original error is the `__cause__`.

    Example:
        >>> rank0_save({"model": torch.nn.Linear(4, 2), "epoch": 3}, "runs/last.pt")
    """
    target = _checked_path("rank0_save", path)
    with _original_cause():
        run_on_rank0(lambda: _save(obj, target), name="rank0_save")


def barrier_load(
    path: str | os.PathLike[str],
    *,
    into: Mapping[str, Any] | None = None,
    map_location: Any = None,
    weights_only: bool = True,
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

    Returns:
        The whole object. With `into`, the entries that were restored are the live objects. Its
        tensors do not depend on the file any more.

    Raises:
        ConfigError: `into` is not a dict of objects with `load_state_dict()`, or the path is none.
        CheckpointError: On every rank, if the file is missing, damaged or refused by the safe
            loader, if an entry of `into` is not in the file, or if a state does not fit its object
            on some rank; missing and unexpected names are listed.

    Example:
        >>> rank0_save({"epoch": 3}, "last.pt")
        >>> barrier_load("last.pt")
        {'epoch': 3}
    """
    target = _checked_path("barrier_load", path)
    _check_into(into)
    with _original_cause():
        loaded = _load(target, map_location, weights_only)
    if into is None:
        return loaded.own(loaded.value)
    _agree_on_outcome(target, lambda: _restore(loaded.value, into, loaded, target))
    rest = loaded.own({key: item for key, item in loaded.value.items() if key not in into})
    return {key: into[key] if key in into else rest[key] for key in loaded.value}


def _checked_path(caller: str, path: object) -> str:
    if (
        isinstance(path, (str, os.PathLike))
        and isinstance(target := os.fspath(path), str)
        and target
    ):
        return target
    raise ConfigError(f"{caller}() was given path={path!r}; expected the path of a file.")


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


def _save(obj: object, target: str) -> None:
    try:
        state = plain_state(obj)
    except Exception as error:
        raise CheckpointError(
            f"Could not save {target}: a state_dict() failed: {_one_line(error)}.", path=target
        ) from error
    check_loadable(state, target)
    try:
        write_whole(Path(target), lambda file: torch.save(state, file))
    except Exception as error:
        raise CheckpointError(
            f"Could not save {target}: {_one_line(error)}. What was there before is untouched.",
            path=target,
        ) from error


def plain_state(value: Any) -> Any:
    """Replace every object that has a `state_dict()` by it, at any depth of plain containers.

    Args:
        value: What the user gave. It is not changed.

    Returns:
        The value with the replacements; the same object where there is nothing to replace.
    """
    if isinstance(value, nn.Module):
        return plain_state(unwrap(value).state_dict())
    if isinstance(value, dict):
        items = {key: plain_state(item) for key, item in value.items()}
        if all(items[key] is value[key] for key in value):
            return value
        new = copy.copy(value)
        new.update(items)
        return new
    if isinstance(value, (list, tuple)):
        parts = [plain_state(item) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return plain_state(value.state_dict())
    return value


def check_loadable(state: object, target: str) -> None:
    """Raise if `torch.load` with its safe defaults would refuse a state.

    Args:
        state: What is going to be saved.
        target: Path for the message.

    Raises:
        CheckpointError: Names each offender with its keys, its type and what to save instead.
    """
    refused = list(_refused(state, "obj", set()))
    if not refused:
        return
    lines = [f"  {path} is a {type_name_of(value)}: {_advice(value)}" for path, value, _ in refused]
    rest = [f"  and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
    raise CheckpointError(
        f"Could not save {target}: a safe load would refuse parts of it.\n"
        + "\n".join(lines[:_MAX_SHOWN] + rest)
        + "\nNothing was written. Types of your own can be allowed with "
        "torch.serialization.add_safe_globals().",
        path=target,
    ) from refused[0][2]


def _refused(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, Exception]]:
    """Yield the path, the value and the loader's error for each part that it would refuse."""
    kind = type(value)
    if kind in _PLAIN_LEAVES or (kind in _PLAIN_TENSORS and not vars(value)):
        return
    if kind in _PLAIN_MAPPINGS or kind in (list, tuple, set):
        if id(value) not in seen:
            seen.add(id(value))
            for part_path, part in _parts(value, path):
                yield from _refused(part, part_path, seen)
        return
    error = _loader_error(value)
    if error is not None:
        yield path, value, error


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"the key {key!r} of {path}", key
            yield f"{path}[{key!r}]", item
        # torch keeps the versions of modules as an attribute of the state dict.
        yield from (
            (f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()
        )
    else:
        template = "{}{{...}}" if isinstance(value, set) else "{}[{}]"
        yield from ((template.format(path, index), item) for index, item in enumerate(value))


def _loader_error(value: object) -> Exception | None:
    """Ask the safe loader itself, which knows every type that it allows."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # a user's type may raise anything
        return error
    return None


def _advice(value: object) -> str:
    """Say what to save instead of a value that the safe loader refuses."""
    kinds = [kind.__name__ for kind in type(value).__mro__]
    if hasattr(value, "_fields"):
        return "save tuple(x) or x._asdict()"
    if hasattr(value, "__dataclass_fields__"):
        return "save dataclasses.asdict(x)"
    return next((_ADVICE[kind] for kind in kinds if kind in _ADVICE), _GENERAL_ADVICE)


_GENERAL_ADVICE = "save what it is made from, as numbers, strings, tensors, dicts and lists"
_ADVICE = {
    "ndarray": "save torch.from_numpy(x)",
    "generic": "save x.item()",
    "Enum": "save x.value or x.name",
    "PurePath": "save str(x)",
    "TorchVersion": "save str(x)",
    "UUID": "save str(x)",
    "Decimal": "save str(x)",
    "date": "save x.isoformat()",
    "time": "save x.isoformat()",
    "timedelta": "save x.total_seconds()",
    "Namespace": "save vars(x)",
    "defaultdict": "save dict(x)",
    "deque": "save list(x)",
    "frozenset": "save set(x)",
    "range": "save list(x)",
}


def _one_line(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}".rstrip(".")


# ------------------------------------------------------------------------------- whole files


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that it is there whole and on disk, or not there at all.

    Args:
        path: Where to. A symbolic link is followed and stays; missing folders are made.
        write: Writes the contents to an open file.

    Raises:
        OSError: Nothing has changed then.
    """
    final = Path(os.path.realpath(path))
    if final.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the path of a file")
    if final.exists() and not os.access(final, os.W_OK):
        raise PermissionError(f"{path} is read-only")
    _make_folder(final.parent)
    _sweep(final.parent)
    with _temporary_in(final.parent) as (file, temporary):
        _write_through(file, write)
        os.fsync(file.fileno())
        temporary.replace(final)
    _sync_folder(final.parent)


def _make_folder(folder: Path) -> None:
    way = (folder, *folder.parents)
    blocking = next((part for part in way if part.exists() and not part.is_dir()), None)
    if blocking is not None:
        raise NotADirectoryError(f"{blocking} is a file; expected a folder")
    missing = [part for part in way if not part.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for part in missing:
        _sync_folder(part.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Recorder(io.RawIOBase):
    """Passes writes on and keeps the first error, which torch hides behind one of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write_through(file: IO[bytes], write: Callable[[IO[bytes]], object]) -> None:
    recorder = _Recorder(file)
    try:
        write(recorder)  # type: ignore[arg-type]  # a RawIOBase is what torch.save needs
        recorder.flush()
    except Exception as error:
        if recorder.error is not None and error is not recorder.error:
            raise recorder.error from error
        raise


@contextlib.contextmanager
def _temporary_in(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Open a file of our own that `_sweep` leaves alone, and remove it unless it was moved."""
    descriptor, temporary = _open_locked(folder)
    with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor has no Path
        try:
            yield file, temporary
        finally:
            temporary.unlink(missing_ok=True)


def _open_locked(folder: Path) -> tuple[int, Path]:
    while True:
        # Short, since a long target would leave no room for more; and nothing that "*.pt" matches.
        path = folder / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}{_TEMPORARY_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # A file system without locks has none for the sweep either, which then removes nothing.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return descriptor, path
        except BaseException:
            os.close(descriptor)
            raise
        # Another program swept it away between the two calls.
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove temporary files whose writers are dead: a living writer holds a lock."""
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*{_TEMPORARY_SUFFIX}"):
        # Whatever prevents a clean-up, another program's clean-up included, must not stop a save.
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


# ------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class _Identity:
    """What tells one file from another without reading all of it."""

    size: int
    modified: int
    contents: str
    """Digest of the checksums of all parts, or of both ends where it is not a zip file."""


@dataclass(frozen=True)
class _Loaded:
    value: Any
    is_mapped: bool
    """Its tensors on the CPU are views of the file."""

    def own(self, value: Any) -> Any:
        """Return a part of the value, independent of the file."""
        return copy.deepcopy(value) if self.is_mapped else value


def _load(target: str, map_location: Any, weights_only: bool) -> _Loaded:
    on_rank0: list[_Loaded] = []

    def read_on_rank0() -> _Identity:
        identity = _identity_or_error(target)
        on_rank0.append(_read(target, "cpu", weights_only))
        return identity

    wanted = run_on_rank0(read_on_rank0, name="barrier_load")
    sees_it = _identity(target) == wanted

    def read_here() -> _Loaded:
        loaded = on_rank0[0] if on_rank0 and _is_cpu(map_location) else None
        loaded = loaded or _read(target, map_location, weights_only)
        _check_unchanged(target, wanted)
        return loaded

    if all(exchange(sees_it, name="barrier_load")):
        return _agree_on_outcome(target, read_here)
    return _receive(target, on_rank0[0].value if on_rank0 else None, map_location, weights_only)


def _is_cpu(map_location: Any) -> bool:
    return map_location is None or map_location in ("cpu", torch.device("cpu"))


def _check_unchanged(target: str, wanted: _Identity) -> None:
    if _identity(target) != wanted:
        raise CheckpointError(
            f"{target} was replaced while it was being loaded. Load it again.", path=target
        )


def _identity(target: str) -> _Identity | None:
    """Return what identifies a file, None where this rank cannot read it."""
    try:
        status = Path(target).stat()
        return _Identity(status.st_size, status.st_mtime_ns, _contents_digest(Path(target)))
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
            digest.update(file.read(_END_BYTES))
            file.seek(max(0, path.stat().st_size - _END_BYTES))
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


def _identity_or_error(target: str) -> _Identity:
    identity = _identity(target)
    if identity is not None:
        return identity
    try:
        Path(target).open("rb").close()
    except OSError as error:
        raise CheckpointError(_unreadable_message(target, error), path=target) from error
    raise CheckpointError(_damaged_message(target), path=target)


def _read(target: str, map_location: Any, weights_only: bool) -> _Loaded:
    # What runs code while it is read may keep hold of the file in ways that no copy undoes.
    is_mapped = weights_only and zipfile.is_zipfile(target)
    location = "cpu" if map_location is None else map_location
    try:
        value = torch.load(target, map_location=location, weights_only=weights_only, mmap=is_mapped)
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
    return f"Could not read {target}: {_one_line(error)}."


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


def _agree_on_outcome(target: str, work: Callable[[], T]) -> T:
    """Do something on every rank; if it fails on one, fail on all with the same error."""
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(work())
    except Exception as error:  # noqa: BLE001  # raised below, when the others know
        failure = error
    texts = exchange(None if failure is None else str(failure), name="barrier_load")
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
    plain = unwrap(live)
    if isinstance(state, Mapping):
        state = without_prefix(state, wrapper_prefix(state, plain.state_dict(keep_vars=True)))
    plain.load_state_dict(state)


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
