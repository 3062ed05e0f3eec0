"""The scripts of docs/integrations.md run as they are written there, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.documented import DOCS, blocks_of, names_of

PAGE = DOCS / "integrations.md"
#: sections whose libraries this environment has; sections whose libraries `make test-peers` installs
HERE = ("A plain loop", "transformers Trainer", "accelerate")
WITH_PEERS = {"Lightning": "lightning", "PEFT and TRL": "trl"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("section", HERE)
def test_a_script_runs(section, capsys):
    names = names_of(section, PAGE)
    assert "linear layers nvfp4" in capsys.readouterr().out
    assert names["fb"].audit(names["model"]).bypassed == ()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore:.*LeafSpec")
@pytest.mark.parametrize("section", WITH_PEERS)
def test_a_script_for_a_peer_runs(section, capsys):
    pytest.importorskip(WITH_PEERS[section])
    names_of(section, PAGE)
    assert "linear layers nvfp4" in capsys.readouterr().out


def test_the_script_for_fsdp2_runs_on_two_processes(tmp_path):
    Path("script.py").write_text("\n".join(blocks_of("FSDP2", "python", PAGE)))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "script.py",
    ]
    done = subprocess.run(
        launch, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 3.5  # ln(64) = 4.16 at the start


def test_what_the_page_imports_from_this_package_exists():
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"from (fourbits\.integrations\.\w+) import (\w+)", text))
    assert len(named) >= 6
    source = Path(__file__).parents[1] / "src"
    for module, name in named:
        code = source.joinpath(*module.split(".")).with_suffix(".py").read_text()
        assert re.search(rf"^(?:class|def) {name}\b", code, re.MULTILINE), (module, name)
