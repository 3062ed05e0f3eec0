"""Parameter names in transformers, and filling a model from tensors with those names."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fourbits.exchange.families import family_of
from fourbits.exchange.shown import not_parameters
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

# Older Llamas store tensors that follow from the configuration.
DERIVED = ("rotary_emb.inv_freq",)
#: dtypes that a checkpoint's weights may have; others need scales or lose values
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: parts of names that wrappers add -> the wrapper
WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
}


def hf_names(config: ModelConfig, present: Iterable[str] = ()) -> dict[str, str]:
    """Our name of every parameter -> its name in transformers, with the prefix used in `present`."""
    family = family_of(config)
    used = [prefix for prefix in family.prefixes if any(name.startswith(prefix) for name in present)]
    prefix = (used or family.prefixes)[0]
    return {name: family.their_name(name, prefix) for name in shapes(config)}


def shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Our name of every parameter -> its shape, without allocating any."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in LanguageModel(config).state_dict().items()}


def unfilled(config: ModelConfig, compute_dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """A model whose parameters are allocated but not initialized."""
    with torch.device("meta"):
        model = LanguageModel(config, compute_dtype=compute_dtype)
    model.to_empty(device=device)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight  # to_empty allocates tied tables separately
    return model


def matched(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`hf_names` for these tensors, of which only shapes and dtypes are read.

    Raises ValueError naming the first tensor that is missing, unknown, of the wrong shape or not
    floating-point.
    """
    require_unwrapped(tensors)
    names = hf_names(config, tensors)
    expected = shapes(config)
    for ours, theirs in names.items():
        if theirs not in tensors:
            if ours == "head.weight" and config.tie_embeddings:
                continue
            raise ValueError(f"exchange: {theirs!r} is missing (here it is called {ours!r}).")
        require_fit(theirs, tensors[theirs], expected[ours])
    places = set(names.values())
    unknown = [name for name in tensors if name not in places and not name.endswith(DERIVED)]
    if unknown:
        raise ValueError(f"exchange: {not_parameters(unknown)}")
    return names


def fill(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a transformers model, by their names there, into our model, in its dtype.

    Raises ValueError as `matched` does, for values that are not finite, and for a separate head if the
    configuration ties it to the embedding.
    """
    fill_matched(model, tensors, matched(model.config, tensors))


@torch.no_grad()
def fill_matched(model: LanguageModel, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """`fill` with the names that `matched` returned."""
    own = model.state_dict()
    for ours, theirs in names.items():
        if ours == "head.weight" and model.config.tie_embeddings:
            if theirs in tensors:
                require_tied(tensors, theirs, names["embed.weight"])
            continue
        found = tensors[theirs]
        require_finite(theirs, found)
        own[ours].copy_(found)


def require_unwrapped(names: Iterable[str]) -> None:
    """Raise ValueError for a name that a wrapper changed."""
    for name in names:
        for part, wrapper in WRAPPERS.items():
            if part in name:
                raise ValueError(
                    f"exchange: {name!r} is a name inside {wrapper}. Save the state_dict of the model inside "
                    "(of a compiled model: model._orig_mod.state_dict())."
                )


def require_fit(name: str, found: Tensor, shape: torch.Size) -> None:
    """Raise ValueError for a tensor of another shape, or whose values are not floating-point numbers."""
    if found.shape != shape:
        raise ValueError(
            f"exchange: {name!r} must have the shape {list(shape)} by its configuration, got "
            f"{list(found.shape)}. Correct config.json, or pass the files that belong to it."
        )
    if found.dtype not in FLOATS:
        raise ValueError(
            f"exchange: {name!r} must be {', '.join(str(dtype) for dtype in FLOATS)}, got {found.dtype}. "
            "Dequantize it first."
        )


def require_finite(name: str, found: Tensor, remedy: str = "Use an earlier checkpoint.") -> None:
    """Raise ValueError for a tensor with NaN or infinite values; those on the meta device have none."""
    if not found.is_meta and not (finite := found.isfinite()).all():
        wrong = found.numel() - int(finite.sum())
        values = "value that is" if wrong == 1 else "values that are"
        raise ValueError(f"exchange: {name!r} has {wrong} {values} not finite. {remedy}")


def require_tied(tensors: Mapping[str, Tensor], head: str, embedding: str) -> None:
    """Raise ValueError for a head that differs from the embedding."""
    one, other = tensors[head], tensors[embedding]
    if not (one.is_meta or torch.equal(one, other.to(one))):
        raise ValueError(
            f"exchange: {head!r} must be equal to {embedding!r}, as the configuration ties them. "
            "Set its tie_word_embeddings to false."
        )
