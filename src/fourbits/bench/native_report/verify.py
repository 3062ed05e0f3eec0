"""Recomputes on a CPU the entries of a GPU's report that do not need the GPU."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from fourbits.bench.native_report.cases import CASES, Case, operand_hash, operands, output_hash, sampled_bits
from fourbits.bench.native_report.form import require_fields
from fourbits.bench.native_report.measure import FORM
from fourbits.gemm.native.probes import PROBES
from fourbits.gemm.native.sums_check import RULES
from fourbits.gemm.sums import matmul

Status = Literal["equal", "different", "unknown"]
_HOST = torch.device("cpu")
_EPILOGUES = ("separate", "product")


class Verified(NamedTuple):
    """One recomputed entry of a report."""

    what: str
    #: True: equal to the recomputed value; False: different; None: follows a rule that is not known here
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
    return [*_operands(report), *_probes(report), *_random_sums(report), *_gemms(report)]


def _operands(report: dict[str, Any]) -> Iterator[Verified]:
    """Check the bytes of quantizers, stochastic rounding included."""
    wrong: list[str] = []
    for case in CASES:
        found = report["gemms"][case.name]
        for side, q in zip(("lhs", "rhs"), operands(case, _HOST), strict=True):
            if found[side] != operand_hash(q):
                wrong.append(f"{case.name} {side}")
    count = 2 * len(CASES)
    detail = f"{count - len(wrong)} of {count} operands have the reference's bytes"
    yield Verified("quantizers", "different" if wrong else "equal", "; ".join((detail, *wrong)))


def _probes(report: dict[str, Any]) -> Iterator[Verified]:
    results = report["sums"]["probes"]
    unlike = [f"{p.name}: {results[p.name]!r}" for p in PROBES if results[p.name] != p.expected]
    detail = f"{len(PROBES) - len(unlike)} of {len(PROBES)} as sm_100"
    yield Verified("probes of sums", "unknown" if unlike else "equal", "; ".join((detail, *unlike)))


def _random_sums(report: dict[str, Any]) -> Iterator[Verified]:
    sums = report["sums"]
    rule, count = max(((rule, sums["equal"][rule]) for rule in RULES), key=lambda item: item[1])
    status: Status = "equal" if count == sums["outputs"] else "unknown"
    yield Verified("random sums", status, f"{count} of {sums['outputs']} have the bits of {rule}")


def _gemms(report: dict[str, Any]) -> Iterator[Verified]:
    """Find the rule of sums and the epilogue that give the FP32 outputs of a GEMM."""
    for case in CASES:
        found = report["gemms"][case.name]
        rule, equal, whole = _closest(case, found)
        status: Status = "equal" if whole else "unknown"
        detail = f"{equal} of {len(found['samples'])} sampled outputs have the bits of {rule}"
        yield Verified(case.name, status, f"all outputs have the bits of {rule}" if whole else detail)


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
