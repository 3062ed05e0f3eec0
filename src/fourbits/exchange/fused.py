"""Projections of one input that servers merge into one matrix: q, k and v; gate and up.

The merged matrix has one global scale. vLLM takes the largest global scale of the parts and keeps their block
scales, so it would decode a part with a smaller global scale to values that are too large.
"""

from collections.abc import Iterable, Mapping

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fused_groups(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """The names of modules that servers merge, in groups of at least two.

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
    """The first group with different global scales, or of which only some modules are quantized.

    scales: global scales of the quantized modules.
    """
    for group in groups:
        if len({scales.get(name) for name in group}) > 1:
            return group
    return None
