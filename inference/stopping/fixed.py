"""A constant draft length: the K of plain speculative decoding."""

from dataclasses import dataclass

from inference.stopping.interface import Step


@dataclass
class FixedLength:
    """Always draft `max_draft` tokens, or levels."""

    max_draft: int

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass
