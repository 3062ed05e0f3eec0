"""A Hugging Face model and Trainer, in NVFP4. Run: python examples/02_hf_trainer.py [FOLDER]"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import fourbits as fb

SEQUENCE = 32
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)


class SetStep(TrainerCallback):
    """Tells the model's linears where the run stands, before every micro-batch."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.announce(args, state, model, micro_batch=0)

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self.announce(args, state, model, self.micro_batch + 1)

    def announce(self, args, state, model, micro_batch):
        self.micro_batch = micro_batch
        number = micro_batch * args.world_size + args.process_index
        tokens = args.per_device_train_batch_size * SEQUENCE
        fb.set_step(model, state.global_step, first_token=number * tokens)


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
        report_to=[],
    )
    text = torch.arange(SEQUENCE) * 5 % 64
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": text, "labels": text}] * 8)
    trainer.add_callback(SetStep())
    trainer.train()
    trainer.save_model(folder)  # plain weights: LlamaForCausalLM.from_pretrained(folder) reads them
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
