"""HTML from function calls: text is escaped, markup nests, and a page carries everything it shows."""

from html import escape
from importlib.resources import files

VOID = {"meta", "br", "img"}


class Markup(str):
    """A string that is HTML already; any other string is text and gets escaped."""

    __slots__ = ()


Node = Markup | str | int | None


def tag(name: str, /, *children: Node, **attributes: str | int | None) -> Markup:
    """An element. None leaves a child or an attribute out; class_ gives the attribute class."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    text = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items() if value is not None)
    if name in VOID:
        return Markup(f"<{name}{text}>")
    return Markup(f"<{name}{text}>{join(*children)}</{name}>")


def join(*children: Node) -> Markup:
    """Children one after another, without an element around them."""
    return Markup("".join(_text(child) for child in children if child is not None))


def section(title: str, *children: Node, lead: str | None = None) -> Markup:
    """A section with a heading and, if given, one sentence on what it shows."""
    head = tag("h2", title)
    return tag("section", head, tag("p", lead, class_="lead") if lead else None, *children)


def table(head: list[Node], rows: list[list[Node]], *, text_columns: int = 1) -> Markup:
    """A table in a box that scrolls by itself. The first text_columns columns are text, the rest numbers."""

    def cells(name: str, row: list[Node]) -> Markup:
        kinds = ["text" if at < text_columns else "number" for at in range(len(row))]
        return tag("tr", *(tag(name, cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))

    body = tag("tbody", *(cells("td", row) for row in rows))
    return tag("div", tag("table", tag("thead", cells("th", head)), body), class_="scroll", tabindex=0)


def facts(pairs: dict[str, Node]) -> Markup:
    """A list of names and values; a value of None is left out."""
    items = [join(tag("dt", name), tag("dd", value)) for name, value in pairs.items() if value is not None]
    return tag("dl", *items)


def page(title: str, *body: Node) -> str:
    """A whole document, style included; it loads nothing from anywhere."""
    style = files("fourbits.compare").joinpath("report.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *body)), lang='en')}\n"


def _text(child: Node) -> str:
    return child if isinstance(child, Markup) else escape(str(child), quote=False)
