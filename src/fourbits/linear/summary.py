"""The report of a conversion: one row per weight of a matrix multiplication, and the quantized shares."""

from collections import Counter
from dataclasses import dataclass

from fourbits.recipe.recipe import GemmSpec, GemmTable


@dataclass(frozen=True, slots=True)
class LinearReport:
    """One linear layer of the model, or another parameter that a matrix multiplication reads.

    Experts count with all their weights, although each token uses only some.
    """

    name: str
    #: (out_features, in_features), with out_features summed over the layers of a group
    shape: tuple[int, int]
    #: as returned by `precision_of`
    precision: str
    #: the reason for this precision
    reason: str
    #: linear layers that the weight holds, such as experts in one parameter; 0 for another weight
    layers: int = 1

    @property
    def quantized(self) -> bool:
        """Whether any GEMM of the layer is quantized."""
        return self.precision != "bf16"

    @property
    def size(self) -> int:
        """Number of weights; also half the forward FLOPs per token, except for experts."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class OtherParameter:
    """A parameter of two or more dimensions that no matrix multiplication is known to read."""

    name: str
    shape: tuple[int, ...]
    #: its apparent use
    reason: str


@dataclass(frozen=True, slots=True)
class StackReport:
    """A run of blocks, and how many of the first and last stay in BF16."""

    name: str
    blocks: int
    first: int
    last: int

    def __str__(self) -> str:
        kept = f"first {self.first} and last {self.last} in BF16" if self.first or self.last else "none kept"
        return f"stack {self.name or 'of the model'}: {self.blocks} blocks, {kept}"


@dataclass(frozen=True, slots=True)
class ConversionSummary:
    """The precision of every weight of a matrix multiplication, and why. Shares are quantized / total."""

    recipe: str
    digest: str
    rows: tuple[LinearReport, ...]
    #: all parameters of the model, embeddings and norms included
    model_parameters: int
    #: the stacks of blocks, by which the first and last blocks are counted
    stacks: tuple[StackReport, ...] = ()
    #: other notes, such as names in the recipe that match no layer
    notes: tuple[str, ...] = ()
    #: parameters of two or more dimensions in no row, and their apparent use; they count in no share but
    #: that of all parameters
    others: tuple[OtherParameter, ...] = ()

    @property
    def share_of_linears(self) -> float:
        """Quantized share of the layers, by count: linear layers, and other weights as one each."""
        counts = [(max(row.layers, 1), row.quantized) for row in self.rows]
        return _share(sum(n for n, quantized in counts if quantized), sum(n for n, _ in counts))

    @property
    def share_of_parameters(self) -> float:
        """Quantized share of all parameters of the model."""
        return _share(self._quantized_size(), self.model_parameters)

    @property
    def share_of_flops(self) -> float:
        """Quantized share of the rows' weights; also of their FLOPs, if each token uses every weight."""
        return _share(self._quantized_size(), sum(row.size for row in self.rows))

    def _quantized_size(self) -> int:
        return sum(row.size for row in self.rows if row.quantized)

    def to_dict(self) -> dict[str, object]:
        """The summary as plain data, for a manifest."""
        return {
            "recipe": self.recipe,
            "digest": self.digest,
            "share_of_linears": self.share_of_linears,
            "share_of_parameters": self.share_of_parameters,
            "share_of_flops": self.share_of_flops,
            "linears": [
                {"name": r.name, "shape": list(r.shape), "precision": r.precision, "reason": r.reason}
                for r in self.rows
            ],
            "stacks": [
                {"name": s.name, "blocks": s.blocks, "first": s.first, "last": s.last} for s in self.stacks
            ],
            "others": [{"name": o.name, "shape": list(o.shape), "reason": o.reason} for o in self.others],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        counts = Counter((row.layers, row.precision, row.reason) for row in self.rows)
        lines = [f"recipe {self.recipe} ({self.digest})"]
        kinds = [_counted(n, layers) for (layers, *_), n in counts.items()]
        width = max(
            len(kind) for kind in ("linear layers", *kinds, *(["not counted"] if self.others else []))
        )
        lines += [
            f"  {n:4d} {kind:<{width}} {precision:<8} {reason}"
            for kind, ((_, precision, reason), n) in zip(kinds, counts.items(), strict=True)
        ]
        lines += [
            f"  {n:4d} {'not counted':<{width}} {'bf16':<8} {reason}"
            for reason, n in Counter(other.reason for other in self.others).items()
        ]
        lines += [f"  {line}" for line in (*map(str, self.stacks), *self.notes)]
        lines.append(
            f"  quantized: {self.share_of_linears:.1%} of layers, {self.share_of_parameters:.1%} of "
            f"parameters, {self.share_of_flops:.1%} of all GEMM weights"
        )
        return "\n".join(lines)


def _counted(rows: int, layers: int) -> str:
    """Text for a number of rows that hold `layers` layers each."""
    if not layers:
        return "other weight" if rows == 1 else "other weights"
    if layers == 1:
        return "linear layer" if rows == 1 else "linear layers"
    return f"{'group' if rows == 1 else 'groups'} of {layers} linear layers"


def precision_of(table: GemmTable) -> str:
    """A table in one word: its format, or the formats of Fprop/Dgrad/Wgrad where they differ."""
    names = [_gemm_precision(gemm) for gemm in (table.fprop, table.dgrad, table.wgrad)]
    return names[0] if len(set(names)) == 1 else "/".join(names)


def _gemm_precision(gemm: GemmSpec) -> str:
    names = (gemm.lhs.format, gemm.rhs.format)
    return names[0] if names[0] == names[1] else "x".join(names)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
