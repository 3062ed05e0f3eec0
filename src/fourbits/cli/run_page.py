"""Rewrites the page of a run, for commands that add results to the run."""

from pathlib import Path

from fourbits.cli.program import again, change_folder, command_line
from fourbits.compare.report.run_report import write_run_report
from fourbits.train.run_folder import read_json


def refresh_report(out: Path) -> None:
    """Rewrite the report of a run, if it has one."""
    if (out / "report.html").is_file():
        write_run_report(out, repetition(out))


def repetition(out: Path) -> tuple[str, ...]:
    """Commands that repeat a run in a new folder, with its number of threads, which affects bits."""
    manifest = read_json(out / "manifest.json")
    words = ["train", str(out / "config.yaml"), "--out", str(again(out))]
    if ancestry := manifest.get("ancestry"):
        entry = ancestry[-1]
        words += ["--from", entry.get("model") or f"{entry['run']}/checkpoints/step_{entry['step']}"]
    return change_folder(), command_line([*words, "--train.threads", str(manifest["threads"])])
