"""Numbers as text, formatted alike in the terminal and in reports."""

MINUS = "\u2212"
PLUS_MINUS = "\u00b1"
DASH = "\u2013"
NO_BREAK = "\u00a0"


def loss(value: float | None, margin: float | None = None) -> str:
    """Nats per token, with the margin of its interval if given; a dash for None."""
    if value is None:
        return DASH
    return f"{value:.4f}" + (f" {PLUS_MINUS} {margin:.4f}" if margin is not None else "")


def signed(value: float | None, digits: int, margin: float | None = None) -> str:
    """A difference with an explicit sign, but never minus zero, and the margin of its interval if given; a
    dash for None.
    """
    if value is None:
        return DASH
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    text = text.replace("-", MINUS)
    return text + (f" {PLUS_MINUS} {margin:.{digits}f}" if margin is not None else "")


def percent(share: float) -> str:
    """A share in three digits: '0 %', '0.25 %', '2.5 %', '18.8 %', '100 %'."""
    value = 100 * share
    digits = 0 if value == 0 or value >= 99.95 else 2 if value < 0.995 else 1
    return f"{value:.{digits}f}{NO_BREAK}%"


def count(value: float) -> str:
    """A whole number with thousands separators."""
    return f"{value:,.0f}"


def short_count(value: float, digits: int = 3) -> str:
    """A count in at most so many significant digits: 0, 950, 1.5k, 524k, 1.52M, 12.3B, 10T."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.{digits}g}{name}"
    return f"{value:.{digits}g}"


def mebibytes(value: float) -> str:
    """Bytes as MiB, or as GiB from 10 GiB."""
    return f"{value / 2**30:,.1f} GiB" if value >= 10 * 2**30 else f"{value / 2**20:,.0f} MiB"


def ratio(value: float | None) -> str:
    """A speed relative to the baseline, '0.54x'; a dash for None."""
    return DASH if value is None else f"{value:.2f}x"


def duration(seconds: float) -> str:
    """'42 s', '3 min 20 s', '2 h 05 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def long_duration(seconds: float) -> str:
    """One figure and its unit: '0.21 s', '42 s', '5 min', '3 h', '12 days', '4.0 years'."""
    for unit, name in ((365.25 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.{1 if seconds < 10 * unit else 0}f} {name}"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.2g} s"


def plural(number: int, noun: str) -> str:
    """'1 seed', '2 seeds', '1,000 steps'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
