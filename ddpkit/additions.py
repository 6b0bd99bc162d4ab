"""Notices that parameters or parts were added to a module, at no cost until that happens."""

from __future__ import annotations

import weakref

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Additions:
    """Knows whether something was added to any module of this process.

    torch calls its hooks whenever a module gets a parameter or a part. They are taken away with
    this object.

    Attributes:
        happened: Whether something was added; whoever has looked into it sets it to False.
    """

    def __init__(self) -> None:
        self.happened = False
        weak = weakref.ref(self)

        def note(*_: object) -> None:
            additions = weak()
            if additions is not None:
                additions.happened = True

        for register in (
            register_module_parameter_registration_hook,
            register_module_module_registration_hook,
        ):
            weakref.finalize(self, register(note).remove).atexit = False
