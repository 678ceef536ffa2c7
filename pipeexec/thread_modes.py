"""`ThreadMode`: a dispatch mode that several threads may have active at the same time."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from torch._C._dynamo import guards
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

#: Facts that torch keeps about the modes of the process, by the name of its variable.
_ANY, _NOT_INFRA = "_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"
_OPAQUE = "_is_in_any_mode_without_ignore_compile_internals"
#: Function that tells the guards of compiled code; versions of torch before 2.11 may lack it.
_NOTE_OF_GUARDS = "set_is_in_mode_without_ignore_compile_internals"


class ThreadMode(TorchDispatchMode):
    """A dispatch mode that several threads may have active at the same time.

    torch notes for the whole process whether modes are active, and a mode that ends restores the
    note of its beginning. If modes of two threads overlap, the one that ends last so restores the
    other one's: from then on modules that `torch.compile` compiled run without it, or compile in
    each call. Here the notes follow from the modes that are active, and from the notes before them.
    """

    _lock: ClassVar = threading.Lock()
    _active: ClassVar[list[ThreadMode]] = []
    _before: ClassVar[dict[str, bool]] = {}

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        with self._lock:
            if not self._active:
                names = (_ANY, _NOT_INFRA, _OPAQUE)
                self._before.update({x: getattr(_python_dispatch, x, False) for x in names})
            super().__enter__()  # type: ignore[no-untyped-call]
            self._active.append(self)
            self._note()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
            self._active.remove(self)
            self._note()

    def _note(self) -> None:
        """Set torch's notes from the active modes."""
        active = self._active
        is_opaque = any(not mode.ignore_compile_internals() for mode in active)
        now = {_ANY: bool(active), _NOT_INFRA: bool(active), _OPAQUE: is_opaque}
        for name, before in self._before.items():
            setattr(_python_dispatch, name, before or now[name])
        if (note := getattr(guards, _NOTE_OF_GUARDS, None)) is not None:
            note(self._before[_OPAQUE] or is_opaque)
