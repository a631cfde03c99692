"""Training a small LM as a drafter: start one, fit it, choose the best by real decoding, export it."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from data_prep.text.rehearsal import rehearsable
from data_prep.text.rows import Rows, load_rows
from draft_models.acceptance import Law
from draft_models.card import write_card
from draft_models.draft_vocabulary import narrow, narrow_config, read_own_tokens
from draft_models.early_exit.checkpoint import provenance
from draft_models.small_lm.model import TRAINING_FILE, USE, USE_OF_SOME, require_same_vocabulary
from draft_models.targets.anatomy import context_limit
from draft_models.targets.architectures import load_config
from draft_models.targets.attention import ATTENTION, stock_name
from draft_models.targets.empty_models import layer_stack
from draft_models.targets.load_layers import load_layers
from draft_models.targets.model_identity import model_identity
from draft_models.targets.narrowed import OwnTokens, is_narrowed
from draft_models.targets.open_target import load_tokenizer, open_target, pick_dtype
from draft_models.targets.proof import prove_layers
from draft_models.targets.stack import LayerStack
from draft_models.targets.tensor_files import open_tensors
from inference.drafters.small_lm import SmallLMSource
from inference.loading.subject import end_tokens
from outrider.errors import UserError
from outrider.files import require_writable, write_json
from outrider.processes import from_main, join_processes, only_run_of
from outrider.progress import counted
from outrider.run_dirs import recorded_at_first
from outrider.streams import Streams
from train import run_dir, sharding
from train.best import BEST_FOLDER, Best
from train.draft_tokens import pick_tokens
from train.export import export, served_dtype, special_tokens
from train.fit import fit
from train.settings import DrafterConfig, FinetuneConfig
from train.small_lm_student import OnPolicy, SmallLMStudent
from train.top_k_rows import load_taught_rows
from train.watch import (
    MovedNorms,
    agreement,
    batches_of,
    decode_metrics,
    expected_tau,
    heldout_prompts,
    judged,
    supervised_hidden,
    target_choices,
    target_law,
)


@rehearsable
def finetune_drafter(config: FinetuneConfig) -> None:
    """Train a small LM as `config` says. The drafter is `config.out_dir` itself, a Hugging Face directory.

    It holds the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, drafter, data set or directory, before any weight is read.
    """
    transformers_logging.disable_progress_bar()
    state, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, out_dir, "a training"):
        _finetune(config, out_dir, state)


def _finetune(config: FinetuneConfig, out_dir: Path, state: PartialState) -> None:
    run_dir.require_free(out_dir, config.resume)
    opened = open_target(config.target, config.revision)
    target, tokenizer = opened.config, opened.tokenizer
    shape = drafter_config(config.drafter, target, tokenizer)
    require_room(config, target, shape)
    rows = load_taught_rows(config.data, tokenizer, config.seq_len, "train", cached=config.teacher == "cached")
    heldout = load_rows(config.data, tokenizer, config.seq_len, "heldout", max_rows=config.decode_prompts)

    own = None if config.drafter.path is None else tokens_of_finished(config, target)
    if own is None:
        limit = None if config.drafter.path is None else shape.vocab_size
        tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, opened, rows, heldout, limit))
        own = None if tokens is None else OwnTokens(tokens, target.vocab_size)
    stack = None
    if config.online or state.is_main_process:  # the others decode nothing
        stack = opened.stack(dtype=pick_dtype(config.frozen_dtype, target, state.device), device=state.device)
    on_policy = OnPolicy(config.on_policy, config.on_policy_tokens, config.fit.seed, tokenizer.eos_token_id)
    lm = start_lm(config, shape, tokenizer, state.device, own)
    student = SmallLMStudent(
        lm, config.objective, stack if config.online else None, on_policy if config.on_policy > 0 else None
    )
    if state.is_main_process:
        print(describe(student, config), flush=True)
    identity = config.deciding() | {
        "target": asdict(from_main(state, lambda: opened.fingerprint)),
        "drafter_weights": None,
        "data_key": rows.key,
    }
    if config.drafter.path is not None:
        start = open_tensors(config.drafter.path, config.drafter.revision)
        identity |= {"drafter_weights": start.digest(start.file_of), "drafter_model": model_identity(start)}
    served = served_dtype(target)
    watch = None
    best = Best(out_dir / BEST_FOLDER, recorded_at_first(identity), config)
    if state.is_main_process:
        assert stack is not None
        prompts = heldout_prompts(heldout, config.decode_prompts, context_limit(target) - config.decode_tokens)
        watch = Watch(stack, heldout, prompts, config.decode_tokens, end_tokens(opened), student, served, best)
    result = fit(
        student,
        rows,
        config.fit,
        out_dir,
        resume=config.resume,
        identity=identity,
        settings=config,
        evaluate=watch or (lambda *_: {}),
        on_step=student.begin_step,
        minutes=config.minutes,
    )
    sharding.make_whole(student, frozen=True)  # adapters are merged into what is frozen
    if (
        state.is_main_process and result.was_finished and (out_dir / TRAINING_FILE).exists()
    ):  # the card may have more by now
        print(f"{out_dir}: finished already", flush=True)
    elif state.is_main_process:
        step, metrics = best.restore(student)
        drafter = student.merged(served)
        drafter.set_attn_implementation(stock_name(drafter))  # ours is of no use to others
        export(drafter, tokenizer, out_dir)
        facts: dict[str, Any] = {"objective": config.objective, "data": config.data.source}
        facts |= {} if own is None else {"tokens": f"{len(own.tokens)} of the target's {own.vocabulary}"}
        facts |= {"steps": result.steps, "chosen step": step}
        facts |= {name: round(value, 3) for name, value in metrics.items()}
        write_card(out_dir, USE if own is None else USE_OF_SOME, config.target, facts)
        report = {"target": config.target, "step": step, "metrics": metrics, "steps": result.steps}
        report |= {"training_seconds": result.seconds}
        report |= {"last_metrics": result.metrics, "settings": identity, "fit": asdict(config.fit)}
        write_json(out_dir / TRAINING_FILE, report | {"made_with": provenance()})
        shown = " ".join(f"{name}={value:.4f}" for name, value in metrics.items())
        print(f"saved drafter={out_dir} step={step} {shown}", flush=True)
    state.wait_for_everyone()


def drafter_config(
    drafter: DrafterConfig, target: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """The config of the drafter to start from; reads no weights. A shape gets the target's vocabulary and context.

    Raises `UserError` where a finished drafter's tokens are not the target's.
    """
    if drafter.path is not None:
        config = load_config(drafter.path, drafter.revision, role="drafter.path")
        require_same_vocabulary(load_tokenizer(drafter.path, drafter.revision, role="drafter.path"), tokenizer)
        return config
    shape: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": drafter.hidden,
        "intermediate_size": drafter.intermediate,
        "num_hidden_layers": drafter.layers,
        "num_attention_heads": drafter.heads,
        "num_key_value_heads": drafter.kv_heads or drafter.heads,
        "max_position_embeddings": context_limit(target),
        "tie_word_embeddings": drafter.tied,
    }
    return LlamaConfig(**shape, **special_tokens(tokenizer))


def tokens_of_finished(config: FinetuneConfig, target: PreTrainedConfig) -> OwnTokens | None:
    """The tokens that the drafter to go on with is made of already; None where it is of all.

    Raises `UserError` where they are another target's, or others are asked for.
    """
    path, revision = config.drafter.path, config.drafter.revision
    assert path is not None
    own = read_own_tokens(path, revision, load_config(path, revision, role="drafter.path"), role="drafter.path")
    if own is None:
        return None
    if config.draft_vocabulary is not None:
        raise UserError(f"draft_vocabulary={config.draft_vocabulary}: expected null, as drafter.path={path} has its "
                        f"own {len(own.tokens)} tokens")  # fmt: skip
    if own.vocabulary != target.vocab_size:
        raise UserError(f"drafter.path={path}: its tokens are some of {own.vocabulary}, the target has "
                        f"{target.vocab_size}; give the drafter of this target")  # fmt: skip
    return own


def require_room(config: FinetuneConfig, target: PreTrainedConfig, drafter: PreTrainedConfig) -> None:
    """Raise `UserError` where rows or continuations are longer than a model's context."""
    for name, model in (("target", target), ("drafter", drafter)):
        limit = context_limit(model)
        if config.seq_len > limit:
            raise UserError(f"seq_len={config.seq_len}: the {name}'s context is {limit} tokens")
        if config.decode_tokens >= limit:
            raise UserError(f"decode_tokens={config.decode_tokens}: expected less than the {name}'s context of {limit}")


