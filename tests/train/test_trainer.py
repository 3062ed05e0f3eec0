"""One step: its samples, the scale of its gradients, and non-finite values."""

import math
from dataclasses import replace

import pytest
import torch

from fourbits.recipe.presets import get_recipe
from fourbits.train import trainer as trainer_module
from fourbits.train.non_finite import NonFiniteError
from fourbits.train.opening import with_vocabulary
from fourbits.train.trainer import MAX_SKIPPED_IN_A_ROW, Trainer

CPU = torch.device("cpu")


@pytest.fixture
def make(config, data):
    def build(recipe="bf16", **train):
        changed = replace(config, recipe=get_recipe(recipe), train=replace(config.train, **train))
        return Trainer(with_vocabulary(changed, data), data, CPU)

    return build


def gradients(trainer):
    trainer._accumulate_gradients()
    return {name: p.grad.clone() for name, p in trainer.masters.items()}


def test_the_vocabulary_is_the_tokenizers_unless_the_run_sets_a_larger_one(config, data):
    own = data.tokenizer.vocab_size
    for setting, vocabulary in ((0, own), (own - 128, own), (own + 128, own + 128)):
        changed = replace(config, data=replace(config.data, model_vocab_size=setting))
        trainer = Trainer(with_vocabulary(changed, data), data, CPU)
        assert trainer.model.head.weight.shape[0] == vocabulary
        assert trainer.check(trainer.run_step()).loss < 1.1 * math.log(vocabulary)


def test_the_loss_of_a_step_is_the_mean_over_all_its_tokens(make):
    trainer = make()
    samples = torch.from_numpy(trainer.stream.batch(0, 4))
    with torch.no_grad():
        nats, tokens = trainer.model.loss(samples[:, :-1], samples[:, 1:])
    assert int(tokens) == 4 * 32
    result = trainer.check(trainer.run_step())
    # The mean of FP32 sums in another order; the model's BF16 roundings are the same.
    assert result.loss == pytest.approx(float(nats) / 128, rel=2**-16)


def test_masked_documents_end_where_the_tokenizer_says(make, config, data):
    assert make().model.config.document_end is None
    masking = replace(config, data=replace(config.data, mask_documents=True))
    trainer = Trainer(with_vocabulary(masking, data), data, CPU)
    assert trainer.model.config.document_end == data.tokenizer.end_id


def test_accumulation_gives_the_gradient_of_one_large_micro_batch(make):
    split = gradients(make(micro_batch_size=1, gradient_accumulation=4))
    whole = gradients(make(micro_batch_size=4, gradient_accumulation=1))
    for name, gradient in split.items():
        assert gradient.dtype == torch.float32
        # Half a BF16 unit: per-token roundings are alike, sums over tokens are FP32.
        assert (gradient - whole[name]).norm() <= 2**-9 * whole[name].norm(), name


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_recomputed_blocks_have_the_same_bits(make, recipe):
    kept, again = make(recipe), make(recipe, activation_checkpointing="full")
    runs = []
    again.model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    expected = gradients(kept)
    for name, gradient in gradients(again).items():
        assert torch.equal(gradient, expected[name]), name
    assert len(runs) == 2 * again.config.train.gradient_accumulation


def test_the_counter_of_random_bits_follows_step_and_token(make, monkeypatch):
    seen = []
    monkeypatch.setattr(
        trainer_module,
        "set_step",
        lambda model, step, first_token, reduce, same_weights: seen.append((step, first_token, same_weights)),
    )
    trainer = make()
    for _ in range(2):
        trainer.run_step()
    assert seen == [(0, 0, False), (0, 64, True), (1, 0, False), (1, 64, True)]


