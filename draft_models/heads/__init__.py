"""What draft heads (EAGLE-3, DFlash, DSpark), which read hidden states of the target, share: sizes, layers, files."""
