"""Operators that compiled graphs call: schema, implementation, fake implementation.

`torch.library.custom_op` wraps every call in checks that take 25 us, more than the host may spend on several
launches. These are plain registrations: the dispatcher calls the implementation directly, in 5 us. Without
the checks an implementation must itself keep these rules: no output shares memory with an input or another
output, and only arguments that the schema marks are written. Tests hold every operator to them by
`torch.library.opcheck`.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.library import Library, register_autograd, register_fake

from fourbits.version import VERSION

P = ParamSpec("P")
T = TypeVar("T")

_library = Library("fourbits", "FRAGMENT")
#: folders whose code determines what a graph with our operators computes
TRACED = ("formats", "quant", "gemm", "recipe", "linear", "model")


def digest_of(package: Path) -> str:
    """An identifier that changes with any source in TRACED, and with the version."""
    digest = hashlib.sha256(VERSION.encode())
    for path in sorted(path for folder in TRACED for path in (package / folder).rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return f"v{digest.hexdigest()[:12]}"


#: the overload name of every operator. Compilers keep graphs on disk by the names of the operators in them,
#: not by what these are traced into: under one name, a graph of other sources would run.
OVERLOAD = digest_of(Path(__file__).parent)


def operator(
    schema: str, fake: Callable[..., Any] | None = None, gradients: Callable[..., Any] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as the operator `fourbits::...` of a schema, on every device; returns the operator.

    fake: returns empty outputs for the compiler, which sees nothing else of the operator. None: the compiler
    sees the function's own operators instead, and the gradients they have (CompositeImplicitAutograd).
    gradients: (ctx, gradient of each output) -> gradient of each argument.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        base, _, signature = schema.partition("(")
        name = f"{base}.{OVERLOAD}"
        _library.define(f"{name}({signature}", tags=(torch.Tag.pt2_compliant_tag,))
        # Called from a frame that dynamo skipped, it would trace the implementation.
        run = torch.compiler.disable(function)
        _library.impl(name, run, "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd")
        if fake is not None:
            register_fake(f"fourbits::{name}", fake, lib=_library)
        if gradients is not None:
            register_autograd(f"fourbits::{name}", gradients, lib=_library)
        return cast("Callable[P, T]", getattr(getattr(torch.ops.fourbits, base), OVERLOAD))

    return register
