"""A drafter's model card (README.md): description, use here and in serving engines, measurements.

A template has %(…)s, which `describe_serving` fills, and {path:FORM} and {target:FORM}, which `write_card` fills. FORM:
option (an option's value in a shell), shell (a word in a shell), json (a literal of JSON and Python).
"""

from collections.abc import Mapping
from pathlib import Path

from outrider.base.errors import warn
from outrider.base.files import is_local, write_atomically
from outrider.base.words import PageName
from outrider.draft_models.formats.model_name import model_name

CARD_FILE = "README.md"
TITLE = "# A draft model for "  # followed by the target
REPORT_HEADING = "## Measured"
TAU_NAMES = ("tau", "tau_analytic", "tau_text")  # metrics of a training: what was decoded, computed, and guessed right
LEAST_TAU = 1.1  # τ, tokens per pass of the target, below which a drafter is of no use


def write_card(folder: Path, usage: str, target: str, facts: Mapping[str, object]) -> None:
    """Write the model card of the drafter in directory `folder`, replacing an earlier card and its report.

    usage: instructions for a drafter of its kind, with {path} and {target} to fill in. target: its name or directory.
    facts: one line each. If the first one there of `TAU_NAMES` is below `LEAST_TAU`, card and log have a warning.
    Paths are relative if the command's were, so the lines work in the directory where the command ran.
    """
    fact_lines = "\n".join(f"- {name}: {value}" for name, value in {"target": target, **facts}.items())
    base_line = "" if is_local(target) else f"base_model: {target}\n"  # a path means nothing on the Hub
    tau = next((facts[name] for name in TAU_NAMES if name in facts), None)
    page_names = {"path": PageName(folder), "target": PageName(target)}
    is_useless = isinstance(tau, float) and tau < LEAST_TAU
    if target.endswith(".gguf"):  # it needs no conversion
        usage = usage.replace(_CONVERSION, "").replace(_OTHER_CONVERSION, "").replace(_CONVERTED, "{target:shell}")
    if is_useless:
        warn(f"{folder}: of no use: τ = {tau:.2f}, below {LEAST_TAU}; train it longer, or on the target's own answers")
    sections = [
        f"---\nlibrary_name: outrider\n{base_line}tags: [speculative-decoding, draft-model]\n---",
        f"{TITLE}{model_name(target)}",
        *([_USELESS.format(tau=tau)] if is_useless else []),
        usage.format(**page_names),
        f"## How it was made\n\n{fact_lines}",
        _UPLOAD.format(**page_names),
    ]
    write_atomically(folder / CARD_FILE, ("\n\n".join(sections) + "\n").encode())


def add_report(folder: Path, report: str) -> None:
    """Insert a measured report (Markdown) into the card of the drafter in `folder`, replacing an earlier one."""
    card_path = folder / CARD_FILE
    old_text = card_path.read_text("utf-8", "replace") if card_path.exists() else f"# {folder.name}"
    intro_text = old_text.partition(REPORT_HEADING)[0].rstrip()
    report_body = report.replace("\n# ", "\n### ").removeprefix("# ")  # its title becomes text
    write_atomically(card_path, f"{intro_text}\n\n{REPORT_HEADING}\n\n{report_body}".encode())


def describe_serving(drafted: int, engine: str = "vllm", *, one_pass: bool = False, head: str = "") -> str:
    """Instructions for a causal LM in `engine` and engines that read the same files, with {path} and {target} to fill.

    drafted: how many tokens it drafts for each pass of the target. one_pass: it drafts them in one pass, where an
    engine can; the others run it for each. head: vLLM's method of a draft head, in `engine` alone; "": a causal
    LM. SGLang drafts trees with an EAGLE-3 head: `topk` children of a token, `checked` tokens in all.
    """
    sections = [_SERVING[name] for name in (PLAIN_ENGINES if engine in PLAIN_ENGINES and not head else (engine,))]
    # Only vLLM's V1 runner has parallel_drafting, and this variable chooses that runner.
    parallel, env_prefix = ('"parallel_drafting": true, ', "VLLM_USE_V2_MODEL_RUNNER=0 ") if one_pass else ("", "")
    numbers = {"drafted": drafted, "checked": drafted + 1, "runner": env_prefix}  # checked: tokens of a target's pass
    values = {"method": "draft_model", "algorithm": "STANDALONE", "topk": 1, "drafts": "draft-simple"} | numbers
    values["p_min"] = " --spec-draft-p-min 0.6"  # llama.cpp ends a draft at a token of lower probability
    if head:
        values |= {"method": head, "algorithm": "EAGLE3", "topk": 4, "checked": 16, "drafts": f"draft-{head}"}
        values["p_min"] = ""
    return "\n\n".join(sections) % {**values, "parallel": parallel}


LLAMA_CPP_DRAFT = 3  # tokens of a draft that paid in llama.cpp (docs/deploy.md)
# How a target becomes a GGUF file; `write_card` leaves it out where the target is one.
_CONVERSION = "outrider export checkpoint={target:option} engine=llama_cpp out_dir=target_gguf\n"
_CONVERTED = "target_gguf/model.gguf"
_OTHER_CONVERSION = """

The first line wants a directory; llama.cpp's own `convert_hf_to_gguf.py {target:shell} --outfile FILE` does \
the same."""
PLAIN_ENGINES = ("transformers", "vllm", "sglang")  # they read a causal LM's Hugging Face directory
_SERVING = {
    "transformers": """transformers:

```python
target = AutoModelForCausalLM.from_pretrained({target:json})
drafter = AutoModelForCausalLM.from_pretrained({path:json})
target.generate(**inputs, assistant_model=drafter)
```""",
    "vllm": """vLLM:

```
%(runner)svllm serve {target:shell} --speculative-config '{{"method": "%(method)s", "model": {path:json}, \
%(parallel)s"num_speculative_tokens": %(drafted)d}}'
```""",
    "sglang": """SGLang:

```
python -m sglang.launch_server --model-path {target:shell} --speculative-algorithm %(algorithm)s \\
  --speculative-draft-model-path {path:shell} --speculative-num-steps %(drafted)d --speculative-eagle-topk %(topk)d \\
  --speculative-num-draft-tokens %(checked)d
```""",
    "llama_cpp": f"""llama.cpp, whose target is a GGUF file too:

```
{_CONVERSION}llama-server -m {_CONVERTED} -md {{path:shell}}/model.gguf --spec-type %(drafts)s \
--spec-draft-n-max %(drafted)d%(p_min)s
```{_OTHER_CONVERSION}""",
    "openvino": """OpenVINO GenAI, whose target is converted too:

```
outrider export checkpoint={target:option} engine=openvino engine_python=ENVIRONMENT out_dir=target_ir
```

```python
target = openvino_genai.LLMPipeline("target_ir", "CPU", draft_model=openvino_genai.draft_model({path:json}, "CPU"))
target.generate("…", max_new_tokens=128, num_assistant_tokens=%(drafted)d)
```""",
}

_USELESS = """**Of no use**: it reached τ = {tau:.2f} tokens per pass of the target, and τ = 1 means that none of its
tokens was accepted. Decoding with it is slower than without. Train it longer, or on the target's own answers."""

_UPLOAD = """## Sharing it

```
hf upload USER/NAME {path:shell} --exclude "checkpoint-*" --exclude "best/*" --exclude "wandb/*"
```"""
