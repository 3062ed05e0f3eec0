"""`make install` on a machine with an NVIDIA GPU ends with a PyTorch with CUDA, whatever was run before."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CPU, CUDA = "cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'"


def installed(folder: Path, version: str | None) -> Path:
    """A folder whose environment was installed, with the line on CUDA of its torch; None: without torch."""
    environment = folder / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/python").touch()
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    if version is not None:
        torch = environment / "lib/python3.12/site-packages/torch"
        torch.mkdir(parents=True)
        (torch / "version.py").write_text(f"__version__ = '2.13.0'\n{version}\nhip: Optional[str] = None\n")
    for stamp in (".installed-gpu", ".installed"):
        (environment / stamp).touch()
    return folder


def steps_of_install(folder: Path, gpu: str) -> str:
    """What `make install` would run. gpu: yes, or empty for a machine without one."""
    command = ["make", "-n", "-f", str(ROOT / "Makefile"), f"GPU={gpu}", "install"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("version", [CPU, None])
def test_beside_a_gpu_a_torch_without_cuda_is_replaced(tmp_path: Path, version: str | None):
    steps = steps_of_install(installed(tmp_path, version), "yes")
    assert "pip uninstall --quiet --yes torch triton" in steps
    assert "constraints-gpu.txt -e '.[dev]'" in steps


def test_beside_a_gpu_a_torch_with_cuda_is_kept(tmp_path: Path):
    assert "pip" not in steps_of_install(installed(tmp_path, CUDA), "yes")


@pytest.mark.parametrize("version", [CPU, CUDA])
def test_without_a_gpu_an_installed_torch_is_kept(tmp_path: Path, version: str):
    assert "pip" not in steps_of_install(installed(tmp_path, version), "")
