"""Prompt lookup: what followed an earlier occurrence of the text's last tokens is the draft; there is no model."""

from outrider.inference.settings.kind import Kind

KIND = Kind(
    "prompt_lookup",
    f"{__name__}.drafter:PromptLookupPlugin",
    shaped=False,
    keys=("max_ngram", "stop.max_draft"),
    vllm_method="ngram",
)
