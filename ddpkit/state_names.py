"""Names in state dicts: what wrappers put in front of them, and how that is taken away.

The renaming is done by state-dict hooks and not by overridden methods, so that it also works where
the wrapped model is itself a part of another one, compiled or averaged.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

MODULE = "module."
_COMPILED = "_orig_mod."


def wrapper_prefix(names: Iterable[str], expected: Iterable[str]) -> str:
    """Find what wrappers have put in front of all names of a state dict.

    Args:
        names: Names in a state dict, of a wrapped or of a plain model.
        expected: Names that the plain model has. They settle what is a wrapper's prefix and what is
            a child that happens to be called `module`.

    Returns:
        The prefix to remove, such as `module.` or `_orig_mod.module.`; empty for plain names.
    """
    given, known = list(names), set(expected)
    candidates = [""]
    while given and (more := _next_prefix(given, candidates[-1])):
        candidates.append(more)

    def matches(prefix: str) -> int:
        return sum(name[len(prefix) :] in known for name in given)

    best = max(candidates, key=matches)
    # Where no name fits, the state is of another model. Its names are easier to read without.
    return best if matches(best) or not known else candidates[-1]


def _next_prefix(names: list[str], prefix: str) -> str:
    for wrapper in (MODULE, _COMPILED):
        longer = prefix + wrapper
        if all(name.startswith(longer) for name in names):
            return longer
    return ""


def without_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a copy of a state dict without a prefix, its version metadata included."""
    new = copy.copy(dict(state)) if not isinstance(state, dict) else copy.copy(state)
    new.clear()
    new.update({name.removeprefix(prefix): value for name, value in state.items()})
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        setattr(new, "_metadata", _renamed_metadata(metadata, prefix))  # noqa: B010
    return new


def _renamed_metadata(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Metadata has one entry for each module, whose names lack the dot at the end."""
    return {
        _dotted(path)[len(prefix) : -1]: entry
        for path, entry in metadata.items()
        if _dotted(path).startswith(prefix)
    }


def _dotted(path: str) -> str:
    return path + "." if path else ""


class PlainNames:
    """Lets a wrapper that has a model as its child `module` read and write the model's own names.

    Args:
        wrapper: The wrapper. Its hooks keep this object.
    """

    def __init__(self, wrapper: nn.Module) -> None:
        self._load_prefix = ""
        self._lent: tuple[dict[str, Any], dict[str, Any]] | None = None
        # torch writes an attribute on this hook, which a bound method cannot have.
        wrapper.register_state_dict_post_hook(functools.partial(self._shorten))
        wrapper.register_load_state_dict_pre_hook(self._lengthen)
        wrapper.register_load_state_dict_post_hook(self._finish)

    def _shorten(
        self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: object
    ) -> None:
        """Rename what the model has just written to the names that it has without the wrapper."""
        long = prefix + MODULE
        moved = {name: state.pop(name) for name in list(state) if name.startswith(long)}
        state.update({prefix + name.removeprefix(long): value for name, value in moved.items()})
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            paths = [path for path in metadata if (path + ".").startswith(long)]
            entries = {path: metadata.pop(path) for path in paths}
            for path, entry in entries.items():
                metadata[(prefix + (path + ".").removeprefix(long))[:-1]] = entry

    def _lengthen(self, module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
        """Rename to what torch looks for below the wrapper, whatever wrappers wrote the names."""
        self._load_prefix = prefix
        given = [name for name in state if name.startswith(prefix)]
        plain_names = module.module.state_dict(keep_vars=True)
        old = prefix + wrapper_prefix([name.removeprefix(prefix) for name in given], plain_names)
        new = prefix + MODULE
        if old == new:
            return
        moved = {name: state.pop(name) for name in given}
        state.update({new + name.removeprefix(old): value for name, value in moved.items()})
        # torch hands metadata to the outermost module alone.
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            self._lend_long_paths(metadata, old, new)

    def _lend_long_paths(self, metadata: dict[str, Any], old: str, new: str) -> None:
        """Name the versions for the load that is going on in a dict that is the caller's."""
        self._lent = metadata, dict(metadata)
        renamed = {
            (new + _dotted(path).removeprefix(old))[:-1]: entry
            for path, entry in metadata.items()
            if _dotted(path).startswith(old)
        }
        metadata.clear()
        metadata.update(renamed)

    def _finish(self, module: nn.Module, incompatible: Any) -> None:
        """Give the metadata back, and report names that do not fit without the wrapper's."""
        if self._lent is not None:
            metadata, original = self._lent
            metadata.clear()
            metadata.update(original)
            self._lent = None
        plain = self._load_prefix
        for names in (incompatible.missing_keys, incompatible.unexpected_keys):
            names[:] = [_replaced_prefix(name, plain + MODULE, plain) for name in names]


def _replaced_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
