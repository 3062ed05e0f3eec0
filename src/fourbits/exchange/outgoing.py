"""The tensors that an export writes for each parameter: its values in one dtype, or NVFP4 codes and scales.

Both are produced a few rows, or one layer, at a time, so that memory does not grow with the model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourbits.exchange.families import family_of
from fourbits.exchange.nvfp4_checkpoints import CheckpointFormat, PackedWeight
from fourbits.exchange.state import rounded
from fourbits.exchange.weights import hf_names, require_finite
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

#: elements converted at a time
SLAB = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The weights that an export quantizes, the functions that quantize them, and their format.

    exchange does not depend on recipes, so the caller passes the functions. `weights` are our names; all
    other parameters are written in the export's dtype.
    """

    format: CheckpointFormat
    weights: frozenset[str]
    #: (name, master [N, K]) -> codes and scales
    pack: Callable[[str, Tensor], PackedWeight]
    #: (name, master [N, K]) -> the values that training multiplies by, fp32, a few rows at a time
    values: Callable[[str, Tensor], Iterator[Tensor]]
    #: by weight: the global scale, fp32 scalar, with which servers quantize its layer's input; None: inputs
    #: stay in BF16
    input_scales: Mapping[str, Tensor] | None

    @property
    def with_input(self) -> bool:
        """Whether inputs are quantized, too (W4A4), or weights only (W4A16)."""
        return self.input_scales is not None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The parameters of a model as an export writes them. names: ours -> those of transformers."""

    state: Mapping[str, Tensor]
    names: Mapping[str, str]
    #: with the export's vocab_size
    config: ModelConfig
    dtype: torch.dtype
    quantization: Quantization | None

    def quantizes(self, name: str) -> bool:
        """Whether a parameter is written as codes and scales."""
        return self.quantization is not None and name in self.quantization.weights

    def master(self, name: str) -> Tensor:
        """A parameter without rows of the vocabulary that have no token in the export."""
        table = name in ("embed.weight", "head.weight")
        return self.state[name][: self.config.vocab_size] if table else self.state[name]

    def described(self, name: str) -> dict[str, Tensor]:
        """The written tensors of a parameter, on the meta device, by their names in the file."""
        shape, theirs = self.master(name).shape, self.names[name]
        if self.quantization is not None and self.quantizes(name):
            module = theirs.removesuffix(".weight")
            return self.quantization.format.described(module, shape, self.quantization.with_input)
        return {theirs: torch.empty(shape, dtype=self.dtype, device="meta")}

    def parts(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The written tensors, as for `write_tensors`. Raises ValueError for values that are not finite."""
        master, theirs = self.master(name), self.names[name]
        if self.quantization is None or not self.quantizes(name):
            for slab in slabs(master):
                yield theirs, rounded(name, slab, self.dtype)
            return
        for slab in slabs(master):
            require_finite(name, slab)
        packed, scales = self.quantization.pack(name, master), self.quantization.input_scales
        try:
            module, scale = theirs.removesuffix(".weight"), None if scales is None else scales[name]
            tensors = self.quantization.format.tensors(module, packed, scale)
        except ValueError as error:
            raise ValueError(f"export: {name!r}: {error}") from error
        yield from tensors.items()

    def kept(self) -> list[str]:
        """The names in transformers of the linear layers that are not quantized."""
        quantized = self.quantization.weights if self.quantization is not None else frozenset[str]()
        names = [f"{layer}.weight" for layer in linear_layers(self.config)]
        theirs = hf_names(self.config)
        return [theirs[name].removesuffix(".weight") for name in names if name not in quantized]


def linear_layers(config: ModelConfig) -> list[str]:
    """Our names of a model's linear layers. Raises ValueError for a model that transformers lacks."""
    family_of(config)
    with torch.device("meta"):
        modules = LanguageModel(config).named_modules()
    return [name for name, module in modules if isinstance(module, nn.Linear)]


def slabs(tensor: Tensor, multiple: int = 1) -> Iterator[Tensor]:
    """A tensor's rows, a few at a time: a multiple of `multiple`, but for the last ones."""
    columns = tensor[:1].numel()
    rows = max(1, SLAB // max(columns, 1) // multiple) * multiple
    yield from tensor.split(rows) if len(tensor) else (tensor,)
