"""Checkpoints of torch.distributed.checkpoint (DCP), read without running their code."""
