"""BF16 masters: rounded like an independent oracle, unbiased, independent of any split; and whole runs."""

import math

import pytest
import torch
from torch import nn

from fourbits.model.lm import LanguageModel
from fourbits.quant.cpu.compiled import COMPILE_FROM
from fourbits.settings import override
from fourbits.train import masters
from fourbits.train.checkpoint import open_checkpoint, save_checkpoint
from fourbits.train.config import OptimConfig
from fourbits.train.load_run import load_trained
from fourbits.train.masters import bf16_masters, stochastic_bf16, store_update, update_key
from fourbits.train.opening import with_vocabulary
from fourbits.train.optim import MasterOptimizer
from fourbits.train.run import run
from fourbits.train.trainer import Trainer
from oracle.bridge import patterns, raw_bits
from oracle.update import update_bf16
from support.adversarial import FINITE
from support.assertions import assert_same_bytes

SEED, STEP, INDEX = (1 << 32) - 5, 70_000, 3
EXTREMES = [
    math.nan,
    math.inf,
    -math.inf,
    3.4028234663852886e38,
    -3.4028234663852886e38,
    3.3895313892515355e38,
    0.0,
]


def stored(z: torch.Tensor, key=None) -> torch.Tensor:
    master = torch.empty(z.shape, dtype=torch.bfloat16)
    store_update(master, z, key or update_key(SEED, STEP, INDEX))
    return master


@pytest.mark.parametrize("shape", [(5, 21), (1, 8), (3, 1), (0, 4)])
@pytest.mark.parametrize("kind", FINITE)
def test_the_rounding_equals_the_oracle(kind, shape):
    z = FINITE[kind](shape, 3)
    expected = [
        [update_bf16(p, SEED, STEP, INDEX, i, j) for j, p in enumerate(row)]
        for i, row in enumerate(patterns(z))
    ]
    assert raw_bits(stored(z)) == expected


def test_rounding_keeps_non_finite_values_and_creates_none():
    z = torch.tensor([EXTREMES] * 400)
    found = stored(z)
    assert torch.equal(found.isfinite(), z.isfinite())
    assert torch.equal(found[:, 1:3].float(), z[:, 1:3])
    assert found[:, 3].eq(torch.finfo(torch.bfloat16).max).all()
    assert found[:, 6].eq(0).all()


def test_the_compiled_rounding_gives_the_same_bits(monkeypatch):
    z = FINITE["spread"]((300, 241), 5)
    assert z.numel() >= COMPILE_FROM
    monkeypatch.setattr(masters, "CHUNK", 100 * 241)
    fast = stored(z)
    slow = stochastic_bf16(z, torch.tensor(update_key(SEED, STEP, INDEX)))
    assert torch.equal(fast.view(torch.int16), slow.view(torch.int16))


def test_any_split_over_ranks_gives_the_same_bits():
    z = FINITE["normal"]((12, 48), 6)
    whole, key = stored(z), update_key(SEED, STEP, INDEX)
    rows = [stored(part, (*key[:3], 5 * i, 0)) for i, part in enumerate(z.split(5))]
    assert torch.equal(torch.cat(rows), whole)
    columns = [stored(part.contiguous(), (*key[:3], 0, 2 * i)) for i, part in enumerate(z.split(16, 1))]
    assert torch.equal(torch.cat(columns, 1), whole)


