"""The language model: embedding, blocks by pattern, final norm, head, and the loss over tokens."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourbits.model.blocks import make_block
from fourbits.model.config import ModelConfig
from fourbits.model.documents import document_numbers
from fourbits.model.embedding import Embedding
from fourbits.model.init import initialize
from fourbits.model.layers import RMSNorm
from fourbits.model.linear import Linear
from fourbits.model.loss import IGNORED, chunk_length, chunk_limit, chunked_loss, summed_cross_entropy
from fourbits.model.regions import RegionModule

RESIDUAL_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class LanguageModel(RegionModule):
    """A decoder over tokens, initialized from `seed` (on the meta device, not initialized).

    Parameters are FP32 master weights. Activations have compute_dtype; the residual stream between blocks has
    the wider of compute_dtype and the configuration's residual_dtype. With recompute_blocks, a training
    forward saves only a block's input, and the backward pass recomputes the block, with the same bits; with
    recompute_every N, only in the first of every N blocks.
    """

    recompute_blocks = False
    recompute_every = 1
    #: (index, count): the part of every sequence, of `count` equal ones, that this rank has outside mixers
    sequence_part = (0, 1)

    def __init__(
        self, config: ModelConfig, *, compute_dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.residual_dtype = torch.promote_types(compute_dtype, RESIDUAL_DTYPES[config.residual_dtype])
        # from_pretrained uses the empty table directly; nn.Embedding() would fill it first.
        table = torch.empty(config.vocab_size, config.d_model, dtype=torch.float32)
        self.embed = Embedding.from_pretrained(table, freeze=False)
        self.blocks = nn.ModuleList(make_block(letter, config, compute_dtype) for letter in config.pattern)
        self.norm = RMSNorm(config.d_model, config.norm_eps, compute_dtype)
        self.head = Linear(config.d_model, config.vocab_size)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        if not self.embed.weight.is_meta:
            initialize(self, config, seed)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens: [B, T] int64 -> the input of the head, [B, T, D] in compute_dtype; of own tokens only."""
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"The model accepts at most max_seq_len = {self.config.max_seq_len} tokens, "
                f"got {tokens.shape[1]}. Shorten them or raise model.max_seq_len."
            )
        end = self.config.document_end
        documents = None if end is None else document_numbers(tokens, end)
        x = self.embed(self._own(tokens)).to(self.residual_dtype)
        for index, block in enumerate(self.blocks):
            x = self._run_block(index, block, x, documents)
        return self.norm(x)

    def share_tokens(self, rank: int, ranks: int) -> None:
        """Divide each sequence among ranks, whose mixers exchange tokens; each computes its tokens' loss."""
        self.sequence_part = rank, ranks

    def _own(self, tokens: Tensor) -> Tensor:
        """This rank's part of tokens [B, T]."""
        part, parts = self.sequence_part
        return tokens if parts == 1 else tokens.chunk(parts, 1)[part]

    def _run_block(self, index: int, block: nn.Module, x: Tensor, documents: Tensor | None) -> Tensor:
        recomputes = self.recompute_blocks and index % self.recompute_every == 0
        if not (recomputes and torch.is_grad_enabled()):
            return block(x, documents)
        # Nothing here draws from PyTorch's generators, so their state need not be saved.
        return checkpoint(block, x, documents, use_reentrant=False, preserve_rng_state=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [B, T, V] in compute_dtype for tokens [B, T]; with targets [B, T], the result of `loss`.

        If ranks share a sequence, each has only its own tokens.
        """
        hidden = self.hidden(tokens)
        if targets is None:
            return self.head(hidden)
        rows, targets = hidden.flatten(0, 1), self._own(targets).flatten()
        length = chunk_length(len(rows), self.config.vocab_size, chunk_limit(rows.device))
        return chunked_loss(self._loss_of, self.head, rows, targets, length), (targets != IGNORED).sum()

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropy over tokens (nats, FP32 scalar), and the number of tokens in it.

        tokens, targets: [B, T] int64; targets of -100 are ignored, and others outside the vocabulary make the
        sum NaN. Calls __call__, so that hooks of wrappers (data parallel, FSDP) run. Can be differentiated
        once.
        """
        return self(tokens, targets)

    def _loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.run(summed_cross_entropy, self.head(hidden), targets)
