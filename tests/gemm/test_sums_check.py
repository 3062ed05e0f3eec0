"""Whose sums a GEMM's are: probes tell rules from each other, and so do the bits of random sums."""

import pytest
import torch

from fourbits.gemm.native import sums_check
from fourbits.gemm.native.probes import PROBES, WIDTH_PROBE
from fourbits.gemm.native.sums_check import SumsReport, examine_sums
from fourbits.gemm.sums import matmul

CPU = torch.device("cpu")


def report_of(rule: str) -> SumsReport:
    return examine_sums(CPU, lambda a, b, dtype, bias: matmul(a, b, dtype, bias, rule))


@pytest.mark.parametrize(("rule", "width"), [("sm_100", 64), ("sm_103", 96)])
def test_a_chip_by_these_rules_is_recognized(rule, width):
    report = report_of(rule)
    assert report.width == width
    assert report.equal[rule] == report.outputs
    assert max(count for other, count in report.equal.items() if other != rule) < report.outputs
    assert (report.unlike == ()) == (rule == "sm_100")
    assert f"steps of {width}" in str(report)
    assert f"{report.outputs} of {report.outputs} random sums with the bits of {rule}" in str(report)


@pytest.mark.parametrize(
    ("rule", "failing"),
    [
        ("exact", {"toward zero, not to nearest", "toward zero, not down", "those of different sums do not"}),
        ("sm_90", {"64 products are one sum", "products of one sum cancel exactly", "and truncates"}),
    ],
)
def test_other_rules_fail_probes(rule, failing, monkeypatch):
    """Sums to nearest, and Hopper's BF16 chain of 16 products."""
    monkeypatch.setattr(sums_check, "_SHAPE", (1, 1, 64))
    assert failing <= set(report_of(rule).unlike)


def test_every_probe_but_those_of_signs_excludes_a_rule(monkeypatch):
    """No probe is idle: each has another result under at least one other rule."""
    monkeypatch.setattr(sums_check, "_SHAPE", (1, 1, 64))
    failed = {name for rule in ("exact", "sm_90", "sm_103") for name in report_of(rule).unlike}
    assert failed >= {probe.name for probe in PROBES} - {
        "a block of zero products has none",
        "35 bits are kept",
    }
    assert WIDTH_PROBE in failed
