"""Any PyTorch model, one line: its linears train in NVFP4. Run: python examples/01_plain_loop.py"""

import torch
from torch import Tensor, nn

import fourbits as fb


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))).square())


class NextToken(nn.Module):
    """Predicts a token from the one before it; returns the loss."""

    def __init__(self, vocabulary: int = 64, width: int = 32, blocks: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def main(steps: int = 20, micro_batches: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    print(fb.convert(model, recipe="nvfp4"))  # parameters stay the same objects: the optimizer stays valid
    tokens = torch.arange(4 * 33).reshape(4, 33) * 5 % 64  # every token has one successor
    losses = []
    for step in range(steps):
        losses.append(0.0)
        for index, batch in enumerate(tokens.chunk(micro_batches)):
            # noise is a function of (step, token): the same for any number of ranks and micro-batches;
            # after the first micro-batch the weights are those of before, so their operands serve again
            fb.set_step(model, step, first_token=index * batch[:, 1:].numel(), same_weights=index > 0)
            loss = model(batch[:, :-1], batch[:, 1:]) / micro_batches
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
