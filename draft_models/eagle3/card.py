"""What a trained EAGLE-3 head's directory says of itself, beside its weights."""

TRAINING_FILE = "eagle3.json"  # what a training here leaves beside the weights, last

USE = """An EAGLE-3 head: it drafts from hidden states of the target, and belongs to that target alone.

Outrider:

```
evaluate-checkpoint target={target} eagle3={path} method=eagle3_opt_tree
```

vLLM:

```
vllm serve {target} --speculative-config '{{"method": "eagle3", "model": "{path}", "num_speculative_tokens": 4}}'
```

SGLang:

```
python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path {path} --speculative-num-steps 4 --speculative-eagle-topk 4 \\
  --speculative-num-draft-tokens 16
```"""
