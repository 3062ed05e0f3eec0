"""The measurements as plain data: the content of proxies.json and sensitivity.json."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of quantizing a forward pass, nats per token.

    loss_increase: of the validation loss; loss_margin: half the width of its 95 % interval over batches, None
    for one batch; divergence: of the predictions from BF16's, which has less noise.
    """

    loss_increase: float
    loss_margin: float | None
    divergence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientQuality:
    """A gradient against BF16's.

    snr_db: of one draw of the random bits; bias: of the mean over draws, relative; cosine: mean over draws.
    """

    snr_db: float
    bias: float
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """One recipe on one trained BF16 model, every block quantized, over fixed batches.

    forward: cost of the recipe's Fprop; gradient: error of all quantized weights' gradients together.
    """

    recipe: str
    digest: str
    forward: Cost
    gradient: GradientQuality


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """All recipes on one checkpoint. checkpoint: sha256 of its state.json; loss: of BF16, nats per token."""

    run: str
    checkpoint: str
    step: int
    tokens: int
    gradient_tokens: int
    loss: float
    rows: tuple[Proxy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSensitivity:
    """The cost of 4 bits in each GEMM of one linear layer, with everything else in BF16.

    share_of_flops: of all linear layers that the recipe may quantize; fprop: cost of its forward; dgrad: dX;
    wgrad: dW; gradient_share: of dW in the squared norm of the model's gradient.
    """

    layer: str
    share_of_flops: float
    fprop: Cost
    dgrad: GradientQuality
    wgrad: GradientQuality
    gradient_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Layers that stay in BF16, their share of FLOPs, and the cost of quantizing all others."""

    layers: tuple[str, ...]
    share_of_flops: float
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Every layer, from the most to the least sensitive, and the layers that stay in BF16 under a budget.

    nothing: every layer is quantized; proposal: layers are chosen by measured cost; blocks: whole first and
    last blocks are chosen, as the recipe does, under the same budget.
    """

    run: str
    checkpoint: str
    step: int
    recipe: str
    tokens: int
    loss: float
    layers: tuple[LayerSensitivity, ...]
    budget: float
    nothing: Choice
    proposal: Choice
    blocks: Choice