def start_lm(
    config: FinetuneConfig,
    shape: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    own: OwnTokens | None = None,
) -> PreTrainedModel:
    """The drafter before training, float32: a fixed function of config, files and its `own` tokens (None: all).

    Trainable is what is trained.
    """
    drafter = config.drafter
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(config.fit.seed).number("weights", bits=64))
        if drafter.path is None:
            made = copy.deepcopy(shape)
            if own is not None:
                narrow_config(made, own)
            lm = AutoModelForCausalLM.from_config(
                made, attn_implementation=ATTENTION, dtype=torch.float32, trust_remote_code=False
            )
            special = {} if own is not None else special_tokens(tokenizer)
            lm.generation_config = GenerationConfig(do_sample=False, **special)
            lm.own_tokens = own
        else:
            files = open_tensors(drafter.path, drafter.revision)
            lm = load_layers(files, shape, range(shape.num_hidden_layers), dtype=torch.float32)
            prove_layers(lm, f"drafter.path={drafter.path}")
            if own is not None and is_narrowed(shape):
                lm.own_tokens = own
            elif own is not None:
                narrow(lm, own)
            lm.requires_grad_(True)
        if config.lora_rank:
            alpha = 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
            lora = LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules="all-linear")  # type: ignore[arg-type]
            lm = get_peft_model(lm, lora)
    return lm.to(device)


