"""Pages of the site that are not in docs/: the README, the changelog, contributing, and the Python reference.

A hook of mkdocs. Links out of docs/ lead to the repo_url of mkdocs.yml; without one they are plain text.
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FROM_ROOT = {"index.md": "README.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, source in FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "reference.md", content=public_names()))
    files.append(File.generated(config, "reference-integrations.md", content=integrations()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to where their files are on the site."""
    folder = ROOT if page.file.src_uri in FROM_ROOT else ROOT / "docs"

    def target(link: re.Match[str]) -> str:
        picture, title, path, anchor = link[1], link[2], link[3], link[4] or ""
        file = (folder / path).resolve().relative_to(ROOT).as_posix()
        names = {source: name for name, source in FROM_ROOT.items()}
        on_site = names.get(file, file.removeprefix("docs/"))
        if files.get_file_from_path(on_site) is not None:
            return f"{picture}[{title}]({on_site}{anchor})"
        if config["repo_url"]:
            return f"{picture}[{title}]({config['repo_url'].rstrip('/')}/blob/main/{file}{anchor})"
        return title if title.strip("`") == file else f"{title} (`{file}`)"

    return LINK.sub(target, markdown)


def public_names() -> str:
    """The reference of the names that `import fourbits` offers, in the order of fourbits.__init__."""
    tree = ast.parse((ROOT / "src/fourbits/__init__.py").read_text(encoding="utf-8"))
    homes = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME"
    )
    head = "# Python\n\nEvery name here is an attribute of `fourbits`, as in `import fourbits as fb`."
    return "\n\n".join([head, *(f"::: {home}.{name}" for name, home in homes.items())])


def integrations() -> str:
    """The reference of fourbits.integrations: what each module defines."""
    parts = ["# Integrations\n\nComplete scripts: [Training loops](integrations.md)."]
    for path in sorted((ROOT / "src/fourbits/integrations").glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = f"fourbits.integrations.{path.stem}"
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        names = [name for name in defined if not name.startswith("_")]
        parts += [f"## {module}", ast.get_docstring(tree) or "", *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(parts)
