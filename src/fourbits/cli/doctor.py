"""Show what this machine can run, which backend fourbits would choose, why, and what to type next.

--check also measures memory and GEMMs, and tests every kernel that may run here, in about half a minute.
"""

import json
import platform
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from fourbits.bench.self_tests import rates, self_tests
from fourbits.cli import native_report
from fourbits.compare.terminal import print_table
from fourbits.device import (
    Device,
    choose_backend,
    idle_nvidia_gpu,
    peak_flops,
    probe,
    unsupported_fp4,
    unsupported_triton,
)
from fourbits.gemm.matmul import matmul
from fourbits.gemm.native.self_check import check_native
from fourbits.model.ops.ssd import op as ssd_op
from fourbits.version import VERSION

EXAMPLE = "fourbits doctor --json"
EXTRAS = {"transformers": "hf", "tensorboard": "tb"}
_NATIVE = "supported; training uses it if the self-check passes (doctor --native)"
#: head dim and state size of the paper's hybrids
_PAPER_SCAN = (64, 128)
_SCAN = "Triton kernels, in BF16, after a self-check at first use"
UNVERIFIED = "not yet run on Blackwell hardware; a self-check must pass before the first step"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--check",
        action="store_true",
        help="measure rates, and test every kernel that may run here",
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="check the GPU's arithmetic against the reference: its FP4 tensor cores if it has them, else "
        "the emulated GEMMs",
    )
    parser.add_argument(
        "--report",
        metavar="FILE.json",
        type=Path,
        help="with --native: write bytes, sums, statistics and speed to a file, and a page beside it, in "
        "about a minute; nothing is sent anywhere",
    )
    parser.add_argument(
        "--verify", metavar="FILE.json", type=Path, help="recompute such a file here, without its GPU"
    )
    parser.add_argument(
        "--device", metavar="KIND", help="cpu, cuda, rocm, xpu or mps (default: the best one present)"
    )


def run(args: Namespace) -> int:
    """Print the findings. 1 if --native was given and the FP4 tensor cores did not pass, --check found a
    kernel that is wrong, or a report has other bytes than were recomputed.
    """
    _refuse_ignored(args)
    if args.verify is not None:
        return native_report.check(args.verify)
    if args.report is not None:
        if not args.native:
            raise ValueError("--report: is about the check of --native. Add --native.")
        return native_report.write(args.report, probe(args.device))
    findings = examine(args.device)
    if args.native:
        findings["native_check"] = check_gpu(probe(args.device))
    passed = not args.native or findings["native_check"]["passed"]
    if args.check:
        device = probe(args.device)
        findings["rates"] = rates(torch.device(device.torch_device), device)
        start = time.monotonic()
        findings["self_tests"] = [asdict(each) for each in self_tests(device)]
        findings["self_tests_seconds"] = time.monotonic() - start
        passed &= all(each["passed"] is not False for each in findings["self_tests"])
    findings["next"] = next_command(findings)
    if args.json:
        print(json.dumps(findings, indent=2))
        return 0 if passed else 1
    table = Table("item", "finding", title="fourbits doctor", title_justify="left")
    for item, finding in rows(findings):
        table.add_row(item, Text(finding))
    print_table(table)
    if args.native:
        print("\n".join(verdict(findings["native_check"])))
    return 0 if passed else 1


def _refuse_ignored(args: Namespace) -> None:
    """Raises ValueError for options that do not apply to a report that is written or verified."""
    for option, others in (
        ("verify", ("report", "native", "check", "json", "device")),
        ("report", ("check", "json")),
    ):
        given = next((name for name in others if getattr(args, name)), None)
        if getattr(args, option) is not None and given is not None:
            raise ValueError(f"--{option}: takes no --{given}, got both. Leave one out.")


def examine(kind: str | None) -> dict[str, Any]:
    """All findings, as plain data. Raises ValueError for a device that is not present."""
    device = probe(kind)
    backend, reason = choose_backend("auto", device)
    return {
        "fourbits": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_threads": torch.get_num_threads(),
        "device": asdict(device),
        "idle_gpu": idle_nvidia_gpu(),
        "backend": backend.value,
        "backend_reason": reason,
        "triton_blocker": unsupported_triton(device),
        "native_blocker": unsupported_fp4(device),
        "scan_blocker": ssd_op.unsupported(torch.device(device.torch_device), torch.bfloat16, *_PAPER_SCAN),
        "native_note": UNVERIFIED,
        "compile_error": compile_error(device.torch_device),
        "peak_bf16_flops": peak_flops(device, torch.bfloat16),
        "extras": {package: _installed(package) for package in EXTRAS},
    }


