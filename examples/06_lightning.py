"""Lightning, in NVFP4. Run: python examples/06_lightning.py [FOLDER]

The same command again continues the run in FOLDER.
"""

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

import fourbits as fb
from fourbits.integrations.lightning import FourbitsCallback

NextToken = importlib.import_module("01_plain_loop").NextToken  # a name with a number needs the long form


class Pretraining(LightningModule):
    def __init__(self, recipe: str = "nvfp4"):
        super().__init__()
        self.model = NextToken()
        self.losses: list[float] = []
        print(fb.convert(self.model, recipe))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(batch[:, :-1], batch[:, 1:])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str, steps: int = 20, **options: Any) -> list[float]:
    seed_everything(0)
    tokens = torch.arange(8 * 33).reshape(8, 33) * 5 % 64  # every token has one successor
    loader = DataLoader(tokens, batch_size=2)  # pyright: ignore[reportArgumentType]
    callback = FourbitsCallback(max_tokens=2 * 32)  # of a micro-batch of one process
    save = ModelCheckpoint(folder, save_last=True)
    every: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "logger": False}
    trainer = Trainer(max_steps=steps, callbacks=[callback, save], **every, **options)
    last = Path(folder, "last.ckpt")
    module = Pretraining()
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)
    return module.losses


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
