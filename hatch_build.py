"""Metadata of the packages that depends on where the repository is published: urls, and the README's links.

Set `repository` in pyproject.toml, [tool.hatch.metadata.hooks.custom], for both. Links between files
do not work on a package index, so they become links to the files of this version's tag in that repository.
Without one, they become plain text, and the packages name no urls.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


class PublishedMetadata(MetadataHookInterface):
    """Sets project.readme and project.urls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata of a wheel or an sdist."""
        repository = self.config.get("repository", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": published(text, repository, metadata["version"]),
        }
        if repository:
            metadata["urls"] = urls(repository)


def published(text: str, repository: str, version: str) -> str:
    """The README for an index: links to files lead to the tag of this version, or are plain text."""

    def replacement(link: re.Match[str]) -> str:
        picture, title, path = link.groups()
        if repository:
            return f"{picture}[{title}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"
        if picture:
            return ""
        return title if title == path else f"{title} ({path})"

    return LINK.sub(replacement, text)


def urls(repository: str) -> dict[str, str]:
    """The project's links, in the layout that GitHub and GitLab share."""
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
