"""torchtitan: the converter in its config system, and its Trainer, which resumes with equal bits."""

import os
import shutil
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from fourbits.linear.audit import audit
from fourbits.linear.module import QuantizedLinear
from support.examples import EXAMPLES
from support.loops import noted_positions
from support.two_processes import results_of

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore:fourbits")]
pytest.importorskip("torchtitan")

from support import titan  # noqa: E402
from support.titan import FourbitsConverter, FourbitsTrainer  # noqa: E402

TOKENS = titan.BATCH * titan.SEQUENCE


@pytest.fixture(scope="module", autouse=True)
def one_process():
    where = {
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in where.items():
            patch.setitem(os.environ, name, value)
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trainer(folder: Path, recipe: str = "nvfp4", **options: Any) -> Any:
    config = titan.config(str(folder), FourbitsConverter.Config(recipe=recipe, options=options))
    return FourbitsTrainer.Config.of(config).build()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def test_the_converter_converts_the_model_that_the_registry_builds(tmp_path):
    plain = titan.config(str(tmp_path)).model_spec.model
    converted = FourbitsConverter.Config(options={"exclude": ["*.wo"]}).build().convert(plain)
    assert isinstance(converted, type(plain))
    assert all(getattr(converted, f.name) is getattr(plain, f.name) for f in fields(plain) if f.init)
    with torch.device("meta"):
        model = converted.build()
    model.verify_module_protocol()
    quantized = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    layers = ("attention.qkv_linear.wqkv", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    assert sorted(quantized) == [f"layers.0.{name}" for name in layers]  # layers.1 is the last block
    with torch.device("meta"):
        assert not any(isinstance(module, QuantizedLinear) for module in plain.build().modules())


def test_torchtitans_command_finds_the_config_of_the_example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    arguments = ["--module", "07_torchtitan", "--config", "debug", "--training.steps", "4"]
    config = titan.ConfigManager().parse_args(arguments)
    assert type(config) is FourbitsTrainer.Config
    assert config.training.steps == 4
    assert config.model_spec is not None
    with torch.device("meta"):
        model = config.model_spec.model.build()
    quantized = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(quantized) == 5 * 4  # the last of six blocks stays in BF16, and each wo
    assert not any(name.endswith("wo") for name in quantized)


def test_the_trainer_announces_micro_batches_runs_every_layer_and_resumes_with_equal_bits(
    tmp_path, monkeypatch
):
    calls = noted_positions(monkeypatch)
    first = trainer(tmp_path)
    first.train()
    assert calls == [(step, tokens) for step in range(titan.STEPS) for tokens in (0, TOKENS)]
    report = audit(first.model_parts[0])
    assert len(report.called) == 5
    assert report.bypassed == report.unused == ()
    first.close()

    shutil.rmtree(tmp_path / "checkpoint" / f"step-{titan.STEPS}")
    del calls[:]
    second = trainer(tmp_path)
    second.train()
    assert calls[0] == (titan.SAVED_AT, 0)
    pairs = zip(weights(second.model_parts[0]), weights(first.model_parts[0]), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    second.close()

    shutil.rmtree(tmp_path / "checkpoint" / f"step-{titan.STEPS}")
    with pytest.raises(ValueError, match="the model has mxfp8"):
        trainer(tmp_path, "mxfp8").train()


def test_a_checkpoint_of_torchtitans_own_trainer_is_refused(tmp_path):
    plain = titan.config(str(tmp_path), FourbitsConverter.Config())
    plain.build().train()
    shutil.rmtree(tmp_path / "checkpoint" / f"step-{titan.STEPS}")
    with pytest.raises(CheckpointException, match=r"Missing key .* train_state\.fourbits"):
        trainer(tmp_path).train()


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("training", "disable_cuda_graphs", False),
        ("parallelism", "pipeline_parallel_degree", 2),
    ],
)
def test_a_setting_that_converted_layers_do_not_support_is_refused(part, setting, value, tmp_path):
    config = FourbitsTrainer.Config.of(titan.config(str(tmp_path), FourbitsConverter.Config()))
    setattr(getattr(config, part), setting, value)
    with pytest.raises(ValueError, match=rf"{part}\.{setting} must be .*, got {value}\. Set it"):
        FourbitsTrainer(config)


def test_tensor_parallelism_needs_a_backend_whose_weights_are_dtensors(tmp_path):
    config = FourbitsTrainer.Config.of(titan.config(str(tmp_path), FourbitsConverter.Config()))
    config.parallelism.tensor_parallel_degree = 2
    message = r"parallelism\.spmd_backend must be partial_dtensor, got spmd_types\. Set it"
    with pytest.raises(ValueError, match=message):
        FourbitsTrainer(config)


def test_two_ranks_share_layers_and_resume_with_equal_bits(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    for found in results_of(Path(__file__).with_name("two_ranks_titan.py"), tmp_path):
        assert found["called"] == 5
        assert not found["bypassed"]
        assert found["losses"][-1] < 0.95 * found["losses"][0]
        assert found["resumed steps"] == titan.STEPS - titan.SAVED_AT
        assert found["same bits"]
