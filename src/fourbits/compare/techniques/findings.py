"""The measurements as plain data: the content of techniques.json.

An error is relative: the norm of the difference over the norm of the exact tensor, in Frobenius norms.
"""

from dataclasses import dataclass
from typing import Literal

OperandName = Literal["X", "W", "dY"]

# In addition to the shipped recipes, the largest elements are quantized in NVFP4 with a tensor scale of 1.
NO_TENSOR_SCALE = "nvfp4, no tensor scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientError:
    """The gradients of all quantized weights together under a recipe, compared with BF16's.

    error: of one gradient, root mean square over draws of the random bits. bias: of the mean over endless
    draws, estimated without the noise that the mean of a few draws still has. cosine: to BF16's gradient,
    mean over draws; projection: the gradient's component along BF16's, 1 if none is lost.
    """

    recipe: str
    batch: int
    draws: int
    error: float
    bias: float
    cosine: float
    projection: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandError:
    """One operand of one layer, quantized as a recipe does in Fprop (X, W) and Dgrad (dY)."""

    layer: str
    operand: OperandName
    recipe: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestElement:
    """The largest element of every 16 along the contraction: mean relative error, rounded to nearest.

    The elements are the same for every format, whatever its blocks.
    """

    layer: str
    operand: OperandName
    format: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingBias:
    """dY of one layer: error of rounding to nearest (RNE), of one stochastic draw, and of the draws' mean."""

    layer: str
    recipe: str
    draws: int
    nearest: float
    one_draw: float
    mean_of_draws: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMismatch:
    """W of one layer, quantized for Fprop and for Dgrad with one block shape.

    mismatch: the difference of the two over the norm of W. error: of Fprop's.
    """

    layer: str
    block: str
    mismatch: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformEffect:
    """dW of one layer: error with and without the random Hadamard transform (RHT) of Wgrad's operands."""

    layer: str
    recipe: str
    size: int
    without: float
    with_transform: float

    @property
    def ratio(self) -> float:
        """Error with the transform divided by error without it; above 1 the transform does harm."""
        return self.with_transform / self.without


@dataclass(frozen=True, slots=True, kw_only=True)
class Techniques:
    """Everything measured on one checkpoint. checkpoint: sha256 of its state.json; layers: in model order."""

    run: str
    checkpoint: str
    step: int
    layers: tuple[str, ...]
    tokens_per_batch: int
    batches: int
    gradients: tuple[GradientError, ...]
    operands: tuple[OperandError, ...]
    largest: tuple[LargestElement, ...]
    rounding: tuple[RoundingBias, ...]
    weights: tuple[WeightMismatch, ...]
    transforms: tuple[TransformEffect, ...]
