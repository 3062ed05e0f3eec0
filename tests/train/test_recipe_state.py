"""A recipe that remembers its operands continues from a checkpoint as if it had not been stopped."""

from dataclasses import replace

import torch

from assertions import assert_same_bytes
from fourbits.quant.philox import ROLES
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from fourbits.train.checkpoint import open_checkpoint, save_checkpoint
from fourbits.train.run import with_vocabulary
from fourbits.train.trainer import Trainer


def test_a_resumed_run_uses_the_amaxes_and_layouts_of_the_one_before(config, data, tmp_path):
    changes = {f"{role}.amax_policy": "history" for role in ROLES[:6]}
    changes |= {"fprop.rhs.adaptive": "block", "dgrad.rhs.adaptive": "block"}
    changed = replace(config, recipe=override(get_recipe("nvfp4"), changes))
    whole, resumed = (Trainer(with_vocabulary(changed, data), data, torch.device("cpu")) for _ in range(2))
    for _ in range(2):
        whole.run_step()
    folder = save_checkpoint(tmp_path, 2, whole.tensors(), {})
    resumed.resume(open_checkpoint(folder))
    for trainer in (whole, resumed):
        trainer.run_step()
    for file, tensors in whole.tensors().items():
        for name, tensor in tensors.items():
            assert_same_bytes(resumed.tensors()[file][name], tensor, name)
    assert whole.tensors()["recipe"]["step"] == 2
