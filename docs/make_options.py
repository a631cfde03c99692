"""Write docs/options.md: every option of every command, from the settings themselves.

python docs/make_options.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from outrider.cli import COMMANDS
from outrider.commands import register
from outrider.commands.options import markdown

PAGE = Path(__file__).parent / "options.md"


def page() -> str:
    """The expected content of the page."""
    for name, command in COMMANDS.items():
        register(name, command.load_settings())
    return markdown(COMMANDS)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
