"""Plants a flipped bit in computations of a run, as a faulty device would.

As a script: the faulty rank, the numbers of its faulty computations and the words of a command line, which it
runs.
"""

import sys
from contextlib import contextmanager

import torch

from fourbits.train.trainer import Trainer

#: of a BF16 element
BIT = 1 << 4


def flipped(tensor):
    """The tensor with another bit in its first element."""
    changed = tensor.detach().clone()
    changed.view(torch.int16).view(-1)[0] ^= BIT
    return tensor + (changed - tensor).detach()


@contextmanager
def fault_in_forward(model):
    """The output of the final norm has a flipped bit."""
    handle = model.norm.register_forward_hook(lambda module, args, output: flipped(output))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def fault_in_backward(model):
    """The gradient of the second block's first weight has a flipped bit."""
    weight = model.blocks[1].mixer.up_proj.weight
    handle = weight.register_hook(lambda grad: flipped(grad))
    try:
        yield
    finally:
        handle.remove()


def with_faults(rank, computations, fault=fault_in_forward):
    """Trainer.digests with a fault in some of a rank's computations, counted from 1."""
    digests, count = Trainer.digests, [0]

    def faulty(self):
        count[0] += 1
        if self.ranks.rank != rank or count[0] not in computations:
            return digests(self)
        with fault(self.model):
            return digests(self)

    return faulty


if __name__ == "__main__":
    from fourbits.cli.main import main

    Trainer.digests = with_faults(int(sys.argv[1]), {int(n) for n in sys.argv[2].split(",")})
    sys.exit(main(sys.argv[3:]))
