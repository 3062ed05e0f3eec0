"""The form of a report: the fields that are read from it and their kinds, checked before any computation."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fourbits.bench.native_report.cases import SAMPLES, Case
from fourbits.gemm.native.probes import PROBES
from fourbits.gemm.native.sums_check import RULES


class _Kind(NamedTuple):
    """A kind of value: how an error calls it, and its types in JSON."""

    rule: str
    types: tuple[type, ...]
    #: a number above 0, by which others are divided
    positive: bool = False

    def fits(self, value: object) -> bool:
        """Whether a value is of this kind; True and False are not numbers."""
        of_type = isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))
        return of_type and (value is None or not self.positive or 0 < value < math.inf)  # pyright: ignore[reportOperatorIssue]


class _List(NamedTuple):
    """A list of values of one kind. length: None for any."""

    each: Any
    length: int | None = None

    @property
    def rule(self) -> str:
        """How an error calls it."""
        return "a list" if self.length is None else f"a list of {self.length}"

    def fits(self, value: object) -> bool:
        """Whether a value is such a list, whatever it holds."""
        return isinstance(value, list) and self.length in (None, len(value))  # pyright: ignore[reportUnknownArgumentType]


class _Map(NamedTuple):
    """An object of any names, whose values are of one kind."""

    each: Any


_TEXT, _BOOL = _Kind("text", (str,)), _Kind("true or false", (bool,))
_OPTIONAL = _Kind("text or null", (str, type(None)))
_WHOLE, _NUMBER = _Kind("a whole number", (int,)), _Kind("a number", (int, float))
_POSITIVE = _Kind("a finite number above 0", (int, float), positive=True)
_POSITIVE_OR_NULL = _Kind("a finite number above 0, or null", (int, float, type(None)), positive=True)


def require_fields(report: Mapping[str, Any], cases: Sequence[Case]) -> None:
    """Raises ValueError for the first field of a report that is missing or of another kind."""
    for place, rule, value in _wrong(report, _fields(cases), ""):
        raise ValueError(
            f"--verify: {place} must be {rule}, got {value}. Write the report again with `fourbits "
            "doctor --native --report FILE.json`."
        )


def error_of(part: object) -> str | None:
    """The error that ended a part of a report, or None for a part that was measured."""
    if isinstance(part, dict) and part.keys() == {"error"}:  # pyright: ignore[reportUnknownMemberType]
        return str(part["error"])  # pyright: ignore[reportUnknownArgumentType]
    return None


def _fields(cases: Sequence[Case]) -> dict[str, Any]:
    """The fields that `verify` and the page read; `form` is checked before."""
    gemm = {"lhs": _TEXT, "rhs": _TEXT, "out": _TEXT, "samples": _List(_WHOLE, SAMPLES)}
    return {
        **dict.fromkeys(("written", "fourbits", "system", "product"), _TEXT),
        **dict.fromkeys(("cuda", "driver", "why_emulated"), _OPTIONAL),
        "device": {"name": _TEXT, "torch_version": _TEXT},
        "self_check": _List({"what": _TEXT, "passed": _BOOL, "detail": _TEXT}),
        "sums": {
            "probes": {probe.name: _NUMBER for probe in PROBES},
            "equal": dict.fromkeys(RULES, _WHOLE),
            "outputs": _WHOLE,
            "unlike": _List(_TEXT),
            "width": _Kind("a whole number or null", (int, type(None))),
        },
        "gemms": {case.name: gemm for case in cases},
        "speed": {
            "shape": _List(_WHOLE, 3),
            "copy_bytes_per_second": _POSITIVE,
            "bf16_flops_per_second": _POSITIVE,
            "quantize_seconds": _Map(_POSITIVE),
            "gemm_seconds": {"fp4": _POSITIVE, "bf16": _POSITIVE, "fp8": _POSITIVE_OR_NULL},
            "linear_step_seconds": dict.fromkeys(("nvfp4", "bf16", "fp8"), _POSITIVE),
            "peak_memory_bytes": _POSITIVE_OR_NULL,
        },
    }


def _wrong(value: Any, kind: Any, place: str) -> Iterator[tuple[str, str, str]]:
    """(place, rule, value) of what is missing or not of its kind. A part that failed has an error alone."""
    if isinstance(kind, dict) and place and error_of(value) is not None:
        return
    if isinstance(kind, dict | _Map) and isinstance(value, dict):
        fields = dict.fromkeys(value, kind.each) if isinstance(kind, _Map) else kind
        for name, below in fields.items():
            where = f"{place}.{name}" if place else name
            if name in value:
                yield from _wrong(value[name], below, where)
            else:
                yield where, "there", "a report without it"
    elif isinstance(kind, dict | _Map):
        yield place, "an object", f"{value!r:.60}"
    elif not kind.fits(value):
        yield place, kind.rule, f"{value!r:.60}"
    elif isinstance(kind, _List):
        for number, each in enumerate(value):
            yield from _wrong(each, kind.each, f"{place}.{number}")
