"""The samples of a run: the one place where its settings become a sample stream."""

from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.stream import PhasedStream
from fourbits.train.config import RunConfig


def run_stream(config: RunConfig, data: PreparedData) -> PhasedStream:
    """The training stream of a run. Raises ValueError for phases that do not fit the data."""
    train = config.train
    return data.stream(
        config.data.phases,
        total_samples=train.num_steps * train.samples_per_step,
        seq_len=train.seq_len,
        seed=train.seed,
        batch_size=train.samples_per_step,
        max_epochs=config.data.max_epochs,
    )
