"""Speed of quantizers, linear layers, SSD scan, training steps and data, as ratios within one run."""
