"""An MTP head as the drafter: it drafts as an EAGLE-3 head does, from the target's last hidden state.

Many targets have such a head (multi-token prediction) in their own files.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from outrider.base.errors import UserError
from outrider.draft_models.mtp.checkpoint import StoredMtp, open_mtp
from outrider.draft_models.mtp.spellings import find_head
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.drafters.eagle3.drafter import Eagle3Plugin
from outrider.inference.drafters.mtp import KIND


class MtpPlugin(Eagle3Plugin):
    """The model is an `MtpHead`. changes: overrides of the reading that its file's spelling declares."""

    kind, has_card = KIND, False  # a target's directory has the target's card

    def open_head(self, where: str, target: PreTrainedConfig) -> StoredMtp:
        return open_mtp(where, target, self.changes)

    def is_in(self, folder: str) -> bool:
        """Whether the head is alone there: a target with a head of its own is a causal LM."""
        head = find_head(folder)
        return head is not None and len(head.files.file_of) == len(open_tensors(folder).file_of)

    def identity(self, where: str | None) -> dict[str, object]:
        head = None if where is None else find_head(where)
        return {KIND.name: None if head is None else head.files.digests(head.files.file_of)}

    def export(self, where: str, target: OpenTarget, dtype: torch.dtype, folder: Path) -> None:
        expected = "expected target, a directory with safetensors, since engines draft by the head there"
        raise UserError(f"mtp={where}: {expected}; outrider restore-mtp puts a head there")

    def draft_vocabulary(self, where: str) -> Sequence[int] | None:
        return None  # it predicts all tokens
