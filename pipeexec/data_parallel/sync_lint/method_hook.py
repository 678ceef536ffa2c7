"""Call functions before and after a method of a class that is not ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def wrap_method(
    stack: ExitStack,
    owner: type,
    name: str,
    before: Callable[..., object] | None,
    after: Callable[..., object] | None,
) -> None:
    """Call functions before and after a method of a class, until the stack closes."""
    method = vars(owner)[name]

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = method(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, wrapped)
    stack.callback(setattr, owner, name, method)
