"""Where a panel of quantised weights has its scales and its codes: `code_panels` writes them, `by_codes` reads them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.inference.engines.cpu.vectors import PANEL

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_codes import CodeKind

LINE = 64  # bytes of a line: an integer of 16 bits for each of two inputs of 16 outputs


@dataclass(frozen=True)
class PanelBlock:
    """The layout of a block of a panel, for `PANEL` outputs. The rows in brackets exist only if the kind has them.

        2 bytes of each output              the factors of scales, float16
        [2 bytes of each output             the factors of minima]
        [groups × 1 byte of each output     the groups' scales]
        [groups × 1 byte of each output     the groups' minima]
        from byte `header` on               the codes, group by group

    A group's codes are lines of the lower 4 bits (of 8-bit codes all bits), then lines of the upper bits. A line is 32
    words of 16 bits, two for each output: the first has codes of even inputs, the second codes of the odd inputs after
    them, from the lowest bits on. Codes 0 to 7 of an output are the words 0x6420 and 0x7531 if they have 4 bits.
    """

    code_kind: "CodeKind"

    @property
    def header(self) -> int:
        """Bytes before the codes."""
        numbers = 1 + self.code_kind.has_minimum  # of a group
        if self.code_kind.block_groups == 1:
            return 2 * PANEL * numbers
        return -(-PANEL * numbers * (2 + self.code_kind.block_groups) // LINE) * LINE

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's codes."""
        return PANEL * self.code_kind.group_size * self.code_kind.bits // 8

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return self.header + self.code_kind.block_groups * self.group_bytes
