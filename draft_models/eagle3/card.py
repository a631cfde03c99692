"""The model card and metadata of a trained EAGLE-3 head."""

from draft_models.targets.settings import Dialect

TRAINING_FILE = "eagle3.json"  # written next to the weights, last, by training in this toolkit


def use_of(dialect: Dialect, fc_bias: bool) -> str:
    """Instructions for a head in `dialect`, here and in servers that read it, with {path} and {target} to fill in.

    fc_bias: whether its first matrix has a bias, which vLLM does not support.
    """
    read = {"vLLM": _VLLM if not fc_bias else "", "SGLang": _SGLANG if dialect != "speculators" else ""}
    others = [name for name, how in read.items() if not how]
    parts = [_OUTRIDER, *(how for how in read.values() if how)]
    if others:
        parts.append(f"{' and '.join(others)}: not in this dialect; `outrider export engine=ENGINE` writes others.")
    return "\n\n".join(parts)


_OUTRIDER = """An EAGLE-3 head: it drafts from hidden states of the target, and belongs to that target alone.

Outrider:

```
evaluate-checkpoint target={target:option} eagle3={path:option} method=eagle3/opt_tree
```"""

_VLLM = """vLLM:

```
vllm serve {target:shell} --speculative-config '{{"method": "eagle3", "model": {path:json}, \
"num_speculative_tokens": 4}}'
```"""

_SGLANG = """SGLang:

```
python -m sglang.launch_server --model-path {target:shell} --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path {path:shell} --speculative-num-steps 4 --speculative-eagle-topk 4 \\
  --speculative-num-draft-tokens 16
```"""
