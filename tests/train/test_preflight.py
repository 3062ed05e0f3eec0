"""Settings that no text can make valid are refused before any text is prepared."""

import pytest
import torch

from fourbits.settings import override
from fourbits.train.listener import RunListener
from fourbits.train.parallel import micro_batches
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.ranks.tensor_parallel import TensorRanks, split_layers
from fourbits.train.run import run


class Prepared(RunListener):
    """Notes that text is prepared."""

    seen = False

    def preparing(self, *args):
        self.seen = True


class TwoRanks(Ranks):
    """The first of two ranks, which have the micro-batches of a step, or the layers of a model, in common."""

    def __init__(self, tensor):
        super().__init__(torch.device("cpu"))
        self.tensor = tensor

    def micro_batches(self, accumulation):
        return micro_batches(accumulation, 0, 2 // self.tensor, self.tensor)

    def require_alone(self, what, instead):
        raise ValueError(f"{what} is for one process. Set it to {instead}.")

    def check_model(self, model):
        if self.tensor > 1:
            split_layers(model, TensorRanks(None, 0, self.tensor))


LATE = {"name": "late", "start": 0.5, "layers": ["decoder.*"], "precision": "bf16"}


@pytest.mark.parametrize(
    ("changes", "tensor", "match"),
    [
        ({"recipe.schedule": [LATE]}, None, r"schedule\.layers must match a linear layer"),
        ({"train.gradient_accumulation": 3}, 1, r"must be a multiple of the number of ranks, 2"),
        ({"optim.masters": "bf16-sr"}, 1, r"optim\.masters bf16"),
        ({"recipe.fprop.lhs.error_feedback": 64}, 1, r"error_feedback is for one process"),
        ({"recipe.sums": "sm_100"}, 2, r"sums modelled on tensor cores"),
        ({"train.compile": "model"}, 2, r"train\.compile model"),
    ],
)
def test_settings_are_refused_before_text_is_prepared(config, tmp_path, changes, tensor, match):
    ranks = None if tensor is None else TwoRanks(tensor)
    listener = Prepared()
    with pytest.raises(ValueError, match=match):
        run(override(config, changes), tmp_path / "run", listener=listener, ranks=ranks)
    assert not listener.seen
    assert not (tmp_path / "run").exists()
