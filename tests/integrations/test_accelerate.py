"""A loop of accelerate: positions, equal bits after load_state, and states that do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from fourbits.integrations.accelerate import Run, track
from support.loops import HISTORY, LENGTH, assert_same_parameters, llama, noted_positions, parameters, rows

#: of one epoch, in 7 micro-batches: the last step has one
STEPS, SAVED_AT, BATCHES = 4, 2, 7


class Loop:
    """A prepared Llama, its optimizer, and shuffled batches."""

    def __init__(self, model: Any, tokens: int | None = 2 * LENGTH, **options: Any):
        set_seed(0)
        order = DataLoaderConfiguration(use_seedable_sampler=True)  # which a resumed run repeats
        self.accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, dataloader_config=order)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data: Any = rows(2 * BATCHES)
        loader = DataLoader(data, batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        if tokens is not None:
            self.run: Run = track(self.accelerator, self.model, tokens, **options)

    def train(self, until: int = STEPS, seen: int = 0, save: Path | None = None) -> None:
        for batch in self.accelerator.skip_first_batches(self.loader, seen):
            with self.run.accumulate():
                self.accelerator.backward(self.model(**batch).loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if save is not None and self.run.step == SAVED_AT and self.accelerator.sync_gradients:
                self.accelerator.save_state(str(save))
            if self.run.step == until and self.accelerator.sync_gradients:
                return


@pytest.fixture(scope="module", params=["nvfp4", HISTORY], ids=["nvfp4", "history"])
def undisturbed(request, tmp_path_factory):
    """The recipe of a run, its checkpoint, the positions that it announced, and its weights."""
    folder, model = tmp_path_factory.mktemp("run"), llama(request.param)
    with pytest.MonkeyPatch.context() as patch:
        calls = noted_positions(patch)
        loop = Loop(model)
        loop.train(save=folder / "state")
    assert loop.run.step == STEPS
    return request.param, folder / "state", calls, parameters(model)


def test_positions_follow_the_accumulation_to_the_end_of_the_loader(undisturbed):
    *_, calls, _ = undisturbed
    both = [(step, first) for step in range(STEPS) for first in (0, 2 * LENGTH)]
    assert calls == both[:BATCHES]


def test_a_loaded_state_continues_with_equal_bits(undisturbed, monkeypatch):
    recipe, state, calls, weights = undisturbed
    model = llama(recipe)
    loop, again = Loop(model), noted_positions(monkeypatch)
    loop.accelerator.load_state(str(state))
    assert loop.run.step == SAVED_AT
    loop.train(seen=2 * SAVED_AT)
    assert again == calls[2 * SAVED_AT :]
    assert_same_parameters(model, weights)


def test_a_state_saved_inside_accumulate_continues_at_the_next_step(tmp_path):
    loop = Loop(llama())
    for batch in loop.loader:
        with loop.run.accumulate():
            loop.accelerator.backward(loop.model(**batch).loss)
            loop.optimizer.step()
            if loop.accelerator.sync_gradients:
                loop.accelerator.save_state(str(tmp_path / "state"))
                break
    other = Loop(llama())
    other.accelerator.load_state(str(tmp_path / "state"))
    assert other.run.step == 1


def test_a_state_of_another_recipe_is_an_error_or_on_request_a_warning(undisturbed):
    _, state, *_ = undisturbed
    with pytest.raises(ValueError, match="the model has mxfp8"):
        Loop(llama("mxfp8")).accelerator.load_state(str(state))
    with pytest.warns(UserWarning, match="quantize differently"):
        Loop(llama("mxfp8"), strict=False).accelerator.load_state(str(state))


def test_a_state_from_before_track_is_an_error(tmp_path):
    Loop(llama(), tokens=None).accelerator.save_state(str(tmp_path / "state"))
    with pytest.raises(RuntimeError, match="number of registered objects"):
        Loop(llama()).accelerator.load_state(str(tmp_path / "state"))


def test_more_tokens_than_said_are_an_error():
    with pytest.raises(ValueError, match=f"Pass max_tokens={2 * LENGTH}"):
        Loop(llama(), tokens=LENGTH).train()
