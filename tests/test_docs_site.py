"""Every page is on the site, in its navigation, and the site's generator is what the Makefile installs."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
#: written by docs/site/pages.py
GENERATED = {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "reference.md", "reference-integrations.md"}


def pages(nav) -> list[str]:
    """The files of a navigation tree, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages(entry)]


def test_every_page_is_in_the_navigation_once():
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(pages(CONFIG["nav"])) == sorted(written | GENERATED)


def test_a_warning_fails_the_build():
    assert CONFIG["strict"] is True
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_readme_links_every_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"](docs/{path.name})" not in readme]
    assert missing == []
