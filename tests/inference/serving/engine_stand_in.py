"""A stand-in for an engine's Python: it answers as `engine_worker` does, from the plan in the file beside it.

The plan: texts: by prompt, as JSON, its tokens; accepted: of the drafted arm, by prompt, how many tokens every step
takes of a draft; changed: what the drafted arm says in the place of the token at an index, for every text; dies: after
so many blocks; log: a file that gets a line for every block: what was asked, with `drafts` and without the prompts.
Beside it LOG.jobs gets each job and its variables.
"""

import json
import os
import sys
from pathlib import Path


def steps(text: list[int], accepted: list[int]) -> list[list[int]]:
    found, at = [text[:1]], 1
    for count in accepted:
        found.append(text[at : at + count + 1])
        at += count + 1
    return [*(step for step in found if step), *([token] for token in text[at:])]


def main() -> None:
    if sys.argv[1] == "-c":
        print(True)  # the engine is installed
        return
    plan = json.loads(Path(sys.argv[0] + ".json").read_text())
    job = json.loads(sys.stdin.readline())
    variables = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OUTRIDER_TABLE", "PYTHONPATH")}
    with open(plan["log"] + ".jobs", "a") as log:
        log.write(json.dumps({**job, "variables": variables}) + "\n")
    print(json.dumps({"version": "stand-in 1", "seconds": 0.0}), flush=True)
    for blocks, line in enumerate(sys.stdin):
        asked, requests, drafts = json.loads(line), [], job["draft"] is not None
        if drafts and blocks == plan.get("dies"):
            sys.exit("no memory is left")
        for prompt in asked["prompts"]:
            text = plan["texts"][json.dumps(prompt)][: asked["max_new_tokens"]]
            if drafts and plan.get("changed"):
                place, token = plan["changed"]
                text = [*text[:place], token, *text[place + 1 :]]
            tokens = steps(text, plan["accepted"][json.dumps(prompt)] if drafts else [])
            each = 0.5 if drafts else 1.0  # seconds of a step
            requests.append({"tokens": tokens, "times": [each * place for place in range(len(tokens) + 1)]})
        with open(plan["log"], "a") as log:
            log.write(json.dumps({"drafts": drafts, **asked, "prompts": len(requests)}) + "\n")
        print(json.dumps({"requests": requests, "seconds": 0.5 if drafts else 1.0}), flush=True)


if __name__ == "__main__":
    main()
