"""Reads pickles as data: the classes and functions that a pickle names are neither imported nor called.

A pickle is a program that calls the functions it names. Here a name becomes a label, a call becomes a record
of the label and its arguments, and an unexpected name is an error. So a pickle can only build records,
tuples, lists, dicts, strings and numbers.
"""

import io
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any


class Record:
    """Stands for the result of a call in a pickle. name: the function; state: set after the call."""

    #: the name for which a class of records stands
    label = ""

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an entry of an OrderedDict, which no reader here needs."""


class Refused(ValueError):  # noqa: N818 - what happened to a pickle
    """A pickle names something that is not expected."""


def read_inert(
    content: bytes,
    expected: Collection[str],
    path: Path,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The content of a pickle as records. expected: the names that it may use, with their modules.

    persistent: resolves references to objects outside the pickle; None refuses them. Raises ValueError with
    the path for any other name, and for content that is not a pickle.
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
        """A new class of records for a name that is expected."""
        name = f"{module_name}.{global_name}"
        if name not in self._expected:
            raise Refused(f"its pickle names {name}")
        return _label(name)

    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            raise Refused("its pickle refers to an object outside of it")
        return self._persistent(pid)


def _label(name: str) -> type[Record]:
    """A class of records that stands for a class or function; calling it creates a record."""

    def new(cls: type[Record], *args: Any, **_: Any) -> Record:
        made = object.__new__(cls)
        Record.__init__(made, name, args)
        return made

    return type("Label", (Record,), {"__new__": new, "__init__": lambda *_, **__: None, "label": name})
