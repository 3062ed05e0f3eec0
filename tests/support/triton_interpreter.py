"""Run a test program in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, ModuleType

import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

TESTS = Path(__file__).parents[1]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests/support/<program>.py with the interpreter on; its output and exit code."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", f"support.{program}", *arguments]
    return subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, check=False)


def prepare() -> None:
    """Make the interpreter of Triton 3.6 usable: call first in a test program.

    It converts arrays of one element as numpy no longer does, and it patches Triton's language at every call
    of a device function, each patch around the previous one; once is enough and several times faster.
    """
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    patched: set[frozenset[str]] = set()

    def tensor(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def language(function: FunctionType) -> interpreter._LangPatchScope:
        seen = frozenset(value.__name__ for value in _modules(function) if value in (tl, tl.core))
        if seen not in patched:
            patched.add(seen)
            patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang_tensor, interpreter._patch_lang = tensor, language


def failures(checks: Iterable[tuple[object, Callable[[], list[str]]]]) -> int:
    """Run the named checks of a test program, print what each finds wrong, and count the failing ones."""
    prepare()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what is allocated and not yet written with NaN
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of exponents that are dropped afterwards
    failed = 0
    for name, check in checks:
        wrong = check()
        failed += bool(wrong)
        print(name, *wrong, sep="\n  ")
    return failed


def _modules(function: FunctionType) -> list[ModuleType]:
    return [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
