"""Small LMs: a causal LM with the target's vocabulary drafts."""

from outrider.draft_models.targets.settings import HEAD_FOLDER
from outrider.inference.settings.kind import Kind

KIND = Kind(
    "small_lm",
    f"{__name__}.drafter:SmallLMPlugin",
    option="small_lm",
    file="config.json",
    preset="small_lm/survival",
    needs="a causal LM (directory, GGUF file or Hub name)",
    calibration=HEAD_FOLDER,
    vllm_method="draft_model",
    keys=("target_states",),  # only this kind reads this field of a method
)
