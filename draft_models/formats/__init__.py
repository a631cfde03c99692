"""Model formats: each is converted here to safetensors, which everything else reads."""
