"""Load the trained model of a run: the masters of its newest good checkpoint, converted to its recipe."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fourbits.data.tokenizer import Tokenizer
from fourbits.linear.checkpoint_state import load_recipe_state, recipe_state
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.model.lm import LanguageModel
from fourbits.train.checkpoint import load_tensors
from fourbits.train.config import RunConfig
from fourbits.train.masters import bf16_masters
from fourbits.train.run_folder import RunFolder, read_json


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, in evaluation mode. step: the number of steps it was trained for."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    step: int


def load_trained(path: Path | str, device: torch.device | str = "cpu") -> Trained:
    """Load the newest checkpoint of a run; of a run that ended non-finite, the last good one.

    Raises ValueError if there is none or it is damaged.
    """
    folder = RunFolder(Path(path))
    if not folder.config.is_file():
        raise ValueError(
            f"{path}: not a run folder (no {folder.config.name}). Pass a folder written by fourbits train."
        )
    config = folder.stored_config()
    checkpoint = folder.good_checkpoint()
    if checkpoint is None:
        raise ValueError(f"{path}: the run has no checkpoint yet. Continue it until it saves one.")
    model = LanguageModel(config.model, seed=config.train.seed)
    if config.optim.masters != "fp32":
        bf16_masters(model)
    convert(model, config.recipe, seed=config.train.seed)
    masters = dict(model.named_parameters())
    saved = load_tensors(checkpoint, "model", masters)
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(saved[name])
    if state := recipe_state(model):
        load_recipe_state(model, load_tensors(checkpoint, "recipe", state))
    set_step(model, checkpoint.step)
    end_token = read_json(folder.manifest)["data"]["tokenizer"]["end_token"]
    tokenizer = Tokenizer.load(folder.tokenizer, end_token)
    return Trained(model.to(device).eval(), tokenizer, config, checkpoint.step)
