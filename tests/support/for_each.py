"""One test of many files. A test per file costs more than its work, thousands of times."""

import functools
from collections.abc import Callable, Iterable
from typing import Any


def for_each(items: Iterable[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """A test that checks every item, and names all that fail with their messages."""

    def of(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            failed: list[str] = []
            for item in items:
                try:
                    check(item)
                except AssertionError as error:
                    failed.append(f"{item}: {error}")
            assert not failed, "\n".join(failed)

        functools.update_wrapper(test, check)
        del test.__wrapped__  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess] - pytest would ask for its argument
        return test

    return of
