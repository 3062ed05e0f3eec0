"""Where metrics go besides metrics.jsonl: TensorBoard, wandb, or what a user registers.

A sink that cannot be set up is an error before anything is prepared. One that fails later is dropped, which
is reported once: losing a chart must not end a run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fourbits.settings import nearest, to_dict
from fourbits.train.config import RunConfig
from fourbits.train.listener import Record, RunListener, RunStart
from fourbits.train.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run that a sink records.

    step: steps already done; config: its settings as nested dicts; origin: "from-RUN-step-N" of a run that
    was started with --from.
    """

    folder: Path
    step: int
    config: dict[str, Any]
    origin: str | None = None


class MetricSink(Protocol):
    """Receives the metrics of a run."""

    def begin(self, run: SinkRun) -> None:
        """The next metrics are of step run.step + 1. Metrics of later steps, from before a kill, are void.

        Called again when the run rolls back.
        """
        ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finite numbers of one step or validation."""
        ...

    def end(self, ended: str) -> None:
        """The run has ended: "finished", "interrupted", "non-finite" or "failed"."""
        ...


#: name in train.sinks -> function that creates the sink; raises ValueError if its package is missing
_FACTORIES: dict[str, Callable[[], MetricSink]] = {}


def register_sink(name: str, make: Callable[[], MetricSink]) -> None:
    """Add a sink for `train.sinks`. make: called before a run's text is prepared.

    Raises ValueError for a name that is taken.
    """
    if name in _FACTORIES or name in SHIPPED:
        raise ValueError(f"register_sink: {name!r} is registered already. Choose another name.")
    _FACTORIES[name] = make


#: shipped sinks, each in a separate module that imports its package late
SHIPPED = {"tensorboard": "tensorboard_sink", "wandb": "wandb_sink"}


class SinkListener(RunListener):
    """Passes a run's records to its sinks."""

    def __init__(self, config: RunConfig, folder: Path, notify: Callable[[str], None]) -> None:
        """Set up the sinks of train.sinks. Raises ValueError for an unknown one or a missing package."""
        self._sinks = make_sinks(config.train.sinks)
        self._config, self._folder, self._notify = config, folder, notify

    def begin(self, start: RunStart) -> None:
        """Pass the run and its step to every sink."""
        self._begin(start.step)

    def rollback(self, record: Record) -> None:
        """Begin again after an earlier step."""
        self._begin(record["to"])

    def _begin(self, step: int) -> None:
        origin = _origin(RunFolder(self._folder).ancestry())
        run = SinkRun(self._folder, step, to_dict(self._config), origin)
        self._each(lambda sink: sink.begin(run))

    def step(self, record: Record) -> None:
        """Pass on the numbers of a step."""
        self._write(record)

    def validation(self, record: Record) -> None:
        """Pass on the numbers of a validation."""
        self._write(record)

    def end(self, summary: Record) -> None:
        """Let every sink finish."""
        self._each(lambda sink: sink.end(summary["ended"]))

    def _write(self, record: Record) -> None:
        numbers = {
            key: float(value)
            for key, value in record.items()
            if key not in ("kind", "step") and isinstance(value, int | float) and math.isfinite(value)
        }
        self._each(lambda sink: sink.write(record["step"], numbers))

    def _each(self, use: Callable[[MetricSink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                use(sink)
            except Exception as error:  # noqa: BLE001 - whatever a chart's library raises
                del self._sinks[name]
                self._notify(f"sink {name}: {type(error).__name__}: {error}. The run continues without it.")


class Listeners(RunListener):
    """Several listeners as one, in order."""

    def __init__(self, listeners: Sequence[RunListener]) -> None:
        self._listeners = tuple(listeners)

    def preparing(self, what: str, done: int, total: int) -> None:
        """Pass the event on to every listener."""
        for listener in self._listeners:
            listener.preparing(what, done, total)

    def begin(self, start: RunStart) -> None:
        """Pass the event on to every listener."""
        for listener in self._listeners:
            listener.begin(start)

    def step(self, record: Record) -> None:
        """Pass the event on to every listener."""
        for listener in self._listeners:
            listener.step(record)

    def validation(self, record: Record) -> None:
        """Pass the event on to every listener."""
        for listener in self._listeners:
            listener.validation(record)

    def rollback(self, record: Record) -> None:
        """Pass the event on to every listener."""
        for listener in self._listeners:
            listener.rollback(record)

    def note(self, text: str) -> None:
        """Pass the event on to every listener."""
        for listener in self._listeners:
            listener.note(text)

    def end(self, summary: Record) -> None:
        """Pass the event on to every listener."""
        for listener in self._listeners:
            listener.end(summary)


def make_sinks(names: Sequence[str]) -> dict[str, MetricSink]:
    """The sinks of train.sinks. Raises ValueError for an unknown one or a missing package."""
    return {name: _make_sink(name) for name in names}


def _origin(ancestry: Sequence[Mapping[str, Any]]) -> str | None:
    """Where a run comes from, by the entries of manifest.json."""
    if not ancestry:
        return None
    entry = ancestry[-1]
    return f"from-{Path(entry.get('model') or entry['run']).name}-step-{entry['step']}"


def _make_sink(name: str) -> MetricSink:
    if name in _FACTORIES:
        return _FACTORIES[name]()
    if name in SHIPPED:
        return import_module(f"fourbits.train.{SHIPPED[name]}").make()
    known = [*SHIPPED, *_FACTORIES]
    raise ValueError(
        f"train.sinks: unknown sink {name!r}.{nearest(name, known)} Known: {', '.join(known)}. "
        "fourbits.register_sink adds one."
    )
