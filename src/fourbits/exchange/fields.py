"""Reads the keys of a config.json with their types; a wrong value is one short error that names the key.

Nothing is converted: transformers, too, would refuse a size written as 64.0 or "64".
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fourbits.exchange.shown import shown

# Products of a few sizes stay below 2^63, and a mistyped size is an error instead of a huge allocation.
LARGEST_SIZE = 2**18
LARGEST_COUNT = 2**31 - 1
MOST_LAYERS = 4096
LARGEST_NUMBER = 1e30

_REQUIRED: Any = object()


class Fields(Mapping[str, Any]):
    """A configuration whose keys are read by kind. Raises ValueError for a missing key or a wrong value.

    default: the value of an absent key; without one, the key is required.
    """

    def __init__(self, mapping: object) -> None:
        if not isinstance(mapping, Mapping) or not all(isinstance(key, str) for key in mapping):
            raise ValueError(
                "exchange: a model's configuration must be a mapping of names to values, got "
                f"{shown(mapping)}. Pass the content of config.json, or config.to_dict()."
            )
        self._mapping: Mapping[str, Any] = mapping

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def whole(self, key: str, default: Any = _REQUIRED, *, least: int = 1, most: int = LARGEST_SIZE) -> Any:
        """A whole number from least to most, or the default."""
        value = self._value(key, default)
        absent = key not in self and default is not _REQUIRED
        if absent or (type(value) is int and least <= value <= most):
            return value
        raise self._wrong(key, f"a whole number from {least} to {most}")

    def number(self, key: str, default: Any = _REQUIRED, *, positive: bool = False) -> float:
        """A finite number, at least 0 or (positive) above 0; NaN is refused."""
        value = self._value(key, default)
        if type(value) in (int, float) and 0 <= value <= LARGEST_NUMBER and not (positive and value == 0):
            return float(value)
        raise self._wrong(key, f"a number {'above' if positive else 'of at least'} 0")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.get(key) is not None

    def _value(self, key: str, default: Any) -> Any:
        if key not in self and default is _REQUIRED:
            raise ValueError(f"exchange: the configuration must have {key!r}, which is missing.")
        return self.get(key, default)

    def _wrong(self, key: str, wanted: str) -> ValueError:
        return ValueError(
            f"exchange: {key} must be {wanted}, got {shown(self.get(key))}. Correct config.json."
        )
