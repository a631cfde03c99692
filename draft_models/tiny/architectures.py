"""The architectures that random models are made of, for debug=true and for tests: the one table of them.

A new architecture is one line here. No import: the settings of every command read the names.
"""

from typing import Any

WINDOW = 48  # of sliding attention: shorter than the texts of a rehearsal
# By the `model_type` of transformers: what its config needs beside the sizes that all have (see `save_tiny_model`).
TINY_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
}


def tiny_settings(architecture: str, window: int = WINDOW) -> dict[str, Any]:
    """A copy of the line of `architecture`, with sliding attention, where it has any, over `window` positions."""
    settings = dict(TINY_ARCHITECTURES[architecture])
    if "sliding_window" in settings:
        settings["sliding_window"] = window
    return settings
