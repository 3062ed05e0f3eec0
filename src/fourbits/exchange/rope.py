"""Rotary positions in a config.json: `rope_parameters`, or `rope_scaling` of older transformers.

If a file has both, transformers uses `rope_scaling`. A base inside it takes precedence over one next to it;
`original_max_position_embeddings` next to it takes precedence over one inside it. The default base is 10,000.
"""

from collections.abc import Mapping
from typing import Any

from fourbits.exchange.fields import LARGEST_COUNT, Fields
from fourbits.exchange.shown import shown
from fourbits.model.config import ModelConfig, RopeScaling

KINDS = ("default", "linear", "llama3")
THETA = 10000.0
ORIGINAL = "original_max_position_embeddings"


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The value of rope_parameters."""
    written: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is None:
        return written
    written |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        written |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            ORIGINAL: scaling.original_seq_len,
        }
    return written


def read_rope(config: Fields, seq_len: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling. seq_len: the longest sequence. Raises ValueError for other kinds of positions."""
    rope = Fields(_parameters(config))
    theta = (rope if "rope_theta" in rope else config).number("rope_theta", THETA, positive=True)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(
            f"exchange: rope_type must be one of {', '.join(KINDS)}, got {shown(kind)}, which is not "
            "supported here. Convert the transformers model in place: fourbits.convert(model)."
        )
    for fields in (rope, config):
        if (share := fields.get("partial_rotary_factor")) not in (None, 1):
            raise ValueError(
                f"exchange: partial_rotary_factor must be 1 (all channels of a head), got {shown(share)}. "
                "Convert the transformers model in place: fourbits.convert(model)."
            )
    if kind == "default":
        return theta, None
    factor = rope.number("factor", positive=True)
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=factor)
    source = config if config.has(ORIGINAL) else rope
    return theta, RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor", positive=True),
        high_freq_factor=rope.number("high_freq_factor", positive=True),
        original_seq_len=source.whole(ORIGINAL, seq_len, most=LARGEST_COUNT),
    )


def _parameters(config: Fields) -> Mapping[str, Any]:
    given = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.has(key)}
    for key, value in given.items():
        if not isinstance(value, Mapping):
            raise ValueError(
                f"exchange: {key} must be a mapping or null, got {shown(value)}. Correct config.json."
            )
    found = next((value for value in given.values() if value), {})
    if nested := [key for key, value in found.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"exchange: rope_parameters must be the same for all layers, got some for {shown(nested[0])}. "
            "Convert the transformers model in place: fourbits.convert(model)."
        )
    return found
