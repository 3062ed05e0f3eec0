"""PEFT's adapters on a converted model, and TRL's SFTTrainer around both."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from pathlib import Path
from typing import Any

import pytest
import torch

from fourbits.integrations.pretrained import convert_as_saved
from fourbits.integrations.transformers import FourbitsCallback
from fourbits.linear.audit import audit
from fourbits.linear.conversion import layers_digest
from fourbits.linear.convert import convert
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.roles import plain_name
from fourbits.linear.step import set_step
from support.loops import LENGTH, assert_same_parameters, llama, parameters

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model  # noqa: E402

#: layers of the block
LAYERS = 7
TOKENS = torch.arange(64).reshape(2, LENGTH) * 5 % 64


def lora() -> Any:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def quantized(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("first", ["convert", "peft"])
def test_the_frozen_layers_are_quantized_and_the_adapters_are_not(first):
    model: Any = llama("nvfp4" if first == "convert" else "bf16")
    model = get_peft_model(model, lora())
    if first == "peft":
        convert(model, "nvfp4", keep_last=0)
    names = quantized(model)
    assert len(names) == LAYERS
    assert all(name.endswith(".base_layer") for name in names)
    set_step(model, 0)
    model(TOKENS, labels=TOKENS).loss.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert set(audit(model).called) == names


def test_both_orders_quantize_the_same_layers():
    """So a run may resume in the other one."""
    before = get_peft_model(llama(), lora())
    after = get_peft_model(llama("bf16"), lora())
    convert(after, "nvfp4", keep_last=0)
    assert {plain_name(name) for name in quantized(before)} == {plain_name(name) for name in quantized(after)}
    assert layers_digest(before) == layers_digest(after)


def test_adapters_merge_into_the_master_weights_after_conversion_back():
    model: Any = get_peft_model(llama(), lora())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    convert(model, "bf16")
    with torch.no_grad():
        logits = model(TOKENS).logits
        merged = model.merge_and_unload()
        assert not quantized(merged)
        torch.testing.assert_close(merged(TOKENS).logits, logits)  # W + BA, in another order of sums


def sft(folder: Path, resume: str | None = None) -> Any:
    """A trained SFTTrainer, with LoRA."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = a_tokenizer()
    text = " ".join(f"w{i * 5 % 62}" for i in range(80))
    arguments = trl.SFTConfig(
        str(folder),
        max_length=LENGTH,
        packing=True,
        packing_strategy="wrapped",
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = datasets.Dataset.from_list([{"text": text}] * 12)
    options: dict[str, Any] = {"processing_class": tokenizer, "peft_config": lora()}
    trainer = trl.SFTTrainer(
        llama(), arguments, train_dataset=data, callbacks=[FourbitsCallback()], **options
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def a_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(62)} | {"<end>": 62, "<pad>": 63}
    split = Tokenizer(models.WordLevel(words, unk_token="w0"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=split, eos_token="<end>", pad_token="<pad>")


def test_fine_tuning_by_trl_runs_every_quantized_layer_and_resumes_with_equal_bits(tmp_path):
    first = sft(tmp_path / "first")
    assert len(audit(first.model).called) == LAYERS
    resumed = sft(tmp_path / "second", f"{tmp_path}/first/checkpoint-2")
    assert_same_parameters(resumed.model, parameters(first.model))
    first.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = type(llama()).from_pretrained(tmp_path / "merged")
    convert_as_saved(merged)
    assert len(quantized(merged)) == LAYERS
