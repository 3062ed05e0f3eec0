"""`doctor --report` and `--verify`: a GPU's FP4 arithmetic as a file, and its recomputation on a CPU."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fourbits.bench.native_report.form import error_of
from fourbits.bench.native_report.measure import report
from fourbits.bench.native_report.verify import Verified, verify
from fourbits.cli.output_file import require_output
from fourbits.compare.report.page import render_page
from fourbits.compare.terminal import print_table
from fourbits.device import Device

_WRITE = "Write one with `fourbits doctor --native --report FILE.json`."


def write(path: Path, device: Device) -> int:
    """Measure a device, write FILE and a page beside it, and print a summary. 1 if the check failed."""
    if path.suffix != ".json":
        raise ValueError(f"--report: the file must end in .json, got {str(path)!r}. Rename it.")
    require_output("--report", path, "report.json")
    found = report(device)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    page = _write_page(path, found, None)
    print(f"wrote {path} and {page}; nothing was sent anywhere. docs/blackwell.md explains the fields.")
    print(f"To recompute it without this GPU: fourbits doctor --verify {path}")
    failed = failures(found)
    for what, error in failed.items():
        print(f"{what} was not measured: {error}")
    return 0 if not failed and all(finding["passed"] for finding in found["self_check"]) else 1


def failures(found: dict[str, Any]) -> dict[str, str]:
    """The parts of a report that ended in an error, and the error."""
    parts = {"sums": found["sums"], **found["gemms"], "speed": found["speed"]}
    return {what: error for what, part in parts.items() if (error := error_of(part)) is not None}


def check(path: Path) -> int:
    """Recompute a report, print each entry, and write the page again with them. 1 if any byte differs."""
    found = read(path)
    rows = verify(found)
    print_table(table_of(rows, found))
    page = _write_page(path, found, rows)
    print(f"wrote {page}. Speed and memory cannot be recomputed without the GPU.")
    return 1 if any(row.status == "different" for row in rows) else 0


def _write_page(path: Path, found: dict[str, Any], rows: list[Verified] | None) -> Path:
    page = path.with_suffix(".html")
    name = found["device"]["name"]
    text = render_page(
        "native.html", title=name, palette="", report=found, failed=failures(found), verified=rows
    )
    page.write_text(text, encoding="utf-8")
    return page


def read(path: Path) -> dict[str, Any]:
    """The content of a report. Raises ValueError for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"--verify: {str(path)!r} must be a report, but is not ({error}). {_WRITE}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(
            f"--verify: {str(path)!r} must hold an object, got a {type(found).__name__}. {_WRITE}"
        )
    return found


def table_of(rows: list[Verified], found: dict[str, Any]) -> Table:
    """The recomputed entries."""
    title = f"{found['device']['name']}, {found['product']} GEMMs"
    table = Table("entry", "status", "detail", title=title, title_justify="left")
    for row in rows:
        table.add_row(row.what, row.status, Text(row.detail))
    return table