def test_a_step_reads_the_next_samples_of_the_stream(make, monkeypatch):
    trainer = make()
    reads = []
    read = trainer.stream.batch
    monkeypatch.setattr(
        trainer.stream, "batch", lambda first, count: reads.append((first, count)) or read(first, count)
    )
    for _ in range(2):
        trainer.run_step()
    assert reads == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_data_seconds_are_those_of_the_steps_own_samples(make, monkeypatch):
    trainer = make()
    clock = [0.0]

    def read(first, count, read=trainer.stream.batch):
        clock[0] += first + 1  # seconds
        return read(first, count)

    monkeypatch.setattr(trainer.stream, "batch", read)
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: clock[0])
    seconds = [trainer.check(trainer.run_step()).data_seconds for _ in range(2)]
    assert seconds == [1 + 3, 5 + 7]  # two micro-batches of two samples each


def test_the_loss_falls(make):
    trainer = make("nvfp4", steps=40)
    losses = [trainer.check(trainer.run_step()).loss for _ in range(40)]
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0


def make_weight_nan(trainer):
    with torch.no_grad():
        trainer.masters["blocks.1.mixer.up_proj.weight"][0, 0] = float("nan")


def make_gradient_infinite(trainer):
    trainer.masters["blocks.0.mixer.out_proj.weight"].register_hook(lambda grad: grad * float("inf"))


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_non_finite_loss_names_step_and_first_layer(make, recipe):
    trainer = make(recipe)
    trainer.check(trainer.run_step())
    make_weight_nan(trainer)
    with pytest.raises(NonFiniteError) as error:
        trainer.check(trainer.run_step())
    assert "step 2: the loss is nan" in str(error.value)
    assert "first in the output of blocks.1.mixer.up_proj" in str(error.value)


def test_a_non_finite_gradient_names_step_and_parameter(make):
    trainer = make()
    make_gradient_infinite(trainer)
    with pytest.raises(
        NonFiniteError, match=r"step 1: the gradient of blocks\.0\.mixer\.out_proj\.weight is not finite"
    ):
        trainer.check(trainer.run_step())


def test_after_a_non_finite_step_no_later_step_updates_before_the_host_knows(make):
    trainer = make()
    before = {name: p.detach().clone() for name, p in trainer.masters.items()}
    handle = trainer.masters["norm.weight"].register_hook(lambda grad: grad * float("nan"))
    bad = trainer.run_step()
    handle.remove()
    trainer.run_step()
    assert all(torch.equal(p, before[name]) for name, p in trainer.masters.items())
    with pytest.raises(NonFiniteError, match=r"step 1: the gradient of norm\.weight"):
        trainer.check(bad)


def test_skip_skips_one_step_and_continues(make):
    trainer = make(non_finite="skip")
    handle = trainer.masters["norm.weight"].register_hook(lambda grad: grad * float("nan"))
    before = {name: p.detach().clone() for name, p in trainer.masters.items()}
    assert trainer.check(trainer.run_step()).skipped
    assert all(torch.equal(p, before[name]) for name, p in trainer.masters.items())
    handle.remove()
    assert not trainer.check(trainer.run_step()).skipped
    assert not torch.equal(trainer.masters["norm.weight"], before["norm.weight"])


def test_skip_gives_up_on_a_run_that_does_not_recover(make):
    trainer = make(non_finite="skip")
    make_gradient_infinite(trainer)
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        assert trainer.check(trainer.run_step()).skipped
    with pytest.raises(NonFiniteError, match=f"after {MAX_SKIPPED_IN_A_ROW - 1} skipped steps in a row"):
        trainer.check(trainer.run_step())


def test_validation_changes_neither_mode_nor_the_next_step(make):
    one, other = make("nvfp4"), make("nvfp4")
    first = one.validate()
    assert one.model.training
    assert set(first) == {"loss", "notes", "letters"}
    assert first["loss"].tokens == sum(first[name].tokens for name in ("notes", "letters"))
    for trainer in (one, other):
        trainer.check(trainer.run_step())
    assert all(torch.equal(p, other.masters[name]) for name, p in one.masters.items())


def test_recipes_start_from_the_same_weights_and_read_the_same_samples(make):
    one, other = make("bf16"), make("nvfp4")
    assert all(torch.equal(p, other.masters[name]) for name, p in one.masters.items())
    assert (one.stream.batch(0, 8) == other.stream.batch(0, 8)).all()
    assert one.conversion.share_of_linears == 0
    assert other.conversion.share_of_linears > 0
