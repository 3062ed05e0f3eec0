"""The health of one layer in plain numbers, from what a sample measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourbits.linear.monitor.layer import FIELDS, GEMMS
from fourbits.quant.request import OPERAND_ROLES

#: the numbers reported for an operand; snr_db: 10 log10 of signal over noise
OPERAND_STATS = ("at_max", "at_zero", "zeros", "clipped", "snr_db")


@dataclass(frozen=True, slots=True)
class LayerHealth:
    """A sample of one layer. None: not quantized, or not measured."""

    name: str
    #: role -> shares of block scales at the format's maximum and at zero, of codes that are zero, of clipped
    #: elements; signal-to-noise ratio in dB
    operands: dict[str, dict[str, float | None]]
    #: GEMM -> signal-to-noise ratio of a part of its output against that of the unquantized operands
    snr_db: dict[str, float | None]
    #: norm of a part of dW over the norm of its quantization noise
    gradient_to_noise: float | None
    #: share of that part that is zero although it is not without quantization
    dead: float | None
    #: x, dy -> (share of blocks that lose their scale to the tensor's amax, share of rows about as large)
    rows: dict[str, tuple[float | None, float | None]]
    #: share of W's codes that differ from the last sample's and equal those of the one before
    oscillating: float | None = None
    #: the same as a share of the codes that differ from the last sample: about 0.1 to 0.2 where weights move
    #: on, 0.5 and more where they swing
    returning: float | None = None
    #: operands whose amax comes from an earlier step
    stale: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The layer as plain data, for a line of health.jsonl."""
        return {
            "name": self.name,
            "operands": self.operands,
            "snr_db": self.snr_db,
            "gradient_to_noise": self.gradient_to_noise,
            "dead": self.dead,
            "rows": {name: list(shares) for name, shares in self.rows.items()},
            "oscillating": self.oscillating,
            "returning": self.returning,
            "stale": list(self.stale),
        }


def layer_health(
    name: str, values: Sequence[float], swinging: tuple[float, float] | None, stale: tuple[str, ...]
) -> LayerHealth:
    """The health of a layer. values: in the order of FIELDS, NaN where nothing is known; swinging: the shares
    of W's codes that came back, among all and among those that changed.
    """
    known: Mapping[str, float | None] = {
        field: None if math.isnan(value) else value for field, value in zip(FIELDS, values, strict=True)
    }
    operands: dict[str, dict[str, float | None]] = {}
    for role in OPERAND_ROLES:
        if known[f"{role}.signal"] is not None:
            shares = {stat: known[f"{role}.{stat}"] for stat in OPERAND_STATS[:-1]}
            operands[role] = {**shares, "snr_db": decibels(known[f"{role}.signal"], known[f"{role}.error"])}
    zeros, exact = known["dw.zeros"], known["dw.exact_zeros"]
    signal, error = known["wgrad.signal"], known["wgrad.error"]
    return LayerHealth(
        name,
        operands,
        {gemm: decibels(known[f"{gemm}.signal"], known[f"{gemm}.error"]) for gemm in GEMMS},
        math.sqrt(signal / error) if signal is not None and error else None,
        None if zeros is None or exact is None else max(0.0, zeros - exact),
        {tensor: (known[f"{tensor}.lost"], known[f"{tensor}.large"]) for tensor in ("x", "dy")},
        *(swinging or (None, None)),
        tuple(role for role in stale if role in operands),
    )


def decibels(signal: float | None, noise: float | None) -> float | None:
    """`snr_db`; None for a signal of zero or an unknown one."""
    return None if not signal or noise is None else snr_db(signal, noise)


def snr_db(signal: float, noise: float) -> float:
    """10 log10 of signal over noise, both sums of squares; at most 200, also without noise."""
    return min(200.0, 10 * math.log10(signal / noise)) if noise else 200.0
