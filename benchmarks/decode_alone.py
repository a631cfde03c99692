"""One prompt continued by one drafter and nothing else, for what that takes of memory (see measured_command.py).

    python benchmarks/decode_alone.py '{"source": "runs/eagle3", "target": "runs/demo/target"}' PROMPT 128

The first argument: options of `outrider.load` as JSON; `method` may be settings.
"""

import json
import sys

import outrider
from inference.method_settings import MethodConfig
from outrider.settings import construct


def main(options: str, prompt: str, max_new_tokens: str) -> None:
    given = json.loads(options)
    if isinstance(given.get("method"), dict):
        given["method"] = construct(MethodConfig, given["method"])
    outrider.load(given.pop("source"), **given).generate(prompt, max_new_tokens=int(max_new_tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
