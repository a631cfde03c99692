"""Write docs/options.md: every option of every command, from the settings themselves; and what follows the stop rules.

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
from outrider.commands.options import options_of, usual_keys
from outrider.inference.settings.method import CONF_DIR
from outrider.inference.settings.stop_rules import RULES, RuleEntry

PAGE, STOPS = (Path(__file__).parent / name for name in ("options.md", "when-to-stop.md"))
_AUTO = "the draft is shorter than the length that should be fastest, by measured costs and acceptance"  # of `fixed`
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
    first = usual_keys(command.name, options)
    for option in sorted(options.values(), key=lambda option: option.key not in first):
        if option.key.partition(".")[0] in same:
            continue
        cells = (f"`{option.key}`", option.kind, f"`{option.default}`" if option.default else "", option.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n\n".join([*parts, "\n".join(rows)])


def page_of_rules() -> str:
    """The expected content of docs/when-to-stop.md: its table has `RULES`, and `auto`, a setting of fixed."""
    rows = ["| rule | it drafts another token while | needs the head |", "|---|---|---|"]
    for name, entry in RULES.items():
        paper = f" ([{entry.paper}](https://arxiv.org/abs/{entry.paper}))" if entry.paper else ""
        rows.append(f"| `{name}` | {condition_of(entry)}{paper} | {'yes' if entry.needs_head else 'no'} |")
        if name == "fixed":
            rows.append(f"| `auto` | {_AUTO} | no |")
    return re.sub(r"\| rule \|.*?\n\n", lambda _: "\n".join(rows) + "\n\n", STOPS.read_text("utf-8"), flags=re.DOTALL)


def condition_of(entry: RuleEntry) -> str:
    """The condition under which a rule drafts on, with its threshold."""
    return entry.condition.format(threshold=entry.threshold)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    STOPS.write_text(page_of_rules(), "utf-8")
    for name, entry in RULES.items():
        if not (file := CONF_DIR / "stop" / f"{name}.yaml").exists():  # the others may set more than the rule
            file.write_text(f"# It drafts another token while {condition_of(entry)}.\nstop:\n  rule: {name}\n", "utf-8")
