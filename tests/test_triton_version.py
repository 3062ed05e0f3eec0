"""Machines whose Triton is missing or too old: all else can be imported, and the reason is reported."""

import subprocess
import sys

import pytest

from fourbits.triton_version import installed_triton, unsupported_version

MACHINE = """
import importlib.metadata, importlib.util, sys

VERSION, HIDDEN = {version!r}, {hidden!r}
versions, specs = importlib.metadata.version, importlib.util.find_spec


class Hider:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == HIDDEN or name.startswith(HIDDEN + "."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


def version(package):
    if "triton" not in package:
        return versions(package)
    if VERSION is None:
        raise importlib.metadata.PackageNotFoundError(package)
    return VERSION


sys.meta_path.insert(0, Hider)
importlib.metadata.version = version
importlib.util.find_spec = lambda name, package=None: None if name == HIDDEN else specs(name, package)
from dataclasses import replace
import torch
import fourbits
import fourbits.model.ops.self_check
from fourbits.device import choose_backend, probe

model = torch.nn.Linear(16, 16)
recipe = fourbits.get_recipe("nvfp4")
fourbits.convert(model, replace(recipe, keep_bf16=replace(recipe.keep_bf16, names=())))
fourbits.set_step(model, 0)
model(torch.ones(16, 16)).sum().backward()
assert model.weight.grad.isfinite().all()
gpu = replace(probe("cpu"), kind="cuda", name="NVIDIA B200", capability=(10, 0))
print(choose_backend("auto", gpu)[1])
"""


@pytest.mark.parametrize(
    ("version", "hidden", "words"),
    [
        (None, "triton", "Triton is not installed (pip install 'triton>=3.6')"),
        # missing in Triton 3.1
        ("3.1.0", "triton.tools.tensor_descriptor", "Triton 3.1.0 is older than 3.6 (pip install"),
    ],
)
def test_everything_but_the_kernels_works_without_a_usable_triton(version, hidden, words):
    program = MACHINE.format(version=version, hidden=hidden)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert words in found.stdout


def test_the_triton_of_this_machine_is_new_enough():
    assert unsupported_version(installed_triton()) is None
