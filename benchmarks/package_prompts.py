"""Prompts about the installed packages' own source: code to write, edits, questions, documents to work on.

    python benchmarks/package_prompts.py FOLDER

FOLDER gets train.jsonl, whose first N records hold an equal share of each kind; code, edits, questions and
documents.jsonl with fresh prompts to measure with; and texts.jsonl, the source itself, without files that have a fresh
prompt's function or document. Every function and document is one prompt at most. The interpreter and the packages that
constraints.txt pins decide all; only packages under permissive licences are read. It takes three minutes.
"""

import argparse
import ast
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from outrider.base.files import as_json_lines, require_writable, write_atomically

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|Unlicense|0BSD)\b", re.IGNORECASE)
MEASURED, LEARNT, LONGEST = 15, 1200, 700  # prompts of a kind to measure with and to learn from; characters of one
EDITS = (
    "Add type hints to this function. Answer with the whole function.",
    "Write a docstring for this function. Answer with the whole function.",
    "Rename the variables so that each name says what it holds. Answer with the whole function.",
    "Add a comment above each step of this function. Answer with the whole function.",
    "Make this function raise ValueError where an argument is None. Answer with the whole function.",
    "Add logging of the arguments and of the result. Answer with the whole function.",
    "Split this function into smaller ones. Answer with the code.",
    "Turn this function into a method of a class named Worker. Answer with the code.",
    "Make this code shorter without changing what it does. Answer with the code.",
    "Is there a bug in this function? Explain, then answer with the corrected function.",
)
WRITES = (
    "Write a Python function `{signature}`. {summary}",
    "Implement `{signature}` in Python: {summary}",
    "I need a Python function named `{name}`. {summary} Please show an example of its use.",
    "Write unit tests with pytest for a function `{signature}`. {summary}",
)
QUESTIONS = (
    "How do I do this in Python: {summary} Explain before you show code.",
    "What does `{name}` of the Python module `{module}` do? {summary} When is it useful, and what can go wrong?",
    'I read this about `{module}`: "{summary}" What does it mean? Explain it without code.',
    "What are the alternatives to `{name}` of `{module}` in Python, and what are their advantages?",
    "Explain the idea behind this sentence to a student: {summary}",
)
DOCUMENTS = (
    "Summarise this text in three sentences.",
    "List the main points of this text.",
    "Write a table of the options or names in this text and what each does.",
    "Rewrite this text for a beginner.",
    "Correct the grammar of this text and make it shorter.",
    "Write five questions that this text answers, each with its answer.",
)


def package_files() -> list[Path]:
    """Python files of the standard library and of the installed packages under permissive licences, in order."""
    library = Path(ast.__file__).parent
    files = [
        path for path in library.rglob("*.py") if not {"test", "tests", "site-packages", "idlelib"} & {*path.parts}
    ]
    for package in metadata.distributions():
        about = package.metadata
        licences = [about.get("License-Expression", ""), *(about.get_all("Classifier") or []), about.get("License", "")]
        if package.name != "outrider" and PERMISSIVE.search(" ".join(text[:200] for text in licences if text)):
            files += [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".py"]
    return sorted(path for path in files if "test" not in str(path).lower() and path.is_file())


def parsed(files: Sequence[Path]) -> Iterator[tuple[Path, str, list[ast.AST]]]:
    """Path, text and nodes of the files that are Python."""
    for path in files:
        with suppress(SyntaxError, UnicodeDecodeError, ValueError):
            source = path.read_text(encoding="utf-8")
            yield path, source, [*ast.walk(ast.parse(source))]


def functions(files: Sequence[Path], rng: random.Random) -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """Module, source and tree of the files' functions of 6 to 30 lines, at most three of a file."""
    for path, source, nodes in parsed(files):
        fits = [x for x in nodes if isinstance(x, ast.FunctionDef) and 6 <= (x.end_lineno or 0) - x.lineno <= 30]
        for node in rng.sample(fits, min(3, len(fits))):
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            yield path.stem if path.stem != "__init__" else path.parent.name, textwrap.dedent("\n".join(lines)), node


def code_prompts(files: Sequence[Path], rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """(kind, prompt, the function's first line): it asks for the function, asks about it, or shows it for an edit."""
    seen: set[str] = set()
    for module, source, node in functions(files, rng):
        summary = re.split(r"(?<=\.)\s", " ".join((ast.get_docstring(node) or "").split()))[0]
        name, first_line = node.name, source.partition("\n")[0]
        if name.startswith("__") or name in seen or len(source) > 1200:
            continue
        seen.add(name)
        documented = 30 < len(summary) < 250
        if documented and rng.random() < 0.5:
            yield "questions", rng.choice(QUESTIONS).format(name=name, module=module, summary=summary), first_line
        elif documented and rng.random() < 0.7:
            signature = f"{name}({', '.join(argument.arg for argument in node.args.args if argument.arg != 'self')})"
            prompt = rng.choice(WRITES).format(signature=signature, summary=summary, name=name.strip("_"))
            yield "code", prompt, first_line
        else:
            yield "edits", f"{rng.choice(EDITS)}\n\n```python\n{source}\n```", first_line


def document_prompts(files: Sequence[Path], rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """As `code_prompts`, of modules' and classes' docstrings of 400 to 1,600 characters."""
    seen: set[str] = set()
    for _, _, nodes in parsed(files):
        documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        texts = [text for node in documented if (text := ast.get_docstring(node)) and 400 < len(text) < 1600]
        for text in rng.sample(texts, min(2, len(texts))):
            if text[:60] not in seen:
                seen.add(text[:60])
                yield "documents", f"{rng.choice(DOCUMENTS)}\n\n{text}", text.partition("\n")[0]


def main() -> None:
    """Write the prompts and the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = require_writable(parser.parse_args().folder)
    rng, files = random.Random(64), package_files()
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for kind, prompt, first_line in (*code_prompts(files, rng), *document_prompts(files, rng)):
        if len(prompt) < LONGEST:
            by_kind.setdefault(kind, []).append((prompt, first_line))
    turns, fresh_lines = [], []
    for kind, prompts in by_kind.items():
        rng.shuffle(prompts)
        records = [{"id": f"{kind}-{n}", "category": kind, "turns": [prompt]} for n, (prompt, _) in enumerate(prompts)]
        write_atomically(folder / f"{kind}.jsonl", as_json_lines(records[:MEASURED]))
        turns += [*enumerate(records[MEASURED : MEASURED + LEARNT])]
        fresh_lines += [first_line for _, first_line in prompts[:MEASURED]]
    turns.sort(key=lambda turn: turn[0])
    write_atomically(folder / "train.jsonl", as_json_lines(record for _, record in turns))
    texts = [{"text": source} for _, source, _ in parsed(files) if not any(line in source for line in fresh_lines)]
    write_atomically(folder / "texts.jsonl", as_json_lines(texts))


if __name__ == "__main__":
    main()
