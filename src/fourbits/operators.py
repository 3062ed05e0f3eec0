"""Operators that compiled graphs call: schema, implementation, fake implementation.

`torch.library.custom_op` wraps every call in checks that take 25 us, more than the host may spend on several
launches. These are plain registrations: the dispatcher calls the implementation directly, in 5 us. Without
the checks an implementation must itself keep these rules: no output shares memory with an input or another
output, and only arguments that the schema marks are written. Tests hold every operator to them by
`torch.library.opcheck`.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.library import Library, register_autograd, register_fake

P = ParamSpec("P")
T = TypeVar("T")

_library = Library("fourbits", "FRAGMENT")


def operator(
    schema: str, fake: Callable[..., Any] | None = None, gradients: Callable[..., Any] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as the operator `fourbits::...` of a schema, on every device; returns the operator.

    fake: returns empty outputs for the compiler, which sees nothing else of the operator. None: the compiler
    sees the function's own operators instead, and the gradients they have (CompositeImplicitAutograd).
    gradients: (ctx, gradient of each output) -> gradient of each argument.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        # Called from a frame that dynamo skipped, it would trace the implementation.
        run = torch.compiler.disable(function)
        _library.impl(name, run, "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd")
        if fake is not None:
            register_fake(f"fourbits::{name}", fake, lib=_library)
        if gradients is not None:
            register_autograd(f"fourbits::{name}", gradients, lib=_library)
        return cast("Callable[P, T]", getattr(torch.ops.fourbits, name).default)

    return register
