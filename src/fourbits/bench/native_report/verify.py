"""Recomputes on a CPU the entries of a GPU's report that do not need the GPU."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from fourbits.bench.native_report.cases import CASES, Case, operand_hash, operands, output_hash, sampled_bits
from fourbits.bench.native_report.form import error_of, require_fields
from fourbits.bench.native_report.measure import FORM
from fourbits.gemm.native.probes import PROBES
from fourbits.gemm.native.self_check import checks
from fourbits.gemm.native.sums_check import (
    RULES,
    outputs_of_rules,
    random_sums,
    step_width,
    unlike_probes,
)
from fourbits.gemm.sums import matmul

Status = Literal["equal", "different", "unknown"]
_HOST = torch.device("cpu")
_EPILOGUES = ("separate", "product")


class Verified(NamedTuple):
    """One recomputed entry of a report."""

    what: str
    #: unknown: within the error bound, but by no rule that is known here
    status: Status
    detail: str


def verify(report: dict[str, Any]) -> list[Verified]:
    """All entries that can be recomputed. Raises ValueError at once for a report in another format."""
    if type(report.get("form")) is not int or report["form"] != FORM:
        raise ValueError(
            f"--verify: the report must have form {FORM}, got {report.get('form')!r}. Write it and "
            "verify it with the same version of fourbits."
        )
    require_fields(report, CASES)
    return [row for part in (_operands, _rounding, _probes, _random_sums, _gemms) for row in part(report)]


def _operands(report: dict[str, Any]) -> Iterator[Verified]:
    """Check the bytes of quantizers, stochastic rounding included."""
    wrong: list[str] = []
    measured = [case for case in CASES if error_of(report["gemms"][case.name]) is None]
    for case in measured:
        found = report["gemms"][case.name]
        for side, q in zip(("lhs", "rhs"), operands(case, _HOST), strict=True):
            if found[side] != operand_hash(q):
                wrong.append(f"{case.name} {side}")
    equal = 2 * len(measured) - len(wrong)
    detail = f"{equal} of {2 * len(CASES)} operands have the reference's bytes"
    status: Status = "different" if wrong else "equal" if len(measured) == len(CASES) else "unknown"
    yield Verified("quantizers", status, "; ".join((detail, *wrong)))


def _rounding(report: dict[str, Any]) -> Iterator[Verified]:
    """Check the share of stochastic rounding, which follows from the specified bits."""
    (expected,) = checks(_HOST)["stochastic rounding"]()
    found = [f for f in report["self_check"] if f["what"] == expected.what]
    equal = found == [expected._asdict()]
    detail = "; ".join(f["detail"] for f in found) or "not in the report"
    yield Verified(expected.what, "equal" if equal else "different", detail)


def _probes(report: dict[str, Any]) -> Iterator[Verified]:
    """Check the results of the probes, and what the report concludes from them."""
    sums = report["sums"]
    if error := error_of(sums):
        yield Verified("sums", "unknown", f"not measured: {error}")
        return
    results = sums["probes"]
    unlike = unlike_probes(results)
    detail = f"{len(PROBES) - len(unlike)} of {len(PROBES)} as sm_100"
    wrong = _unequal(sums, {"unlike": list(unlike), "width": step_width(results)})
    status: Status = "different" if wrong else "unknown" if unlike else "equal"
    found = [f"{name}: {results[name]!r}" for name in unlike]
    yield Verified("probes of sums", status, "; ".join((detail, *found, *wrong)))


def _random_sums(report: dict[str, Any]) -> Iterator[Verified]:
    """Check the counts: outputs that all have the bits of one rule determine those of the others."""
    sums = report["sums"]
    if error_of(sums):
        return
    rule, count = max(((rule, sums["equal"][rule]) for rule in RULES), key=lambda item: item[1])
    expected = random_sums(rule)
    known = {"outputs": expected.numel()}
    whole = count == expected.numel()
    wrong = _unequal(sums, known | ({"equal": outputs_of_rules(expected)} if whole else {}))
    status: Status = "different" if wrong else "equal" if whole else "unknown"
    detail = f"{count} of {sums['outputs']} have the bits of {rule}"
    yield Verified("random sums", status, "; ".join((detail, *wrong)))


def _unequal(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The fields of a report's sums that contradict its others, as text."""
    return [
        f"{name} is {found[name]!r}, recomputed {value!r}"
        for name, value in expected.items()
        if found[name] != value
    ]


def _gemms(report: dict[str, Any]) -> Iterator[Verified]:
    """Find the rule of sums and the epilogue that give the FP32 outputs of a GEMM."""
    for case in CASES:
        found = report["gemms"][case.name]
        if error := error_of(found):
            yield Verified(case.name, "unknown", f"not measured: {error}")
            continue
        rule, equal, whole = _closest(case, found)
        count = len(found["samples"])
        detail = f"{equal} of {count} sampled outputs have the bits of {rule}"
        if whole and equal == count:
            yield Verified(case.name, "equal", f"all outputs have the bits of {rule}")
        elif whole:
            yield Verified(case.name, "different", f"{detail}, but by their hash all outputs have")
        else:
            yield Verified(case.name, "unknown", detail)


def _closest(case: Case, found: dict[str, Any]) -> tuple[str, int, bool]:
    """The rule with the most equal samples, their number, and whether all outputs are equal."""
    a, b = operands(case, _HOST)
    best = ("none", -1, False)
    for sums in RULES:
        for epilogue in _EPILOGUES:
            out = matmul(a, b, torch.float32, None, sums, epilogue)
            equal = sum(x == y for x, y in zip(sampled_bits(out), found["samples"], strict=True))
            whole = output_hash(out) == found["out"]
            if (whole, equal) > (best[2], best[1]):
                best = (f"{sums}, epilogue {epilogue}", equal, whole)
    return best
