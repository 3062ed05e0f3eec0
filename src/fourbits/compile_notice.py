"""Messages about compilation: that it takes more than a moment, and that the user has disabled it.

Compilations that follow each other closely are reported as one, through the logger `fourbits`: a warning once
they have taken longer than a user waits without wondering, and another when they have ended. Nothing is
reported where compilers find everything in their caches on disk.
"""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config as dynamo_config

_logger = logging.getLogger("fourbits")
#: seconds of compilation before the first warning
_PATIENCE = 1.5
#: seconds without compilation after which a burst has ended
_QUIET = 2.0


def compilation_disabled() -> bool:
    """Whether the user has disabled torch.compile (TORCH_COMPILE_DISABLE=1); one warning says what it costs.

    A function compiled with fullgraph=True then raises instead of running, so callers run it uncompiled.
    """
    if dynamo_config.disable:
        _warn_of_disabled()
    return dynamo_config.disable


@functools.cache
def _warn_of_disabled() -> None:
    _logger.log(
        _level(),
        "fourbits: torch.compile is disabled (TORCH_COMPILE_DISABLE=1): the model's regions run slower, and "
        "quantization on a CPU about 20 times slower, with the same bits. Unset it to compile them.",
    )


class Burst:
    """Compilations that follow each other closely, in all threads."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, timer: Callable[..., Any] = threading.Timer
    ) -> None:
        """clock: seconds; timer: as threading.Timer."""
        self._clock, self._new_timer = clock, timer
        self._lock = threading.RLock()
        self._timer: Any = None
        self._running = self._count = 0
        self._started = self._seconds = 0.0
        self._announced = False

    @contextmanager
    def compiling(self, what: str) -> Generator[None]:
        """Compile `what` within."""
        self._start(what)
        try:
            yield
        finally:
            self._end()

    def _start(self, what: str) -> None:
        with self._lock:
            self._running += 1
            self._count += 1
            if self._running == 1:
                self._started = self._clock()
                self._after(max(_PATIENCE - self._seconds, 0.0), self._announce, what)

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._seconds += self._clock() - self._started
                self._after(_QUIET, self._report)

    def _after(self, seconds: float, call: object, *arguments: object) -> None:
        """Call in some seconds, and forget what was to be called before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._new_timer(seconds, call, arguments)
        self._timer.daemon = True
        self._timer.start()

    def _announce(self, what: str) -> None:
        with self._lock:
            if self._running and not self._announced:
                self._announced = True
                _logger.log(
                    _level(),
                    "fourbits: compiling kernels (%s). The first step waits for them; they are cached for "
                    "later runs.",
                    what,
                )

    def _report(self) -> None:
        with self._lock:
            if self._running:
                return
            if self._announced:
                kernels = "kernel" if self._count == 1 else "kernels"
                _logger.log(
                    _level(), "fourbits: compiled %d %s in %.1f s.", self._count, kernels, self._seconds
                )
            self._count, self._seconds, self._announced = 0, 0.0, False


def _level() -> int:
    """A warning, once per node where a launcher started several processes."""
    return logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.INFO


_burst = Burst()
compiling = _burst.compiling
