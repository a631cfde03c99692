"""Early exits: an exit layer on the hidden states of the target's first layers drafts (EESD, arXiv 2406.03853)."""

from outrider.inference.settings.kind import Kind

KIND = Kind(
    "early_exit",
    f"{__name__}.drafter:EarlyExitPlugin",
    option="checkpoint",
    file="drafter.json",
    needs="an early-exit drafter directory",
    preset="eesd_survival",
    vllm_method="draft_model",
    calibration="",
    layers=True,  # a calibration head is in the directory itself; it needs single layers of the target
)
