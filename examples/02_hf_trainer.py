"""A Hugging Face model and Trainer, in NVFP4. Run: python examples/02_hf_trainer.py [FOLDER]

The same command again resumes from the newest checkpoint in FOLDER, with equal bits.
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import fourbits as fb
from fourbits.integrations.pretrained import convert_as_saved
from fourbits.integrations.transformers import FourbitsCallback

SEQUENCE = 32
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)


def main(folder: str, steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    print(fb.convert(model, recipe="nvfp4"))
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
    )
    text = torch.arange(SEQUENCE) * 5 % 64
    data = [{"input_ids": text, "labels": text}] * 8
    callback = FourbitsCallback(max_tokens=2 * SEQUENCE)  # of a micro-batch of one process
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    trainer.save_model(folder)  # master weights; config.json has the recipe

    loaded = AutoModelForCausalLM.from_pretrained(folder)  # works without fourbits, too
    print(convert_as_saved(loaded))  # and is quantized as it was trained
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
