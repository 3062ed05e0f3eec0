"""The ops between a Mamba-2 mixer's projections: convolution, SSD scan and gated norm, each with kernels."""
