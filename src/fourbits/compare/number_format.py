"""Numbers as text, formatted alike in the terminal and in reports."""

MINUS = "\u2212"
PLUS_MINUS = "\u00b1"
DASH = "\u2013"


def loss(value: float | None, deviation: float | None = None) -> str:
    """Nats per token, with the standard deviation over seeds if given; a dash for None."""
    if value is None:
        return DASH
    return f"{value:.4f}" + (f" {PLUS_MINUS} {deviation:.4f}" if deviation is not None else "")


def signed(value: float | None, digits: int, deviation: float | None = None) -> str:
    """A difference with an explicit sign, but never minus zero; a dash for None."""
    if value is None:
        return DASH
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    text = text.replace("-", MINUS)
    return text + (f" {PLUS_MINUS} {deviation:.{digits}f}" if deviation is not None else "")


def count(value: float) -> str:
    """A whole number with thousands separators."""
    return f"{value:,.0f}"


def short_count(value: float, digits: int = 3) -> str:
    """A count in at most so many significant digits: 0, 950, 1.5k, 524k, 1.52M, 12.3B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
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


def plural(number: int, noun: str) -> str:
    """'1 seed', '2 seeds'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
