"""Small LMs: a causal LM with the target's vocabulary drafts."""

from outrider.draft_models.targets.settings import HEAD_FOLDER
from outrider.inference.settings.kind import Kind

KIND = Kind(
    "small_lm",
    f"{__name__}.drafter:SmallLMPlugin",
    option="small_lm",
    needs="a causal LM (directory, GGUF file or Hub name)",
    file="config.json",
    preset="small_lm/survival",
    keys=("target_states",),
    calibration=HEAD_FOLDER,
    vllm_method="draft_model",
)
