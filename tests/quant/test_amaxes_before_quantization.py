"""Amaxes of operands that are found before quantization are those that quantizers use."""

import pytest
import torch

from fourbits.linear.sr_counter import of_shard
from fourbits.quant.amax_stats import own_amax
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import own_amaxes, quantize
from fourbits.quant.request import OperandInputs, OperandRequest

KEY = torch.tensor([1, 2, 3, 16, 1])
SPECS = [
    OperandSpec(),
    OperandSpec(block=(16, 16), source="bf16"),
    OperandSpec(rounding="sr", rht=16),
    OperandSpec(rht=16, rht_signs="per-call"),
    OperandSpec(format="nvfp4-ue5m3-global"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_amax_found_beforehand_gives_the_bytes_of_the_operands_own(spec, dtype):
    torch.manual_seed(0)
    x = (torch.randn(24, 40) * 3.7).to(dtype)
    inputs = (OperandInputs(KEY - torch.tensor([0, 2, 0, 0, 0]), 2),)
    (amax,) = own_amaxes(x, (OperandRequest(spec, 0),), inputs)
    assert amax == own_amax(x, spec, 0, torch.tensor(-1.0), KEY).own
    own, given = (quantize(x, spec, 0, amax, KEY) for amax in (None, amax))
    assert torch.equal(own.codes, given.codes)
    assert torch.equal(own.global_scale, given.global_scale)


def test_formats_without_an_amax_and_empty_tensors_have_0():
    requests = OperandRequest(OperandSpec(format="mxfp4"), 1), OperandRequest(OperandSpec(), 0)
    inputs = (OperandInputs(), OperandInputs())
    assert own_amaxes(torch.ones(32, 32), requests, inputs).tolist() == [0.0, 1.0]
    assert own_amaxes(torch.ones(0, 32), requests, inputs).tolist() == [0.0, 0.0]


def test_a_graph_moves_a_counter_as_an_eager_call_does():
    counter = torch.arange(9)
    moved = of_shard(counter, 32, 64)
    assert moved.tolist() == [0, 1, 2, 3, 4, 5 + 32, 6 + 2, 7 + 64, 8 + 4]
    graph = torch.compile(of_shard, backend="eager", fullgraph=True)
    assert torch.equal(graph(counter, 32, 64), moved)
    assert counter.tolist() == list(range(9))
