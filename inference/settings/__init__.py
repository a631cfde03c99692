"""Settings of decoding and measuring; they do not import torch, so that mistakes are reported quickly."""
