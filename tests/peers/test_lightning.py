"""Lightning's Trainer with the callback: positions, equal bits after a resume, and wrong resumes."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from support.examples import example
from support.loops import HISTORY, LENGTH, assert_same_parameters, llama, noted_positions, parameters, rows

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings(
        "ignore::UserWarning:lightning",
        "ignore::FutureWarning",
        "ignore:.*LeafSpec",
        "ignore:Checkpoint directory|The dirpath has changed",
    ),
]
pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer, seed_everything  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from fourbits.integrations.lightning import FourbitsCallback  # noqa: E402

#: two epochs of four batches; saved in the middle of the second
STEPS, SAVED_AT = 4, 3


class Batches:
    """A loader that Lightning resumes in the middle of an epoch; others begin the epoch again."""

    def __init__(self, samples: int):
        data: Any = rows(samples)
        self.batches, self.next = list(DataLoader(data, batch_size=2)), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.next < len(self):
            self.next += 1
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Module(LightningModule):
    def __init__(self, recipe: Any = "nvfp4"):
        super().__init__()
        self.model = llama(recipe)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, module: Module, *callbacks: Any, samples: int = 8, resume: Any = None) -> None:
    seed_everything(0, verbose=False)
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_steps=STEPS, accumulate_grad_batches=2, accelerator="cpu", callbacks=[*callbacks, save], **options
    )
    trainer.fit(module, Batches(samples), ckpt_path=resume)


@pytest.fixture(scope="module", params=["nvfp4", HISTORY], ids=["nvfp4", "history"])
def undisturbed(request, tmp_path_factory):
    """The recipe of a run, a checkpoint in it, the positions that it announced, and its weights."""
    folder, module = tmp_path_factory.mktemp("run"), Module(request.param)
    with pytest.MonkeyPatch.context() as patch:
        calls = noted_positions(patch)
        fit(folder, module, FourbitsCallback(2 * LENGTH))
    return request.param, folder / f"step={SAVED_AT}.ckpt", calls, parameters(module)


def test_positions_follow_the_accumulation(undisturbed):
    *_, calls, _ = undisturbed
    assert calls == [(step, first) for step in range(STEPS) for first in (0, 2 * LENGTH)]


def test_positions_follow_a_shorter_accumulation_at_the_end_of_an_epoch(tmp_path, monkeypatch):
    calls = noted_positions(monkeypatch)
    fit(tmp_path, Module(), FourbitsCallback(2 * LENGTH), samples=6)
    assert calls == [(0, 0), (0, 2 * LENGTH), (1, 0), (2, 0), (2, 2 * LENGTH), (3, 0)]


def test_a_resumed_run_has_equal_bits(undisturbed, tmp_path, monkeypatch):
    recipe, checkpoint, calls, weights = undisturbed
    again, module = noted_positions(monkeypatch), Module(recipe)
    fit(tmp_path, module, FourbitsCallback(2 * LENGTH), resume=checkpoint)
    assert again == calls[2 * SAVED_AT :]
    assert_same_parameters(module, weights)


def test_a_resume_with_another_recipe_is_an_error_or_on_request_a_warning(undisturbed, tmp_path):
    _, checkpoint, *_ = undisturbed
    with pytest.raises(ValueError, match="the model has mxfp8"):
        fit(tmp_path, Module("mxfp8"), FourbitsCallback(2 * LENGTH), resume=checkpoint)
    with pytest.warns(UserWarning, match="quantize differently"):
        fit(tmp_path, Module("mxfp8"), FourbitsCallback(2 * LENGTH, strict=False), resume=checkpoint)


def test_a_checkpoint_from_before_the_callback_warns(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # that set_step was never called, once per process
        fit(tmp_path, Module(), samples=4)
    with pytest.warns(UserWarning, match="no recipe recorded"):
        fit(tmp_path, Module(), FourbitsCallback(2 * LENGTH), resume=tmp_path / "step=2.ckpt")


def test_more_tokens_than_said_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=f"Pass max_tokens={2 * LENGTH}"):
        fit(tmp_path, Module(), FourbitsCallback(LENGTH))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_learns_and_continues_where_it_stopped(tmp_path):
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module = example("06_lightning")
    losses = module.main(str(tmp_path), steps=8, **options)
    assert losses[-1] < 0.5 * losses[0]
    assert module.main(str(tmp_path), steps=8, **options) == []
