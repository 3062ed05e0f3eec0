"""A report of FP4 arithmetic: what a device computed, and what another machine recomputes of it."""

import copy
import json

import pytest
import torch

from fourbits.bench.native_report import cases, measure
from fourbits.bench.native_report.verify import verify
from fourbits.cli import native_report
from fourbits.cli.main import main
from fourbits.device import probe
from fourbits.gemm.native import self_check, sums_check
from fourbits.gemm.sums import matmul

CPU = torch.device("cpu")


def by(sums: str, epilogue: str = "separate"):
    """A device whose GEMMs follow a rule."""
    return lambda a, b, dtype, bias: matmul(a, b, dtype, bias, sums, epilogue)


@pytest.fixture(scope="module", autouse=True)
def small():
    """One small shape, so that nothing is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "_SHAPE", (64, 48, 64))
        patch.setattr(sums_check, "_SHAPE", (32, 32, 384))
        shape = (64, 256, 48)
        patch.setattr(
            cases, "CASES", found := tuple(cases.Case(g, shape) for g in ("fprop", "dgrad", "wgrad"))
        )
        patch.setattr(measure, "CASES", found)
        patch.setattr("fourbits.bench.native_report.verify.CASES", found)
        patch.setattr(measure, "_TIMED", {"cpu": (16, 32, 32)})
        patch.setattr(measure, "copy_bandwidth", lambda device: 1.0)
        patch.setattr(measure, "product_rate", lambda device: 1.0)
        yield


@pytest.fixture(scope="module")
def report(small):
    """The report of a device with the sums of sm_100 and one multiplication by both scales."""
    return measure.report(probe("cpu"), by("sm_100", "product"))


def statuses(report):
    return {row.what: row.status for row in verify(report)}


def test_the_rule_and_the_epilogue_of_a_device_are_found(report):
    rows = {row.what: row for row in verify(report)}
    assert set(statuses(report).values()) == {"equal"}
    assert rows["fprop 64x256x48"].detail == "all outputs have the bits of sm_100, epilogue product"
    assert rows["random sums"].detail == "1024 of 1024 have the bits of sm_100"
    assert rows["quantizers"].detail == "6 of 6 operands have the reference's bytes"


def test_a_report_survives_json(report):
    assert statuses(json.loads(json.dumps(report))) == statuses(report)


def test_a_changed_byte_of_an_operand_is_different(report):
    changed = copy.deepcopy(report)
    changed["gemms"]["wgrad 64x256x48"]["lhs"] = "0" * 64
    (row,) = [row for row in verify(changed) if row.status == "different"]
    assert row.detail == "5 of 6 operands have the reference's bytes; wgrad 64x256x48 lhs"


def test_sums_by_no_known_rule_are_unknown_not_wrong(report):
    other = measure.report(probe("cpu"), by("sm_90"))
    found = statuses(other)
    assert found["quantizers"] == "equal"
    assert found["probes of sums"] == found["random sums"] == "unknown"
    assert {found[case.name] for case in cases.CASES if case.gemm != "dgrad"} == {"unknown"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": 99}, "the report must have form 2, got 99"),
        ({"form": True}, "the report must have form 2, got True"),
        ({"gemms": {}}, "gemms.fprop 64x256x48 must be there, got a report without it"),
        ({"sums": None}, "sums must be an object, got None"),
        ({"sums": {"probes": []}}, r"sums.probes must be an object, got \[\]"),
        ({"device": "B200"}, "device must be an object, got 'B200'"),
        ({"self_check": {}}, "self_check must be a list, got {}"),
        ({"self_check": [1]}, "self_check.0 must be an object, got 1"),
        (
            {"self_check": [{"what": "sums", "passed": 1, "detail": ""}]},
            "0.passed must be true or false, got 1",
        ),
        ({"product": None}, "product must be text, got None"),
        ({"why_emulated": 3}, "why_emulated must be text or null, got 3"),
        ({"speed": {"shape": [1, 2]}}, r"speed.shape must be a list of 3, got \[1, 2\]"),
        ({"speed": {"shape": [1, 2, "3"]}}, "speed.shape.2 must be a whole number, got '3'"),
    ],
)
def test_what_is_no_whole_report_is_named_before_anything_is_computed(report, change, message, monkeypatch):
    monkeypatch.setattr(f"{verify.__module__}.operands", lambda *_: pytest.fail("computed first"))
    with pytest.raises(ValueError, match=f"--verify: .*{message}.* Write "):
        verify({**report, **change})


@pytest.mark.parametrize(
    ("place", "value", "rule"),
    [
        ("gemms.fprop 64x256x48.samples", [1], "a list of 256"),
        ("gemms.fprop 64x256x48.samples", {}, "a list of 256"),
        ("gemms.fprop 64x256x48.samples.0", "x", "a whole number"),
        ("gemms.wgrad 64x256x48.out", 3, "text"),
        ("sums.outputs", 1.5, "a whole number"),
        ("sums.outputs", True, "a whole number"),
        ("sums.equal.sm_100", "all", "a whole number"),
        ("speed.gemm_seconds.fp4", 0, "a finite number above 0"),
        ("speed.copy_bytes_per_second", float("nan"), "a finite number above 0"),
        ("speed.quantize_seconds.row", None, "a finite number above 0"),
    ],
)
def test_a_field_of_a_wrong_type_is_named_by_its_place(report, place, value, rule):
    with pytest.raises(ValueError, match=f"^--verify: {place} must be {rule}, got .*Write the report again"):
        verify(changed_at(report, place, value))


def changed_at(report, place, value):
    """The report with another value at one place."""
    changed = at = copy.deepcopy(report)
    *outer, last = (int(part) if part.isdecimal() else part for part in place.split("."))
    for part in outer:
        at = at[part]
    assert at[last] != value
    at[last] = value
    return changed


@pytest.mark.parametrize(
    ("place", "value", "entry", "status"),
    [
        ("sums.width", 96, "probes of sums", "different"),
        ("sums.unlike", ["64 products are one sum"], "probes of sums", "different"),
        ("sums.probes.products 100 and 140", 16777218.0, "probes of sums", "different"),
        ("sums.outputs", 1025, "random sums", "different"),
        ("sums.equal.sm_103", 1023, "random sums", "different"),
        ("sums.equal.sm_100", 1023, "random sums", "unknown"),
        ("gemms.dgrad 64x256x48.samples.7", 1, "dgrad 64x256x48", "different"),
        ("gemms.dgrad 64x256x48.out", "0" * 64, "dgrad 64x256x48", "unknown"),
        ("self_check.6.passed", False, "stochastic rounding", "different"),
        ("self_check.6.detail", "up in 0.30000 of 1 cases", "stochastic rounding", "different"),
    ],
)
def test_a_changed_number_is_found(report, place, value, entry, status):
    """Numbers that a CPU can compute, and numbers that follow from others of the report."""
    found = statuses(changed_at(report, place, value))
    assert {what: other for what, other in found.items() if other != "equal"} == {entry: status}


def failing(part):
    """A device whose GEMM raises in one part, as a chip may that nobody has seen yet."""
    good = by("sm_100", "product")

    def multiply(a, b, dtype, bias):
        if part(a, b, dtype):
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nat line 1")
        return good(a, b, dtype, bias)

    return multiply


FAILURES = {
    "sums": lambda a, b, dtype: a.shape[0] == 32 and dtype == torch.float32,
    "wgrad 64x256x48": lambda a, b, dtype: (tuple(a.shape), tuple(b.shape)) == ((64, 48), (64, 256)),
    "speed": lambda a, b, dtype: dtype == torch.bfloat16 and a.shape == (16, 32),
}


@pytest.mark.parametrize("part", FAILURES)
def test_a_part_that_fails_is_named_and_the_others_are_reported(part, tmp_path, monkeypatch, capsys):
    found = measure.report(probe("cpu"), failing(FAILURES[part]))
    error = {"error": "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"}
    assert [found["sums"], found["gemms"]["wgrad 64x256x48"], found["speed"]].count(error) == 1
    assert {**found, **found["gemms"]}[part] == error
    monkeypatch.setattr("fourbits.cli.native_report.report", lambda device: found)
    assert main(["doctor", "--native", "--report", str(tmp_path / "b200.json")]) == 1
    assert f"{part} was not measured: RuntimeError: CUBLAS" in capsys.readouterr().out
    page = (tmp_path / "b200.html").read_text()
    assert "Not measured" in page
    rows = {row.what: row for row in verify(json.loads((tmp_path / "b200.json").read_text()))}
    if part != "speed":
        assert (rows[part].status, "CUBLAS" in rows[part].detail) == ("unknown", True)
    others = {"dgrad 64x256x48", "fprop 64x256x48", "stochastic rounding"}
    assert {rows[what].status for what in others} == {"equal"}


def test_the_page_has_the_driver_memory_probes_and_speed_beside_fp8(tmp_path, report):
    shown = {**report, "driver": "13000"}
    shown["speed"] = {**report["speed"], "peak_memory_bytes": 3 << 30}
    shown["speed"]["gemm_seconds"] = {"fp4": 1e-3, "bf16": 4e-3, "fp8": 2e-3}
    shown["speed"]["linear_step_seconds"] = {"nvfp4": 1e-3, "bf16": 3e-3, "fp8": 1.5e-3, "nvfp4_host": 1e-4}
    page = native_report._write_page(tmp_path / "x.json", shown, None).read_text()
    for text in ("driver 13000", "3.00 GiB allocated", "4.00</td>", "2.00</td>", "3.00</td>", "1.50</td>"):
        assert text in page
    assert all(name in page for name in report["sums"]["probes"])


def test_the_command_writes_a_file_and_a_page_and_recomputes_them(tmp_path, monkeypatch, capsys, report):
    monkeypatch.setattr("fourbits.cli.native_report.report", lambda device: report)
    file = tmp_path / "b200.json"
    assert main(["doctor", "--native", "--report", str(file)]) == 0
    assert "nothing was sent anywhere" in capsys.readouterr().out
    assert "Recomputed on a CPU" not in (tmp_path / "b200.html").read_text()
    assert main(["doctor", "--verify", str(file)]) == 0
    assert "epilogue product" in capsys.readouterr().out
    assert "Recomputed on a CPU" in (tmp_path / "b200.html").read_text()
    changed = json.loads(file.read_text())
    changed["gemms"]["fprop 64x256x48"]["rhs"] = "0" * 64
    file.write_text(json.dumps(changed))
    assert main(["doctor", "--verify", str(file)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "x.json"], "Add --native"),
        (["--native", "--report", "x.txt"], "must end in .json"),
        (["--native", "--report", "missing/x.json"], "the folder missing does not exist"),
        (["--native", "--report", "x.json", "--json"], "--report: takes no --json, got both"),
        (["--verify", "x.json", "--device", "cpu"], "--verify: takes no --device, got both"),
        (["--verify", "missing.json"], "must be a report, but is not"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
