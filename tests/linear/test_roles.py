"""Routers, gates of experts, adapters and heads stay in BF16, known by their place and not by names."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fourbits.linear.convert import convert
from support.families import FAMILIES, HEADS, SIZES

hf: Any = transformers
RECIPE = "nvfp4-naive"  # keeps no blocks


def kept(model: nn.Module) -> dict[str, str]:
    return {row.name: row.reason for row in convert(model, RECIPE).rows if not row.quantized}


class Experts(nn.Module):
    """A router called anything, beside a list of experts."""

    def __init__(self, router: str, experts: int = 4):
        super().__init__()
        setattr(self, router, nn.Linear(32, experts, bias=False))
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(32, 32)) for _ in range(experts)])
        self.gate_proj = nn.Linear(32, 64)
        self.shared_expert_gate = nn.Linear(32, 1)


@pytest.mark.parametrize("router", ["gate", "wg", "router", "choose"])
def test_a_linear_beside_experts_with_a_column_for_each_is_a_router(router):
    found = kept(nn.Sequential(Experts(router)))
    assert set(found) == {f"0.{router}", "0.shared_expert_gate"}
    assert "router" in found[f"0.{router}"]
    assert found["0.shared_expert_gate"] == "gate of an expert"


def test_a_gate_of_an_mlp_is_no_router():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(32, 64), "up": nn.Linear(32, 64)})})
    assert kept(model) == {}


@pytest.mark.parametrize(
    ("family", "kept_leaf"),
    [("JetMoe", "router.layer"), ("Qwen2Moe", "shared_expert_gate"), ("Qwen3Next", "shared_expert_gate")],
)
def test_routers_of_transformers_stay(family, kept_leaf):
    with torch.device("meta"):
        model, _ = FAMILIES[family]()
    assert any(name.endswith(kept_leaf) for name in kept(model))
    assert not any("router" in row.name for row in convert(model, RECIPE).rows if row.quantized)


HEAD_MODELS: dict[str, tuple[Any, set[str]]] = {
    "score": (lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**HEADS)), {"score"}),
    "qa_outputs": (lambda: hf.BertForQuestionAnswering(hf.BertConfig(**SIZES)), {"qa_outputs"}),
    "classifier": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES)),
        {"classifier", "bert.pooler.dense"},
    ),
    "seq_relationship": (
        lambda: hf.BertForNextSentencePrediction(hf.BertConfig(**SIZES)),
        {"cls.seq_relationship", "bert.pooler.dense"},
    ),
    "predictions": (
        lambda: FAMILIES["MobileBert"]()[0],
        {"cls.predictions.transform.dense", "cls.predictions.dense", "cls.predictions.decoder",
         "mobilebert.embeddings.embedding_transformation"},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", HEAD_MODELS)
def test_task_heads_stay(name):
    make, expected = HEAD_MODELS[name]
    with torch.device("meta"):
        model = make()
    assert set(kept(model)) == expected


def test_a_head_inside_a_module_called_head_stays_as_in_timm():
    class Swin(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32)) for _ in range(3)])
            self.head = nn.ModuleDict({"fc": nn.Linear(32, 16)})

    assert set(kept(Swin())) == {"head.fc"}


class Adapted(nn.Module):
    """As PEFT wraps a layer: the frozen one, and two small ones by the adapter's name."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, 32, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_stay_and_the_layer_that_they_adapt_keeps_its_rules():
    def block():
        names = ("q_proj", "up_proj")
        return nn.ModuleDict({name: Adapted(nn.Linear(32, 32)) for name in names})

    model = nn.ModuleDict({"layers": nn.ModuleList([block() for _ in range(3)])})
    summary = convert(model, "nemotron3-super")  # keeps q_proj, whatever wraps it
    quantized = {row.name for row in summary.rows if row.quantized}
    assert quantized == {f"layers.{i}.up_proj.base_layer" for i in range(2)}
    reasons = {row.name: row.reason for row in summary.rows}
    assert reasons["layers.0.up_proj.lora_A.default"] == "adapter of layers.0.up_proj"
    assert reasons["layers.0.q_proj.base_layer"] == "attention projection"


