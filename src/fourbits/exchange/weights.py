"""Parameter names in transformers, and filling a model from tensors with those names."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fourbits.exchange.families import family_of
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

# Older Llamas store tensors that follow from the configuration.
DERIVED = ("rotary_emb.inv_freq",)


def hf_names(config: ModelConfig, present: Iterable[str] = ()) -> dict[str, str]:
    """Our name of every parameter -> its name in transformers, with the prefix used in `present`."""
    family = family_of(config)
    used = [prefix for prefix in family.prefixes if any(name.startswith(prefix) for name in present)]
    prefix = (used or family.prefixes)[0]
    with torch.device("meta"):
        ours = LanguageModel(config).state_dict()
    return {name: family.their_name(name, prefix) for name in ours}


def unfilled(config: ModelConfig, compute_dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """A model whose parameters are allocated but not initialized."""
    with torch.device("meta"):
        model = LanguageModel(config, compute_dtype=compute_dtype)
    model.to_empty(device=device)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight  # to_empty allocates a separate table for each
    return model


@torch.no_grad()
def fill(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a transformers model, by their names there, into our model, in its dtype.

    Raises ValueError naming the first tensor that is missing, unknown or of the wrong shape, and for a
    separate head if the configuration ties it to the embedding.
    """
    names = hf_names(model.config, tensors)
    if model.config.tie_embeddings:
        tied = names.pop("head.weight")
    else:
        tied = None
    own = model.state_dict()
    for ours, theirs in names.items():
        if theirs not in tensors:
            raise ValueError(f"exchange: {theirs!r} is missing (here it is called {ours!r}).")
        found = tensors[theirs]
        if found.shape != own[ours].shape:
            raise ValueError(
                f"exchange: {theirs!r} must have the shape {list(own[ours].shape)} by its configuration, "
                f"got {list(found.shape)}."
            )
        own[ours].copy_(found)
    if tied is not None and tied in tensors and _differ(tensors[tied], tensors[names["embed.weight"]]):
        raise ValueError(
            f"exchange: {tied!r} must be equal to {names['embed.weight']!r}, as the configuration ties them. "
            "Set its tie_word_embeddings to false."
        )
    places = {*names.values(), tied}
    unknown = [name for name in tensors if name not in places and not name.endswith(DERIVED)]
    if unknown:
        raise ValueError(
            f"exchange: {unknown[0]!r} and {len(unknown) - 1} more are not parameters of this model."
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tables have different values; tables on the meta device have none."""
    return not (one.is_meta or torch.equal(one, other.to(one)))
