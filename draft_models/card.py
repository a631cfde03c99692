"""README.md of a drafter: what it is, how to use it here and in serving engines, and what was measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.files import write_atomically

CARD_FILE = "README.md"
REPORT_HEADING = "## Measured"


def write_card(path: Path, kind: str, target: str, facts: Mapping[str, Any]) -> None:
    """Write the model card of the drafter in directory `path`; a report that an earlier one had is dropped with it.

    kind: early_exit or small_lm; target: name or directory of what it drafts for; facts: one line each.
    """
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    base = "" if Path(target).is_dir() else f"base_model: {target}\n"  # a path means nothing on the Hub
    sections = [
        f"---\nlibrary_name: outrider\n{base}tags: [speculative-decoding, draft-model]\n---",
        f"# A draft model for {target}",
        _USES[kind].format(path=path, target=target),
        f"## How it was made\n\n{listed}",
        _UPLOAD.format(path=path),
    ]
    write_atomically(path / CARD_FILE, ("\n\n".join(sections) + "\n").encode())


def add_report(path: Path, report: str) -> None:
    """Put a measured report (Markdown) into the card of the drafter in `path`, in the place of an earlier one."""
    card = path / CARD_FILE
    old = card.read_text(errors="replace") if card.exists() else f"# {path.name}"
    before = old.partition(REPORT_HEADING)[0].rstrip()
    body = report.replace("\n# ", "\n### ").removeprefix("# ")
    write_atomically(card, f"{before}\n\n{REPORT_HEADING}\n\n{body}".encode())


_EARLY_EXIT = """An EESD early-exit drafter: a layer on the first layers of the target, with which it shares their
computation. `drafter.json` names the target it belongs to; loading it for another one is refused.

```
evaluate-checkpoint checkpoint={path} target={target} method=eesd_beta
```

vLLM and SGLang have no kind of drafter that reads the target's inner layers; it runs in Outrider's own runtime."""

_SMALL_LM = """An ordinary Hugging Face causal LM with the target's tokenizer.

Outrider:

```
evaluate-checkpoint target={target} small_lm={path} method=vanilla
```

transformers:

```python
target = AutoModelForCausalLM.from_pretrained("{target}")
drafter = AutoModelForCausalLM.from_pretrained("{path}")
target.generate(**inputs, assistant_model=drafter)
```

vLLM:

```
vllm serve {target} --speculative-config '{{"method": "draft_model", "model": "{path}", "num_speculative_tokens": 5}}'
```

SGLang (steps + 1 draft tokens, one candidate each):

```
python -m sglang.launch_server --model-path {target} --speculative-algorithm STANDALONE \\
  --speculative-draft-model-path {path} --speculative-num-steps 4 --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens 5
```"""

_USES = {"early_exit": _EARLY_EXIT, "small_lm": _SMALL_LM}

_UPLOAD = """## Sharing it

```
hf upload USER/NAME {path} --exclude "checkpoint-*" --exclude "best/*" --exclude "wandb/*"
```"""
