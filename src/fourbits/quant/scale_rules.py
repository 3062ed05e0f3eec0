"""Scale rules as data: how a block's ideal scale is chosen. docs/nvfp4.md, sections 7.1, 7.2 and 7.5.

`reference/scale_search.py` has the function of each rule. `register_scale_rule` adds rules from outside.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from fourbits.formats.descriptors import BlockFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """A rule's name, and what it needs of an OperandSpec."""

    name: str
    #: hierarchies of block scales (`BlockFormat.scale`) that it serves; None: all
    scales: tuple[str, ...] | None = ("e4m3", "ue5m3")
    #: element formats that it serves; None: all
    elements: tuple[str, ...] | None = None
    #: largest block scale the tensor's amax is mapped to, unless a spec sets scale_bound; 0: the format's
    bound: int = 0
    #: mse, mae or max where candidate scales are compared by their error
    error_metric: str | None = None
    #: whether it chooses among rounded scales, which stochastic rounding would undo
    chooses_rounded: bool = False
    #: whether it may choose, on purpose, a scale that is too small for the largest element of a block
    clips: bool = False

    def serves(self, block_format: BlockFormat) -> bool:
        """Whether blocks of a format can have scales by this rule."""
        element = None if block_format.element is None else block_format.element.name
        scaled = self.scales is None or block_format.scale in self.scales
        return scaled and (self.elements is None or element in self.elements)

    @property
    def needs(self) -> str:
        """The formats it serves, in words for an error."""
        scales = " or ".join(name.upper() for name in self.scales or ("any",))
        elements = " or ".join(name.upper() for name in self.elements or ())
        return f"{elements} elements with {scales} block scales" if elements else f"{scales} block scales"


_METRICS = ("mse", "mae", "max")
_four_over_six = ScaleRule(name="4over6", scales=("e4m3",), elements=("e2m1",), bound=256)
_search = ScaleRule(name="search", scales=("e4m3",), bound=256, chooses_rounded=True, clips=True)
#: the rules that compare errors, one for each metric
FOUR_OVER_SIX = tuple(f"4over6-{metric}" for metric in _METRICS)
SEARCH = tuple(f"search-{metric}" for metric in _METRICS)
_SHIPPED = (
    ScaleRule(name="max", scales=None),
    ScaleRule(name="ceil", scales=("e8m0",)),
    *(replace(_four_over_six, name=n, error_metric=m) for n, m in zip(FOUR_OVER_SIX, _METRICS, strict=True)),
    *(replace(_search, name=n, error_metric=m) for n, m in zip(SEARCH, _METRICS, strict=True)),
)
_rules = {rule.name: rule for rule in _SHIPPED}
#: all rules by name: those of this file, and registered ones
SCALE_RULES = MappingProxyType(_rules)


def add_scale_rule(rule: ScaleRule) -> None:
    """Add a rule to the table. `quant.register.register_scale_rule` checks it first."""
    _rules[rule.name] = rule


def remove_scale_rule(name: str) -> None:
    """Remove a rule that failed its trial."""
    del _rules[name]
