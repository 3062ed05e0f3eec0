"""Stacks of blocks are found by structure, in any container; first and last blocks are counted in each."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fourbits.linear.convert import convert
from fourbits.linear.layer_state import converted_state
from fourbits.linear.stacks import find_stacks
from fourbits.linear.summary import ConversionSummary

hf: Any = transformers


class Block(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Attention(Block):
    pass


def blocks_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    return {stack.name: stack.blocks for stack in find_stacks([model])}


def kept(summary: ConversionSummary) -> dict[str, str]:
    return {row.name: row.reason for row in summary.rows if not row.quantized}


class Titan(nn.Module):
    """As in torchtitan: blocks in a ModuleDict by number, and a head called output."""

    def __init__(self, blocks: int = 4):
        super().__init__()
        self.tok_embeddings = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(blocks)})
        self.norm, self.output = nn.RMSNorm(32), nn.Linear(32, 64, bias=False)


def test_blocks_in_a_module_dict_and_a_head_called_output_are_those_of_torchtitan():
    summary = convert(Titan(), "nvfp4")
    assert [str(stack) for stack in summary.stacks] == ["stack layers: 4 blocks, first 0 and last 1 in BF16"]
    last = "last 1 of 4 blocks"
    assert kept(summary) == {"layers.3.up": last, "layers.3.down": last, "output": "head by its name"}
    assert "stack layers: 4 blocks" in str(summary)
    assert summary.to_dict()["stacks"] == [{"name": "layers", "blocks": 4, "first": 0, "last": 1}]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.ModuleDict({"blocks": nn.Sequential(*[Block() for _ in range(3)])}), {"blocks": ["0", "1", "2"]}),
        # a stem and a final norm in the same container are no blocks
        (nn.Sequential(nn.Linear(8, 32), Block(), Attention(), Block(), nn.GELU()), {"": ["1", "2", "3"]}),
        (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), {}),
        (nn.ModuleDict({"attention": Attention(), "mlp": Block()}), {}),
        (nn.ModuleDict({"experts": nn.ModuleList([Block() for _ in range(4)])}), {}),
        (nn.ModuleList([nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)]), {}),
    ],
    ids=["sequential", "with stem", "of layers", "named parts", "experts", "convolutions"],
)  # fmt: skip
def test_a_stack_is_a_run_of_modules_that_hold_linear_layers(model, expected):
    found = blocks_of(model)
    assert found == {
        name: tuple(f"{name}.{index}".lstrip(".") for index in places) for name, places in expected.items()
    }


def test_numbered_attributes_are_a_stack():
    model = nn.Module()
    for index in range(1, 5):
        setattr(model, f"block{index}", Block())
    assert blocks_of(model) == {"block*": tuple(f"block{index}" for index in range(1, 5))}


def test_stages_of_growing_width_are_one_stack_of_all_their_blocks():
    stages = nn.ModuleList(
        [nn.ModuleDict({"blocks": nn.Sequential(*[Block(16 << i) for _ in range(2)])}) for i in range(3)]
    )
    assert blocks_of(nn.ModuleDict({"stages": stages})) == {
        "stages": tuple(f"stages.{stage}.blocks.{block}" for stage in range(3) for block in range(2))
    }


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
FAMILIES: dict[str, tuple[Any, dict[str, int]]] = {
    "swin": (lambda: hf.SwinModel(hf.SwinConfig(depths=[2, 2, 6, 2])), {"encoder.layers": 12}),
    "segformer": (lambda: hf.SegformerModel(hf.SegformerConfig()), {"stages": 8}),
    "funnel": (
        lambda: hf.FunnelModel(hf.FunnelConfig(block_sizes=[2, 3])),
        {"encoder.blocks": 5, "decoder.layers": 2},
    ),
    "t5": (lambda: hf.T5Model(hf.T5Config(num_layers=2)), {"encoder.block": 2, "decoder.block": 2}),
    "bart": (lambda: hf.BartModel(hf.BartConfig()), {"encoder.layers": 12, "decoder.layers": 12}),
    "whisper": (lambda: hf.WhisperModel(hf.WhisperConfig()), {"encoder.layers": 4, "decoder.layers": 4}),
    "llava": (
        lambda: hf.LlavaModel(
            hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**SIZES), text_config=hf.LlamaConfig(**SIZES))
        ),
        {"vision_tower.encoder.layers": 3, "language_model.layers": 3},
    ),
    "mobilebert": (
        lambda: hf.MobileBertModel(hf.MobileBertConfig(num_hidden_layers=4)),
        {"encoder.layer": 4},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_encoder_decoder_and_tower_of_transformers_is_a_stack(family):
    make, expected = FAMILIES[family]
    assert {name: len(blocks) for name, blocks in blocks_of(on_meta(make)).items()} == expected


def test_first_and_last_blocks_are_kept_in_each_stack():
    model = on_meta(lambda: hf.BartModel(hf.BartConfig()))
    reasons = kept(convert(model, "nvfp4", keep_first=1, keep_last="1/6"))
    inside = {name.split(".")[0] + name.split(".")[2] for name, why in reasons.items() if "blocks" in why}
    assert inside == {f"{stack}{block}" for stack in ("encoder", "decoder") for block in (0, 10, 11)}


def test_stacks_can_be_named_and_an_empty_list_means_none():
    model = nn.ModuleDict({"a": nn.ModuleDict({"x": Block(), "y": Attention(), "z": Block()}), "b": Titan()})
    summary = convert(model, "nvfp4", stacks=["a"], keep_last=1)
    assert [(stack.name, stack.blocks) for stack in summary.stacks] == [("a", 3)]
    assert {name for name, why in kept(summary).items() if "blocks" in why} == {"a.z.up", "a.z.down"}
    assert convert(model, "nvfp4", stacks=[]).stacks == ()
    with pytest.raises(
        ValueError, match=r"stacks must match the name of a container .* 'b\.layer'.*'b\.layers'"
    ):
        convert(model, "nvfp4", stacks="b.layer")


def test_parts_of_a_model_have_one_numbering_and_one_stack():
    whole = Titan(6)
    parts = [nn.Module(), nn.Module()]
    for part, places in zip(parts, ((0, 1, 2), (3, 4, 5)), strict=True):
        part.layers = nn.ModuleDict({str(i): whole.layers[str(i)] for i in places})
    summary = convert(parts, "nvfp4", keep_first=1, keep_last=1)
    assert [(stack.name, stack.blocks) for stack in summary.stacks] == [("layers", 6)]
    assert {name.rpartition(".")[0] for name in kept(summary)} == {"0.layers.0", "1.layers.5"}
    states = [converted_state(module) for part in parts for module in part.modules()]
    assert [state.layer for state in states if state is not None] == list(range(2, 10))


def test_a_block_is_no_container_of_blocks():
    """Its attention and MLP would count as blocks, and everything behind them as a head."""
    block = nn.ModuleDict({"attention": nn.Sequential(nn.Linear(32, 32))})

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))

    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block(), Block()]), "other": block})
    with pytest.raises(ValueError, match=r"got .layers\.0., which is a block of .layers."):
        convert(model, "nvfp4", stacks="layers.0")


@pytest.mark.parametrize("named", ["layers.0", "layers.*"])
def test_a_block_of_any_class_is_no_container(named):
    blocks = [nn.Sequential(Attention(), Block()) for _ in range(3)]
    model = nn.ModuleDict({"layers": nn.ModuleList(blocks), "other": nn.Linear(32, 32)})
    with pytest.raises(ValueError, match=r"got 'layers\.0', which is a block of 'layers'\. Name that"):
        convert(model, "nvfp4", stacks=named)


def test_parts_with_blocks_of_other_classes_are_separate_stacks():
    """An encoder and a decoder; parts with blocks of one class are stages of one stack."""
    encoder = nn.ModuleDict({"layers": nn.ModuleList([Block() for _ in range(3)])})
    decoder = nn.ModuleDict({"layers": nn.ModuleList([Attention() for _ in range(4)])})
    assert [len(stack.blocks) for stack in find_stacks([encoder, decoder])] == [3, 4]
    more = nn.ModuleDict({"layers": nn.ModuleList([Block() for _ in range(2)])})
    assert [len(stack.blocks) for stack in find_stacks([encoder, more])] == [5]
