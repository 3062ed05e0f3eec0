"""Renders a page from its template: text is escaped, and the page contains everything it shows."""

import re

from jinja2 import Environment, PackageLoader, StrictUndefined

from fourbits.compare import number_format

NUMBER_FILTERS = ("count", "loss", "mebibytes", "percent", "plural", "ratio", "signed")


def render_page(template: str, **values: object) -> str:
    """Fill a template of templates/ with values; a missing value is an error.

    Prevents line breaks between a number and its per cent sign.
    """
    page = environment().get_template(template).render(**values)
    return re.sub(r"(\d) %", "\\1\N{NO-BREAK SPACE}%", page)


def environment() -> Environment:
    """Templates of reports, with the number formats as filters."""
    found = Environment(
        loader=PackageLoader("fourbits.compare.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update({name: getattr(number_format, name) for name in NUMBER_FILTERS})
    return found