class MixtureOfStacks(nn.Module):
    """Experts and their router in one module, as research code has them."""

    def __init__(self, router: str) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8, 32, 48))
        self.add_module(router, nn.Linear(32, 8))
        self.router = router

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = getattr(self, self.router)(x).softmax(-1).sum(-1, keepdim=True)
        return torch.einsum("ecd,edh->ech", x, self.w1) * weights


@pytest.mark.parametrize("router", ["gate", "wg", "selector"])
def test_a_layer_with_a_column_for_each_matrix_of_a_stack_beside_it_is_a_router(router):
    summary = convert(nn.ModuleDict({"ffn": MixtureOfStacks(router)}), "nvfp4")
    reasons = {row.name: row.reason for row in summary.rows}
    assert reasons[f"ffn.{router}"] == "router: a column for each of 8 experts"


class Alternatives(nn.Module):
    """Experts by another name: a list of modules of one shape, and a layer that reads what they read."""

    def __init__(self, router: str, entries: nn.Module, columns: int = 4) -> None:
        super().__init__()
        setattr(self, router, nn.Linear(32, columns, bias=False))
        self.ffn, self.body = entries, nn.Linear(32, 48)


def mlps(count: int = 4, width: int = 32) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, 64), nn.Linear(64, width)) for _ in range(count)]


@pytest.mark.parametrize("router", ["switch", "selector", "to_weights"])
@pytest.mark.parametrize("named", [nn.ModuleList, lambda each: nn.ModuleDict({f"e{i}": m for i, m in each})])
def test_a_layer_with_a_column_for_each_module_of_a_list_beside_it_is_a_router(router, named):
    entries = named(mlps()) if named is nn.ModuleList else named(enumerate(mlps()))
    found = kept(nn.Sequential(Alternatives(router, entries), Alternatives(router, nn.ModuleList(mlps()))))
    assert found[f"0.{router}"] == "router: a column for each of 4 modules in '0.ffn'"
    assert set(found) == {f"0.{router}", f"1.{router}"}


def test_a_layer_is_no_router_of_a_list_that_reads_something_else_or_has_another_length():
    for each in (mlps(width=48), mlps(count=3), [*mlps(count=3), nn.Sequential(nn.Linear(32, 32))]):
        layer = Alternatives("to_b", nn.ModuleList(each))
        assert "0.to_b" not in kept(nn.Sequential(layer, layer))


def test_a_projection_to_as_many_columns_as_a_model_has_blocks_is_no_router():
    blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(32, 48)}) for _ in range(4)])
    model = nn.ModuleDict({"time": nn.Linear(32, 4), "layers": blocks})
    assert kept(model) == {}


@pytest.mark.parametrize("columns", [4, 16])  # 16 experts on four processes
def test_the_gate_of_deepspeeds_mixture_stays(columns):
    gate, experts = nn.Module(), nn.Module()
    gate.wg = nn.Linear(32, columns, bias=False)
    experts.deepspeed_experts = nn.ModuleList(mlps())
    mixture = nn.ModuleDict({"gate": gate, "experts": experts})
    found = kept(nn.Sequential(nn.ModuleDict({"deepspeed_moe": mixture})))
    assert set(found) == {"0.deepspeed_moe.gate.wg"}


def test_a_gated_mlp_inside_experts_is_no_router_whatever_its_gate_is_called():
    names = ("wg", "wu")
    expert = lambda: nn.ModuleDict({name: nn.Linear(32, 16) for name in names})  # noqa: E731
    shared = nn.ModuleDict({"wg": nn.Linear(32, 16)})
    mixture = nn.ModuleDict({"experts": nn.ModuleList([expert() for _ in range(4)]), "shared_expert": shared})
    assert kept(nn.Sequential(mixture)) == {}


def test_a_pair_of_low_rank_beside_a_frozen_layer_is_an_adapter_whatever_it_is_called():
    frozen = nn.Linear(32, 48).requires_grad_(False)
    pair = {"A": nn.Linear(32, 16, bias=False), "B": nn.Linear(16, 48, bias=False)}
    model = nn.Sequential(nn.ModuleDict({"linear": frozen, **pair}))
    assert set(kept(model)) == {"0.A", "0.B"}
    convert(model, "bf16")
    frozen.requires_grad_(True)  # three layers that are trained
    assert kept(model) == {}
