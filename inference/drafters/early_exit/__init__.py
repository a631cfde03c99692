"""Early exits: an exit layer on the hidden states of the target's first layers drafts (EESD, arXiv 2406.03853)."""

from outrider.inference.settings.kind import Kind

KIND = Kind(
    "early_exit",
    f"{__name__}.drafter:EarlyExitPlugin",
    option="checkpoint",
    needs="an early-exit drafter directory",
    file="drafter.json",
    preset="eesd_survival",
    calibration="",
    vllm_method="draft_model",
    layers=True,
)
