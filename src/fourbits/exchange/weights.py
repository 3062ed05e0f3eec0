"""Parameters under the names of transformers, and a model filled from them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fourbits.exchange.families import family_of
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

# Older Llamas store what they derive from the configuration.
DERIVED = ("rotary_emb.inv_freq",)


def hf_names(config: ModelConfig, present: Iterable[str] = ()) -> dict[str, str]:
    """Our name of every parameter -> its name in transformers, with the prefix that `present` names have."""
    family = family_of(config)
    used = [prefix for prefix in family.prefixes if any(name.startswith(prefix) for name in present)]
    prefix = (used or family.prefixes)[0]
    with torch.device("meta"):
        ours = LanguageModel(config).state_dict()
    return {name: family.their_name(name, prefix) for name in ours}


def unfilled(config: ModelConfig, compute_dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """A model whose parameters have memory and no values yet."""
    with torch.device("meta"):
        model = LanguageModel(config, compute_dtype=compute_dtype)
    model.to_empty(device=device)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight  # to_empty gives each module its own
    return model


@torch.no_grad()
def fill(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a transformers model, by their names there, into our model, in its dtype.

    Raises ValueError naming the first tensor that is missing, misshapen, or has no place here, and for a head
    of its own where the configuration says that it is the embedding.
    """
    names = hf_names(model.config, tensors)
    if model.config.tie_embeddings:
        tied = names.pop("head.weight")
    else:
        tied = None
    own = model.state_dict()
    for ours, theirs in names.items():
        if theirs not in tensors:
            raise ValueError(f"exchange: {theirs!r} is missing, which would be {ours!r} here.")
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
    foreign = [name for name in tensors if name not in places and not name.endswith(DERIVED)]
    if foreign:
        raise ValueError(f"exchange: {foreign[0]!r} and {len(foreign) - 1} more have no place in this model.")


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tables hold different numbers; those without memory hold none."""
    return not (one.is_meta or torch.equal(one, other.to(one)))
