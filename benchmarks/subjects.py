"""What the decoding benchmarks decode with: a target and its drafters, as the runtime and as transformers run them."""

import argparse
import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from data_prep.text.chat import render_prompt
from data_prep.text.prompts import read_prompts
from draft_models.early_exit.checkpoint import from_pretrained
from draft_models.early_exit.model import EarlyExit, NoLayer, exit_layers
from draft_models.small_lm.model import load_small_lm
from draft_models.targets.empty_models import decoder_layers, final_norm, layer_stack
from draft_models.targets.open_target import open_target
from draft_models.targets.stack import LayerStack
from inference.core.decode import autoregressive
from inference.drafters.shaped import Calibrated
from inference.engines.packing import can_pack
from inference.loading.drafters import Drafters, prepare
from inference.loading.targets import load_plain
from inference.settings.evaluate import RUNTIMES
from outrider.errors import UserError

RANDOM: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
RANDOM_TEXT = 48  # tokens of the random target's own; a prompt is 1½ times that text, for prompt lookup to find


@dataclass(frozen=True)
class Subject:
    """A target ready to decode, its drafters and prompts of ids; and the same models as transformers runs them.

    exit_model: the target's first layers under the exit layer, norm and head of the early-exit drafter, which is a
    small LM that transformers' assisted generation can take.
    """

    name: str
    stack: LayerStack
    drafters: Drafters
    plain: PreTrainedModel
    assistant: PreTrainedModel
    exit_model: PreTrainedModel
    prompts: list[list[int]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose the subjects, and how much is decoded with them."""
    parser.add_argument("--target", help="a trained target; needs --checkpoint and --drafter")
    parser.add_argument("--checkpoint", help="an early-exit drafter for it")
    parser.add_argument("--drafter", help="a small LM for it")
    parser.add_argument("--no-random", action="store_true", help="leave the random target out")
    parser.add_argument("--draft-tokens", type=int, default=4, help="K of chains and prompt lookup")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--prompts", default="python_stdlib", help="for the trained target; see evaluate-checkpoint")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on CUDA only")
    parser.add_argument("--runtime", choices=RUNTIMES, default="auto")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, checked."""
    options = parser.parse_args()
    given = [options.target, options.checkpoint, options.drafter]
    if any(given) != all(given):
        parser.error("--target, --checkpoint and --drafter go together")
    if options.no_random and not options.target:
        parser.error("--no-random leaves nothing to measure without --target")
    return options


def pick(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Where and how the models of the command line are loaded."""
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return {"device": device, "dtype": getattr(torch, dtype)}


def load_subjects(options: argparse.Namespace, device: torch.device) -> Iterator[Subject]:
    """The trained target of the command line, if there is one, and the random one, if it is wanted."""
    if options.target:
        yield trained_subject(options, device)
    if not options.no_random:
        with tempfile.TemporaryDirectory() as folder:
            yield random_subject(Path(folder), options.num_prompts, **pick(options, device))


def random_subject(folder: Path, prompts: int, **placed: Any) -> Subject:
    """A random target in which early layers decide much of the next token, so that drafts are accepted now and then.

    Its small LM is its own first layer; its early exit sits on that layer and is a copy of its last.
    """
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**RANDOM))
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(50.0)
        target.lm_head.weight.mul_(10.0)
    small = LlamaForCausalLM(LlamaConfig(**{**RANDOM, "num_hidden_layers": 1}))
    small.load_state_dict(target.state_dict(), strict=False)
    target.save_pretrained(folder / "target")
    small.save_pretrained(folder / "small")
    source, drafter = str(folder / "target"), str(folder / "small")
    drafters = {
        "early_exit": Calibrated(
            EarlyExit.from_model(_load(source, exit_layer=1, **placed), 1, own_head=True).requires_grad_(False)
        ),
        "small_lm": layer_stack(_load(drafter, **placed)),
    }
    name = f"random Llama, {RANDOM['num_hidden_layers']} × {RANDOM['hidden_size']}"
    subject = _make_subject(name, source, drafter, drafters, [], **placed)
    starts = torch.randint(RANDOM["vocab_size"], (prompts, 1), generator=torch.Generator().manual_seed(0)).tolist()
    for start in starts:
        text = [t for r in autoregressive(subject.stack, start, max_new_tokens=RANDOM_TEXT) for t in r.tokens]
        subject.prompts.append([*text, *text[: RANDOM_TEXT // 2]])
    return subject


def trained_subject(options: argparse.Namespace, device: torch.device) -> Subject:
    """The target, early-exit checkpoint and small LM of the command line."""
    target = open_target(options.target)
    tokenizer = target.tokenizer
    placed = pick(options, device)
    early_exit = from_pretrained(options.checkpoint, target.config, target.fingerprint, **placed)
    small = load_small_lm(options.drafter, tokenizer, **placed)
    drafters = {"early_exit": Calibrated(early_exit), "small_lm": small}
    prompts = read_prompts(options.prompts, limit=options.num_prompts)
    rendered = [
        render_prompt([{"role": "user", "content": p.turns[0]}], tokenizer, "auto" if p.chat else "none")
        for p in prompts
    ]
    return _make_subject(options.target, options.target, options.drafter, drafters, rendered, **placed)


def _make_subject(
    name: str, target: str, drafter: str, drafters: Drafters, prompts: list[list[int]], *,
    device: torch.device, dtype: torch.dtype,
) -> Subject:  # fmt: skip
    """Everything loaded and laid out as evaluate-checkpoint does it, and transformers' own copies beside it."""
    plain, assistant = (load_plain(open_target(source), dtype, device) for source in (target, drafter))
    exit_model = as_model(target, drafters["early_exit"].drafter, device, dtype)
    stack = layer_stack(_load(target, device, dtype) if can_pack(device, dtype) else plain)
    prepare(stack, drafters)
    return Subject(name, stack, drafters, plain, assistant, exit_model, prompts)


def as_model(target: str, drafter: EarlyExit, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM that computes what `drafter` on `target` does. Raises `UserError` for an exit of several layers."""
    if drafter.deeper:
        raise UserError(f"--checkpoint: an exit of {len(drafter.layers)} layers; expected exit_depth=1 here")
    model = _load(target, device, dtype, exit_layer=drafter.exit_layer)
    layers = decoder_layers(model)
    if isinstance(drafter.layer, NoLayer):
        del layers[-1]
        model.config.num_hidden_layers = len(layers)
    else:
        layers[-1].load_state_dict(drafter.layer.state_dict())
    final_norm(model).load_state_dict(drafter.norm.state_dict())
    if drafter.head is None:
        head: Any = model.get_output_embeddings()
        drafter.use_head(head)
    if drafter.head is not None or drafter.draft_tokens is not None:
        model.set_output_embeddings(_whole_head(drafter))
    return model


def _whole_head(drafter: EarlyExit) -> nn.Linear:
    """The drafter's head with a row for every token; those that it does not predict get a very low bias."""
    own, tokens = drafter.output_head, drafter.draft_tokens
    if tokens is None:
        return copy.deepcopy(own)
    whole = nn.Linear(own.weight.shape[1], drafter.vocabulary).to(own.weight)
    whole.weight.data.zero_()
    whole.bias.data.fill_(-1e4)
    whole.weight.data[tokens] = own.weight
    whole.bias.data[tokens] = 0 if own.bias is None else own.bias
    return whole.requires_grad_(False)


def _load(source: str, device: torch.device, dtype: torch.dtype, exit_layer: int | None = None) -> PreTrainedModel:
    """The model in `source` with all its layers, or with the first `exit_layer` and the last."""
    target = open_target(source)
    return target.layers(
        None if exit_layer is None else exit_layers(target.config, exit_layer), dtype=dtype, device=device
    )
