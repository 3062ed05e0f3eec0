"""torchtitan's own Trainer on one CPU, which it was not written for: no GPU to ask about, no corpus."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # read when torchtitan is imported

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager as ConfigManager  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from fourbits.integrations.torchtitan import FourbitsConverter as FourbitsConverter  # noqa: E402
from fourbits.integrations.torchtitan_trainer import FourbitsTrainer as FourbitsTrainer  # noqa: E402

BATCH, SEQUENCE, STEPS, SAVED_AT = 2, 32, 4, 2
_no_memory = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
_monitor = SimpleNamespace(
    device_name="H100", get_peak_stats=lambda: _no_memory, reset_peak_stats=lambda: None
)
metrics.build_device_memory_monitor = lambda: _monitor
utils.set_pg_timeouts = lambda **_: None  # a barrier that names CUDA devices


class Batches(BaseDataLoader):
    """Tokens of which each has one successor."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        self.next = 0

    def __iter__(self):
        while True:
            tokens = (torch.arange(BATCH * (SEQUENCE + 1)).reshape(BATCH, -1) * 5 + self.next) % 64
            positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE).contiguous()
            self.next += 1
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state_dict):
        self.next = state_dict["next"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        pass

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("the batches are token ids already")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise AssertionError("the batches are token ids already")

    def get_vocab_size(self) -> int:
        return 64


def config(folder: str, *converters: Any) -> Any:
    """A Trainer.Config of the debug model: two blocks, two micro-batches per step."""
    made = llama3_debugmodel()
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for block in spec.model.layers:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    for converter in converters:
        spec.model = converter.build().convert(spec.model)
    made.model_spec, made.dump_folder, made.debug.seed = spec, folder, 0
    made.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    made.dataloader, made.tokenizer = Batches.Config(), NoTokenizer.Config()
    made.training = TrainingConfig(
        local_batch_size=BATCH,
        global_batch_size=2 * BATCH,
        seq_len=SEQUENCE,
        steps=STEPS,
        disable_cuda_graphs=True,
    )
    made.validator.enable, made.checkpoint.enable = False, True
    made.checkpoint.interval, made.checkpoint.keep_latest_k = SAVED_AT, 0
    return made
