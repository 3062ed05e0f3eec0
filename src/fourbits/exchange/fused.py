"""Projections of one input that servers compute as one matrix: q, k and v; gate and up.

Such a matrix has one global scale. vLLM takes the largest of its parts' scales and leaves their block scales
as they are, so parts with smaller ones would be read with values that are too large.
"""

from collections.abc import Iterable, Mapping

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fused_groups(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """The modules, by name, that servers compute together; each group has at least two.

    modules: all linear layers of a model, in BF16 or not.
    """
    found: dict[tuple[str, int], list[str]] = {}
    for name in modules:
        parent, _, own = name.rpartition(".")
        for place, parts in enumerate(FUSED):
            if own in parts:
                found.setdefault((parent, place), []).append(name)
    return [tuple(group) for group in found.values() if len(group) > 1]


def differing(groups: Iterable[tuple[str, ...]], scales: Mapping[str, float]) -> tuple[str, ...] | None:
    """The first group whose parts have more than one global scale, or of which only a part is quantized.

    scales: of the quantized modules.
    """
    for group in groups:
        if len({scales.get(name) for name in group}) > 1:
            return group
    return None