def check_gpu(device: Device) -> dict[str, Any]:
    """Run the self-check on a device: of its FP4 tensor cores, or without them of the emulation."""
    blocker, kernels = unsupported_fp4(device), unsupported_triton(device)
    if kernels is not None:
        return {"passed": False, "product": None, "reason": kernels, "findings": []}
    target = torch.device(device.torch_device)
    found = check_native(target, matmul) if blocker else check_native(target)
    return {
        "passed": blocker is None and all(finding.passed for finding in found),
        "product": "emulated" if blocker else "native",
        "reason": blocker,
        "findings": [finding._asdict() for finding in found],
    }


def verdict(check: dict[str, Any]) -> list[str]:
    """The result of a self-check as lines of text."""
    lines = [f"{'ok' if f['passed'] else 'WRONG'}  {f['what']}: {f['detail']}" for f in check["findings"]]
    right = all(finding["passed"] for finding in check["findings"])
    if check["product"] == "native":
        outcome = (
            "passed; training can use them" if right else "failed; training must not use them on this GPU"
        )
        return [*lines, f"FP4 tensor cores: {outcome}."]
    if check["product"] == "emulated":
        outcome = "match the reference" if right else "do not match the reference; do not train with them"
        lines.append(f"Fused kernels and emulated GEMMs: {outcome}.")
    return [*lines, f"FP4 tensor cores: not checked: {check['reason']}."]


def compile_error(torch_device: str) -> str | None:
    """Why torch.compile fails here, found by compiling a small function; None if it works."""
    try:
        result = torch.compile(_probe_function)(torch.ones(64, device=torch_device, dtype=torch.float32))
    except Exception as error:  # noqa: BLE001 - any failure to compile is a finding
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return None if bool((result == 3).all()) else "a compiled function returned a wrong result"


def rows(findings: dict[str, Any]) -> list[tuple[str, str]]:
    """The findings as rows of a table."""
    device, broken = findings["device"], findings["compile_error"]
    memory, peak = device["memory_bytes"], findings["peak_bf16_flops"]
    no_scan, threads = findings["scan_blocker"], findings["cpu_threads"]
    cpu = f"{threads} CPU thread{'s' * (threads != 1)}"
    found = [
        ("fourbits", findings["fourbits"]),
        ("Python", f"{findings['python']}, {findings['system']}, {cpu}"),
        ("torch", device["torch_version"]),
        ("device", f"{device['kind']}: {device['name']}"),
        *((("unused GPU", findings["idle_gpu"]),) if findings["idle_gpu"] else ()),
        ("memory", f"{memory / 2**30:.1f} GiB" if memory else "unknown"),
        (
            "BF16 peak",
            f"{peak / 1e12:.0f} TFLOP/s (datasheet)" if peak else "unknown, so MFU is not reported",
        ),
        ("backend", f"{findings['backend']}: {findings['backend_reason']}"),
        (
            "torch.compile",
            f"fails, so everything runs eagerly and slowly: {broken}" if broken else "works",
        ),
        ("Triton kernels", f"no: {findings['triton_blocker']}" if findings["triton_blocker"] else "yes"),
        ("Mamba-2 scan", f"plain torch, in FP32: {no_scan}" if no_scan else _SCAN),
        ("native FP4", f"no: {findings['native_blocker']}" if findings["native_blocker"] else _NATIVE),
        ("", UNVERIFIED),
    ]
    for package, extra in EXTRAS.items():
        missing = f"not installed (pip install 'fourbits[{extra}]')"
        found.append((package, findings["extras"][package] or missing))
    return [*found, *_check_rows(findings), ("next", findings["next"])]


def next_command(findings: dict[str, Any]) -> str:
    """The next command to type on this machine, and its purpose."""
    wrong = [each["what"] for each in findings.get("self_tests", []) if each["passed"] is False]
    if wrong:
        return f"do not train here: {', '.join(wrong)} failed; try another version of torch"
    if findings["idle_gpu"]:
        return "make install (in the clone: it replaces a torch that does not use the GPU)"
    if findings["device"]["kind"] in ("cpu", "mps", "xpu"):
        return "fourbits demo (a tiny model in BF16 and NVFP4, a few minutes)"
    if "self_tests" not in findings:
        return "fourbits doctor --check (rates, and a test of every kernel, half a minute)"
    if findings["native_blocker"] is None and "native_check" not in findings:
        return "fourbits doctor --native --report report.json (the FP4 tensor cores, a minute)"
    return "fourbits train 30m --train.steps 60 --out runs/30m (a first run, a minute or two)"


def _check_rows(findings: dict[str, Any]) -> list[tuple[str, str]]:
    """Measurements and tests of --check."""
    found = list(findings.get("rates", {}).items())
    words = {True: "ok", False: "WRONG", None: "not run"}
    for each in findings.get("self_tests", []):
        spent = f" ({each['seconds']:.1f} s)" if each["passed"] is not None else ""
        found.append((f"test: {each['what']}", f"{words[each['passed']]}: {each['detail']}{spent}"))
    if "self_tests_seconds" in findings:
        found.append(("tests, in all", f"{findings['self_tests_seconds']:.1f} s"))
    return found


def _probe_function(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
