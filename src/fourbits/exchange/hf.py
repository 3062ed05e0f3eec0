"""from_hf and to_hf: convert models from and to transformers, in memory."""

from typing import Any

import torch

from fourbits.data.optional import load_transformers
from fourbits.exchange.config import from_hf_config, to_hf_config
from fourbits.exchange.weights import fill, hf_names, unfilled
from fourbits.model.lm import LanguageModel


def from_hf(
    model: Any, *, compute_dtype: torch.dtype = torch.bfloat16, clamp_time_steps: bool = True
) -> LanguageModel:
    """Our model with the weights of a transformers model of a supported type as FP32 master weights.

    model: a transformers model with a language-model head; it is not changed. clamp_time_steps: compute time
    steps as transformers does, else as in the training of the published hybrids (see from_hf_config). Raises
    ValueError for any other model.
    """
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise ValueError(
            f"from_hf: model must be a transformers model, got {type(model).__name__}. Pass one such as "
            "AutoModelForCausalLM.from_pretrained(...) returns."
        )
    config = from_hf_config(model.config.to_dict(), clamp_time_steps)
    ours = unfilled(config, compute_dtype, next(model.parameters()).device)
    fill(ours, model.state_dict())
    return ours


def to_hf(model: LanguageModel, *, dtype: torch.dtype = torch.float32, end_token: int | None = None) -> Any:
    """The equivalent transformers model, with a copy of the weights in `dtype`.

    Needs transformers (the extra `hf`). end_token: the token that ends a generated text. For large models,
    `save_hf` and from_pretrained need less memory. Raises ValueError for a model that no transformers class
    implements, and for an end_token outside the vocabulary.
    """
    if not isinstance(model, LanguageModel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"to_hf: model must be a LanguageModel of fourbits, got {type(model).__name__}. Pass one such "
            "as from_hf or load_hf returns."
        )
    transformers = load_transformers("to_hf")
    described = to_hf_config(model.config, dtype, end_token)
    kind = described.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **described)
    # .to(dtype) would also round the rotary frequencies.
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    own = model.state_dict()
    theirs.generation_config.pad_token_id = end_token  # not part of the configuration, see to_hf_config
    theirs.load_state_dict({name: own[ours] for ours, name in hf_names(model.config).items()}, strict=True)
    return theirs.eval()
