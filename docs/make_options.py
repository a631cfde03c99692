"""Write docs/options.md: every option of every command, from the settings themselves.

python docs/make_options.py
"""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from outrider.cli import COMMANDS, Command
from outrider.commands.composing import compose_config, groups_of
from outrider.commands.options import options_of, usual

PAGE = Path(__file__).parent / "options.md"
HEAD = """# Options

Every command takes `key=value`. This page is made from the settings by `python docs/make_options.py`; `--help` prints \
the same of one command."""


def page() -> str:
    """The expected content of the page: the options of all commands, by the name of their YAML."""
    return "\n\n".join([HEAD, *map(section, COMMANDS.values())]) + "\n"


def section(command: Command) -> str:
    """What the page says of one command."""
    schema = command.load_settings()
    purpose = re.split(r"(?<=[.!])\s", inspect.getdoc(schema) or "", maxsplit=1)[0]
    parts = [f"## {command.typed}", purpose, f"`outrider {command.typed}` or `{command.script}`"]
    groups = [f"- `{group}`: {', '.join(choices)}" for group, choices in groups_of(command.name).items()]
    if groups:
        parts.append("Groups, chosen with `group=choice`:\n\n" + "\n".join(groups))
    like = [other for other in COMMANDS.values() if other.load_settings() in schema.__mro__[1:]]
    parts += [f"It has all options of {other.typed}, and these:" for other in like]
    same = {field.name for other in like for field in dataclasses.fields(other.load_settings())} - {"out_dir"}
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    options = {option.key: option for option in options_of(schema, compose_config(command.name, []))}
    first = usual(command.name, options)
    for option in sorted(options.values(), key=lambda option: option.key not in first):
        if option.key.partition(".")[0] in same:
            continue
        cells = (f"`{option.key}`", option.kind, f"`{option.default}`" if option.default else "", option.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n\n".join([*parts, "\n".join(rows)])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
