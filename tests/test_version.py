"""The version is one constant, known without installed metadata, and the same everywhere."""

import subprocess
import sys
from pathlib import Path

import yaml

import fourbits
from fourbits.version import VERSION

ROOT = Path(__file__).parents[1]


def test_a_source_tree_without_metadata_knows_its_version(tmp_path):
    (tmp_path / "fourbits").symlink_to(ROOT / "src" / "fourbits")
    command = [
        sys.executable,
        "-S",
        "-c",
        "import fourbits; print(fourbits.__version__)",
    ]  # -S: no site-packages
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert (done.stdout, done.stderr) == (f"{VERSION}\n", "")


def test_the_package_and_the_citation_have_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert fourbits.__version__ == citation["version"] == VERSION
