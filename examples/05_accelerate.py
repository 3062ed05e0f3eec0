"""accelerate, in NVFP4. Run: accelerate launch examples/05_accelerate.py [FOLDER], with --cpu for CPUs

The same command again continues the run in FOLDER, with equal bits.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import fourbits as fb
from fourbits.integrations.accelerate import track

NextToken = importlib.import_module("01_plain_loop").NextToken  # a name with a number needs the long form


def main(folder: str, steps: int = 20) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = NextToken()
    accelerator.print(fb.convert(model, recipe="nvfp4"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(8 * 33).reshape(8, 33) * 5 % 64  # every token has one successor
    loader = DataLoader(tokens, batch_size=2, pin_memory=False)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = track(accelerator, model, max_tokens=2 * 32)  # of a micro-batch of one process
    if Path(folder, "state").exists():
        accelerator.load_state(f"{folder}/state")

    losses: list[float] = []
    while run.step < steps:
        for batch in loader:
            with run.accumulate():  # accelerator.accumulate(model), and set_step
                loss = model(batch[:, :-1], batch[:, 1:])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.save_state(f"{folder}/state")
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "nothing left to train")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