def describe(student: SmallLMStudent, config: FinetuneConfig) -> str:
    """One greppable line: what is trained, and on what."""
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    total = sum(p.numel() for p in student.parameters())
    taught = f" teacher={config.teacher} on_policy={config.on_policy}" if config.distils else ""
    return (
        f"finetune_drafter drafter={config.drafter.path or 'new'} objective={config.objective}{taught} "
        f"trained_parameters={trained} parameters={total}"
    )


class Watch:
    """Evaluation while training, for the main process: decodes with what would be served, and keeps the best.

    Metrics: those of `decode_metrics` and `MovedNorms`. Of the rows whose beginnings are the prompts:
    top1_target: share of supervised positions at which the drafter's argmax is the target's.
    tau_analytic: `expected_tau` by the whole target's law.
    """

    def __init__(
        self,
        stack: LayerStack,
        heldout: Rows,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        eos: Collection[int],
        student: SmallLMStudent,
        saved_dtype: torch.dtype,
        best: Best,
    ):
        self.stack, self.prompts, self.new_tokens, self.eos, self.best = stack, prompts, new_tokens, eos, best
        self.norms = MovedNorms(student, saved_dtype)
        self.batches = batches_of(heldout, 1)
        self.choices, self.laws = list[Tensor](), list[Law]()  # the target's argmax and its law, where supervised
        for batch in counted(self.batches, "reading held-out text", "batches"):
            hidden = supervised_hidden(stack, batch)
            self.choices.append(target_choices(stack, batch["labels"], hidden))
            self.laws.append(target_law(stack, hidden))

    def __call__(self, student: torch.nn.Module, step: int) -> dict[str, float]:
        assert isinstance(student, SmallLMStudent)
        drafter = layer_stack(student.merged(self.stack.dtype))
        metrics = self._judge(drafter)
        metrics |= decode_metrics(self.stack, SmallLMSource(drafter), self.prompts, self.new_tokens, self.eos)
        metrics |= self.norms(student, step)
        self.best.offer(student, step, metrics)
        return metrics

    def _judge(self, drafter: LayerStack) -> dict[str, float]:
        pairs = list(zip(self.batches, self.laws, strict=True))
        found = [judged(drafter, *pair) for pair in counted(pairs, "judging held-out text", "batches")]
        guesses, accepted = zip(*found, strict=True)
        metrics = {"top1_target": agreement(guesses, self.choices)}
        return metrics | expected_tau(accepted, [batch["documents"] for batch in self.batches])
