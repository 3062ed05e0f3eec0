"""The wheel and the sdist are complete, build without network, and show a README without dead links."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from fourbits.version import VERSION

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(ROOT / "src").as_posix()
    for path in (ROOT / "src").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
REPOSITORY = "https://example.org/fourbits"


def built(source: Path, out: Path, *targets: str) -> Path:
    """Build packages with the backend itself, which needs no network."""
    chosen = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *chosen]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("packages"), "wheel", "sdist")


@pytest.fixture(scope="module")
def wheel(packages):
    return packages / f"fourbits-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def unpacked(packages):
    """The sdist, unpacked as a user would."""
    with tarfile.open(packages / f"fourbits-{VERSION}.tar.gz") as file:
        file.extractall(packages, filter="data")
    return packages / f"fourbits-{VERSION}"


def contents(wheel: Path) -> set[str]:
    """The files of the package in a wheel."""
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        return message_from_bytes(file.read(f"fourbits-{VERSION}.dist-info/METADATA"))


def hook():
    """The module hatch_build.py."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    assert contents(wheel) == SOURCES
    assert {Path(name).suffix for name in SOURCES} >= {".py", ".typed", ".html", ".css", ".cpp", ".hpp"}


def test_the_sdist_has_what_its_pages_tests_and_makefile_name(unpacked):
    for folder in ("src", "tests", "docs", "examples"):
        here = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.[pm][yd]")}
        there = {path.relative_to(unpacked) for path in (unpacked / folder).rglob("*.[pm][yd]")}
        assert here == there
    pages = {path.name for path in ROOT.glob("*.md")}
    others = {"LICENSE", "CITATION.cff", "Makefile", "constraints.txt", "pyproject.toml", "hatch_build.py"}
    assert {path.name for path in unpacked.iterdir()} >= pages | others


def test_the_wheel_of_the_unpacked_sdist_is_the_same(unpacked, wheel, tmp_path):
    again = built(unpacked, tmp_path, "wheel") / wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_metadata_says_who_and_names_no_address_until_there_is_one(wheel):
    found = metadata(wheel)
    assert (found["Name"], found["Version"], found["Author"]) == ("fourbits", VERSION, "fourbits authors")
    assert found["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert found.get_all("Project-URL") is None
    text = found.get_payload()
    assert hook().LINK.findall(text) == []
    assert "gradient accumulation (examples/01_plain_loop.py)" in text


def test_with_a_repository_every_link_of_the_readme_leads_to_a_file_of_this_version():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = hook().LINK.findall(text)
    published = hook().published(text, REPOSITORY, VERSION)
    assert hook().LINK.findall(published) == []
    assert len(links) > 15
    for picture, title, target in links:
        file, _, anchor = target.partition("#")
        assert (ROOT / file).exists()
        headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(encoding="utf-8"), re.M) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
        kind = "raw" if picture else "blob"
        assert f"{picture}[{title}]({REPOSITORY}/{kind}/v{VERSION}/{target})" in published
    assert all(address.startswith(REPOSITORY) for address in hook().urls(REPOSITORY).values())


def test_an_installed_wheel_runs_in_an_empty_folder(wheel, tmp_path):
    """In a new environment with this one's packages but fourbits from the wheel."""
    env, folder = tmp_path / "env", tmp_path / "empty"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    python = env / "bin" / "python"
    install = ["pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    site = next(env.glob("lib/python*/site-packages"))
    (site / "packages.pth").write_text(str(Path(pytest.__file__).parents[1]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    outputs = {}
    for arguments in (["--version"], ["--help"], ["recipes", "list"]):
        command = [str(env / "bin" / "fourbits"), *arguments]
        done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs[arguments[0]] = done.stdout
    assert outputs["--version"] == f"fourbits {VERSION}\n"
    assert "nvfp4" in outputs["recipes"]
    code = "import fourbits; print(fourbits.__file__)"
    where = subprocess.run([str(python), "-c", code], cwd=folder, env=clean, capture_output=True, text=True)
    assert where.stdout.startswith(str(site))
    assert list(folder.iterdir()) == []