def test_the_mean_of_the_stored_weight_is_the_weight():
    """n draws of a Bernoulli in units of one BF16 step: five standard deviations of their mean."""
    n = 1 << 16
    for fraction in (1 / 65536, 0.1, 0.5, 0.9):
        low = round(fraction * 65536)
        z = (torch.full((n // 64, 64), 0x3FC00000, dtype=torch.int32) + low).view(torch.float32)
        steps = (stored(z).float() - 1.5) / 2**-7
        assert set(steps.unique().tolist()) <= {0.0, 1.0}
        p = low / 65536
        assert abs(float(steps.mean()) - p) <= 5 * math.sqrt(p * (1 - p) / n)


def test_small_updates_add_up_where_round_to_nearest_loses_them():
    """1000 updates of 1/64 of a BF16 step: their sum deviates by less than sqrt(n p)."""
    ends = {}
    for kind in ("bf16-sr", "bf16-rne"):
        weight = nn.Parameter(torch.full((64, 64), 1.5, dtype=torch.bfloat16))
        weight.grad_dtype = torch.float32
        config = OptimConfig(masters=kind, weight_decay=0.0, grad_clip=None, betas=(0.0, 0.0))
        optimizer = MasterOptimizer({"w": weight}, config, seed=1)
        for step in range(1000):
            weight.grad = torch.full((64, 64), -1.0)  # AdamW without memory moves by lr * sign
            optimizer.step(2**-13, torch.zeros(()), torch.zeros(()), step)
        ends[kind] = weight.detach().float()
    assert ends["bf16-rne"].eq(1.5).all()
    moved, n = (ends["bf16-sr"] - 1.5) / 2**-7, 1000
    assert abs(float(moved.mean()) - n / 64) <= 5 * math.sqrt(n / 64 / moved.numel())


def test_a_skipped_step_changes_no_bit():
    weight = nn.Parameter(torch.randn(40, 24).bfloat16())
    weight.grad_dtype = torch.float32
    optimizer = MasterOptimizer({"w": weight}, OptimConfig(masters="bf16-sr"))
    before = weight.detach().clone()
    weight.grad = torch.full((40, 24), float("nan"))
    optimizer.step(1e-2, torch.zeros(()), torch.zeros(()))
    assert torch.equal(weight.detach(), before)
    assert weight.grad is None


def test_matrices_are_bf16_and_all_gradients_are_fp32(config, data):
    trainer = Trainer(override(config, {"optim.masters": "bf16-sr"}), data, torch.device("cpu"))
    kinds = {name: p.dtype for name, p in trainer.masters.items()}
    assert {name for name, dtype in kinds.items() if dtype == torch.bfloat16} == {
        name for name, p in trainer.masters.items() if p.dim() == 2
    }
    trainer._accumulate_gradients()
    grads = {name: p.grad for name, p in trainer.masters.items()}
    assert all(g is not None and g.dtype == torch.float32 for g in grads.values())
    # A BF16 gradient that was only stored as FP32 would have nothing in its low 16 bits.
    for name in ("embed.weight", "head.weight", "blocks.1.mixer.up_proj.weight"):
        grad = grads[name]
        assert grad is not None
        assert (grad != grad.bfloat16().float()).any(), name


def test_gradients_are_those_of_fp32_masters_with_the_same_values(config, data):
    plain = Trainer(config, data, torch.device("cpu"))
    half = Trainer(override(config, {"optim.masters": "bf16-sr"}), data, torch.device("cpu"))
    with torch.no_grad():
        for name, master in plain.masters.items():
            master.copy_(half.masters[name])
    losses = [trainer._accumulate_gradients() for trainer in (plain, half)]
    assert torch.equal(*losses)
    for name, master in plain.masters.items():
        found = half.masters[name].grad
        assert master.grad is not None
        assert found is not None
        assert torch.equal(master.grad, found), name


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(config, data, tmp_path):
    config = with_vocabulary(override(config, {"optim.masters": "bf16-sr"}), data)
    whole, resumed = (Trainer(config, data, torch.device("cpu")) for _ in range(2))
    for _ in range(2):
        whole.run_step()
    resumed.resume(open_checkpoint(save_checkpoint(tmp_path, 2, whole.tensors(), {})))
    for trainer in (whole, resumed):
        trainer.run_step()
    for file, tensors in whole.tensors().items():
        for name, tensor in tensors.items():
            assert_same_bytes(resumed.tensors()[file][name], tensor, name)


def test_a_run_is_loaded_with_the_masters_it_trained(config, data_cache, tmp_path):
    short = override(config, {"optim.masters": "bf16-sr", "train.steps": 1})
    run(short, tmp_path, data_cache=data_cache)
    assert load_trained(tmp_path).model.head.weight.dtype == torch.bfloat16


def test_the_initial_masters_are_those_of_fp32_rounded(config):
    model, rounded = LanguageModel(config.model), LanguageModel(config.model)
    bf16_masters(rounded)
    for (name, p), q in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(q, p.to(q.dtype)), name
