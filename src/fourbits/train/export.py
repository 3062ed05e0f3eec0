"""Export the trained model of a run, with its tokenizer and its recipe, for Hugging Face transformers."""

from pathlib import Path

import torch

from fourbits.exchange.folder import save_hf
from fourbits.recipe.provenance import provenance
from fourbits.train.load_run import Trained


def export_trained(run: Trained, folder: Path | str, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a run's masters, rounded to dtype, for AutoModelForCausalLM and AutoTokenizer.

    The weights are not quantized; config.json records the recipe under `fourbits`. Raises ValueError and
    OSError as `save_hf` does.
    """
    save_hf(
        run.model.state_dict(),
        run.config.model,
        folder,
        dtype=dtype,
        tokenizer=run.tokenizer,
        provenance=provenance(run.config.recipe),
    )
