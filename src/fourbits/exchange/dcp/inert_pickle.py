"""Pickles read as data: classes and functions that a pickle names are neither imported nor called.

A pickle is a program that calls what it names. Here a name becomes a label, a call of it a record of label
and arguments, and a name that is not expected is an error. So all that a pickle can do is to build records,
tuples, lists, dicts, texts and numbers.
"""

import io
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any


class Record:
    """What a call in a pickle would have made. name: what it calls; state: what is set afterwards."""

    #: the name that a class of records stands for
    label = ""

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Of an OrderedDict, whose content nothing here needs."""


class Refused(ValueError):  # noqa: N818 - what happened to a pickle
    """A pickle names something that is not expected."""


def read_inert(
    content: bytes,
    expected: Collection[str],
    path: Path,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """What a pickle describes. expected: the names that it may use, with their modules.

    persistent: for references to objects outside of it; None refuses them. Raises ValueError, with the path,
    for any other name and for what is no pickle.
    """
    try:
        return _Reader(content, frozenset(expected), persistent).load()
    except Refused as error:
        raise ValueError(
            f"{path}: {error}, which no checkpoint of weights needs. It was not run. Do not load the file "
            "with other programs, unless you trust its author."
        ) from None
    except Exception as error:
        raise ValueError(f"{path}: damaged: not a readable pickle ({type(error).__name__}).") from error


class _Reader(pickle.Unpickler):
    def __init__(
        self, content: bytes, expected: frozenset[str], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._expected, self._persistent = expected, persistent

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """A new class of records, whatever the name."""
        name = f"{module_name}.{global_name}"
        if name not in self._expected:
            raise Refused(f"its pickle names {name}")
        return _label(name)

    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            raise Refused("its pickle refers to an object outside of it")
        return self._persistent(pid)


def _label(name: str) -> type[Record]:
    """What stands for a class or function: calling it, or creating an object of it, makes a record."""

    def new(cls: type[Record], *args: Any, **_: Any) -> Record:
        made = object.__new__(cls)
        Record.__init__(made, name, args)
        return made

    return type("Label", (Record,), {"__new__": new, "__init__": lambda *_, **__: None, "label": name})
