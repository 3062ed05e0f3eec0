"""Llamas of torchtitan and of Megatron-LM: names and layouts of their weights in a DCP checkpoint.

    ours                   torchtitan              Megatron-LM, all layers in one tensor [layers, ...]
    embed, norm, head      tok_embeddings, norm,   embedding.word_embeddings, decoder.final_layernorm,
                           output                  output_layer
    q_proj, k_proj,        attention.wq, wk, wv    self_attention.linear_qkv: for each KV head its heads of q,
    v_proj                                         then k, then v
    gate_proj, up_proj     feed_forward.w1, w3     mlp.linear_fc1: gate, then up
    o_proj, down_proj      attention.wo, w2        self_attention.linear_proj, mlp.linear_fc2
    attention_norm         attention_norm          self_attention.linear_qkv.layer_norm_weight
    ffn_norm               ffn_norm                mlp.linear_fc1.layer_norm_weight

torchtitan rotates neighbouring channels of a head, 2 i and 2 i + 1; fourbits and Megatron-LM rotate i and
i + P/2. So the rows of wq and wk are reordered, even channels first.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fourbits.exchange.dcp.tensors import METADATA, DcpTensors
from fourbits.exchange.shown import not_parameters
from fourbits.exchange.weights import require_finite, require_fit, shapes, unfilled
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel

#: state that training programs save with the weights, and tables that follow from the configuration
_BESIDE = re.compile(
    r"(chained_\d+\.)?optimizer\.|(lr_scheduler|dataloader|train_state|rng_state|rerun_state_machine)"
    r"|(.*\.)?(freqs_cis|inv_freq|_extra_state)\b"
)
_PREFIXES = ("", "model.", "module.")
_TITAN = {
    "embed.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight",
    "head.weight": "output.weight",
    "attention_norm.weight": "attention_norm.weight",
    "attention.q_proj.weight": "attention.wq.weight",
    "attention.k_proj.weight": "attention.wk.weight",
    "attention.v_proj.weight": "attention.wv.weight",
    "attention.o_proj.weight": "attention.wo.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate_proj.weight": "feed_forward.w1.weight",
    "ffn.up_proj.weight": "feed_forward.w3.weight",
    "ffn.down_proj.weight": "feed_forward.w2.weight",
}
_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
_MEGATRON = {
    "embed.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
    "attention_norm.weight": f"{_QKV}.layer_norm_weight",
    "attention.q_proj.weight": f"{_QKV}.weight",
    "attention.k_proj.weight": f"{_QKV}.weight",
    "attention.v_proj.weight": f"{_QKV}.weight",
    "attention.q_norm.weight": "self_attention.q_layernorm.weight",
    "attention.k_norm.weight": "self_attention.k_layernorm.weight",
    "attention.o_proj.weight": "self_attention.linear_proj.weight",
    "ffn_norm.weight": f"{_FC1}.layer_norm_weight",
    "ffn.gate_proj.weight": f"{_FC1}.weight",
    "ffn.up_proj.weight": f"{_FC1}.weight",
    "ffn.down_proj.weight": "mlp.linear_fc2.weight",
}
#: other names: those of torchtitan from 0.3 on, and of Megatron-LM's layers without Transformer Engine
_OTHER = {
    "output.weight": "lm_head.weight",
    **{f"attention.w{part}.weight": f"attention.qkv_linear.w{part}.weight" for part in "qkv"},
    f"{_QKV}.layer_norm_weight": "input_layernorm.weight",
    f"{_FC1}.layer_norm_weight": "pre_mlp_layernorm.weight",
}
#: our parameters that Megatron-LM stores as one, in the order of their parts
_IN_QKV = tuple(f"attention.{part}_proj.weight" for part in "qkv")
_IN_FC1 = ("ffn.gate_proj.weight", "ffn.up_proj.weight")
SIZES = "Its sizes must be those of model in CONFIG."
REMEDY = (
    "Convert it with the program that wrote it, torchtitan's convert_to_hf.py or Megatron Bridge, and pass "
    "the transformers folder."
)


def is_dcp(folder: Path) -> bool:
    """Whether a folder is a DCP checkpoint."""
    return (folder / METADATA).is_file()


@dataclass(frozen=True, slots=True)
class DcpModel:
    """A Llama's weights in a DCP folder. names: weight names without the prefix -> stored names."""

    folder: Path
    writer: Literal["torchtitan", "Megatron-LM"]
    tensors: DcpTensors
    names: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path) -> "DcpModel":
        """Raises ValueError for a folder that is damaged or holds another model."""
        tensors = DcpTensors(folder)
        for prefix in _PREFIXES:
            found = [name for name in tensors if name.startswith(prefix) and not _BESIDE.match(name)]
            names = {name.removeprefix(prefix): name for name in found}
            if _TITAN["embed.weight"] in names:
                return cls(folder, "torchtitan", tensors, names)
            if _MEGATRON["embed.weight"] in names:
                return cls(folder, "Megatron-LM", tensors, names)
        raise ValueError(
            f"{folder}: holds no {_TITAN['embed.weight']} (torchtitan) and no {_MEGATRON['embed.weight']} "
            f"(Megatron-LM), so it is no Llama of either. {REMEDY}"
        )

    @property
    def stored_as(self) -> str:
        """The format's name for the log and the manifest."""
        return f"{self.writer}'s DCP"

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding."""
        name = (_TITAN if self.writer == "torchtitan" else _MEGATRON)["embed.weight"]
        return self.tensors.described[self.names[name]].shape[0]

    def fitted(self, config: ModelConfig) -> "FittedDcp":
        """The weights as a configuration's parameters, with this vocab_size. ValueError if they don't fit."""
        _require_llama(config, self.writer, self.folder)
        return FittedDcp(self, replace(config, vocab_size=self.vocab_size, document_end=None))

    def stored_name(self, name: str) -> tuple[str, int | None]:
        """The stored name of one of our parameters, and its layer if one tensor holds all layers."""
        titan = self.writer == "torchtitan"
        start, index, inner = ("", "", name) if not name.startswith("blocks.") else name.split(".", 2)
        known = (_TITAN if titan else _MEGATRON)[inner]
        own = f"{'' if titan else 'decoder.'}layers.{index}." if start else ""
        stacked = "decoder.layers." if start and not titan else None
        for their in (known, _OTHER.get(known, known)):
            if own + their in self.names:
                return own + their, None
            if stacked is not None and stacked + their in self.names:
                return stacked + their, int(index)
        return (own + known, None) if stacked is None else (stacked + known, int(index))


class FittedDcp(Mapping[str, Tensor]):
    """The parameters of a configuration by our names, each read on access; without a tied head."""

    def __init__(self, model: DcpModel, config: ModelConfig) -> None:
        """Raises ValueError for weights that are missing, unknown, misshapen or not floating-point."""
        self.model, self.config = model, config
        self._names = shapes(config)
        self._head = model.stored_name("head.weight")[0]
        if config.tie_embeddings:
            del self._names["head.weight"]
        used = {self._checked(name, shape) for name, shape in self._names.items()}
        if config.tie_embeddings:
            used.add(self._head)
        if unknown := [name for name in model.names if name not in used]:
            raise ValueError(f"{model.folder}: {not_parameters(unknown)} {SIZES}")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        found, stored = self._read(name)
        require_finite(stored, found)
        if name == "embed.weight" and self.config.tie_embeddings and self._head in self.model.names:
            head = self.model.tensors[self.model.names[self._head]]
            if not head.equal(found):
                raise ValueError(
                    f"{self.model.folder}: {self._head!r} must be equal to {stored!r}, as "
                    "model.tie_embeddings is true. Set it to false."
                )
        return self._in_our_layout(name.split(".", 2)[-1], found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _read(self, name: str) -> tuple[Tensor, str]:
        """A stored tensor, or one layer of it, and its stored name."""
        their, layer = self.model.stored_name(name)
        stored, tensors = self.model.names[their], self.model.tensors
        return (tensors[stored] if layer is None else tensors.at(stored, layer)), stored

    def _checked(self, name: str, shape: torch.Size) -> str:
        """The stored name of a parameter. Raises ValueError if it does not fit."""
        their, layer = self.model.stored_name(name)
        if their not in self.model.names:
            tied = " If the model has none, set model.tie_embeddings to true." if their == self._head else ""
            raise ValueError(
                f"{self.model.folder}: {their!r} is missing (here it is called {name!r}).{tied} {SIZES}"
            )
        sizes = self._stored_shape(name.split(".", 2)[-1], shape)
        if layer is not None:
            sizes = torch.Size((len(self.config.pattern), *sizes))
        try:
            require_fit(their, self.model.tensors.described[self.model.names[their]], sizes)
        except ValueError as error:
            raise ValueError(
                f"{self.model.folder}: {str(error).removeprefix('exchange: ')} {SIZES}"
            ) from error
        return their

    def _stored_shape(self, inner: str, shape: torch.Size) -> torch.Size:
        """The shape in which the writer stores a parameter, without the dimension of layers."""
        config = self.config
        if self.model.writer == "Megatron-LM" and inner in _IN_QKV:
            heads = config.num_heads + 2 * config.num_kv_heads
            return torch.Size((heads * config.head_dim, config.d_model))
        if self.model.writer == "Megatron-LM" and inner in _IN_FC1 and config.activation == "swiglu":
            return torch.Size((2 * config.d_ffn, config.d_model))
        return shape

    def _in_our_layout(self, inner: str, found: Tensor) -> Tensor:
        config = self.config
        if self.model.writer == "torchtitan":
            heads = {_IN_QKV[0]: config.num_heads, _IN_QKV[1]: config.num_kv_heads}.get(inner)
            if heads is None:
                return found
            pairs = found.unflatten(0, (heads, config.head_dim // 2, 2))  # [heads, P / 2, 2, d_model]
            return pairs.transpose(1, 2).flatten(0, 2)
        if inner in _IN_QKV:
            groups = found.unflatten(0, (config.num_kv_heads, -1, config.head_dim))
            part = (slice(None, -2), slice(-2, -1), slice(-1, None))[_IN_QKV.index(inner)]
            return groups[:, part].flatten(0, 2)
        if inner in _IN_FC1 and config.activation == "swiglu":
            return found.chunk(2)[_IN_FC1.index(inner)]
        return found


def load_dcp(
    folder: Path | str, config: ModelConfig, *, compute_dtype: torch.dtype = torch.bfloat16
) -> LanguageModel:
    """Read a Llama of torchtitan or Megatron-LM from a DCP folder; its masters are FP32.

    config: the configuration that the model was trained with, which the folder does not record; its
    vocab_size is replaced by the folder's. Raises ValueError for another model, and for weights that do not
    fit or are not finite.
    """
    weights = DcpModel.of(Path(folder)).fitted(config)
    model = unfilled(weights.config, compute_dtype, torch.device("cpu"))
    own = model.state_dict()
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    return model


def _require_llama(config: ModelConfig, writer: str, folder: Path) -> None:
    """Raises ValueError for a configuration that the writer's Llama does not support."""
    rules = [
        ("model.pattern", config.pattern, set(config.pattern) == {"T"}, "T for each layer"),
        ("model.rope_theta", config.rope_theta, config.rope_theta is not None, "the base of its rotations"),
    ]
    if writer == "torchtitan":
        rules.append(("model.activation", config.activation, config.activation == "swiglu", "swiglu"))
        rules.append(("model.qk_norm", config.qk_norm, not config.qk_norm, "false"))
    for name, value, holds, rule in rules:
        if not holds:
            raise ValueError(
                f"{folder}: {name} must be {rule} for a Llama of {writer}, got {value!r}. Set it."
            )
