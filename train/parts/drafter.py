"""Shared parts of trainings, except their evaluation: draft vocabulary, dtypes, limits, records and saving."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.files import write_json
from outrider.base.processes import say
from outrider.draft_models.acceptance import FLOAT32_BYTES
from outrider.draft_models.card import write_card
from outrider.draft_models.draft_vocabulary import choose_tokens, count_tokens, coverage, save_tokens
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.losses import loss_bytes
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.narrowed import draft_vocabulary_of
from outrider.draft_models.targets.open_target import OpenTarget, fast_dtype, special_tokens
from outrider.draft_models.targets.vocabulary import KWARGS
from outrider.inference.loading.memory_plan import Memory, planned_device
from outrider.inference.loading.target_setup import end_tokens
from outrider.train.core import run_dir
from outrider.train.core.optimizers import layer_matrices
from outrider.train.core.sharding import trained_parameters
from outrider.train.core.training import Trained, TrainRows
from outrider.train.parts.parallel import Parallel
from outrider.train.settings.drafters import DrafterConfig, DrafterTraining
from outrider.train.settings.toy import ToyTargetConfig

COUNTED_ROWS = 20_000  # evenly spread rows for counting token frequencies
PROGRAM_BYTES = 600_000_000  # of Python, torch and transformers, in the memory of a CPU
_REMEDY = "free space, then resume=true"


def require_vocabulary(size: int | None, target: PreTrainedConfig) -> None:
    """Raise `UserError` if a draft vocabulary of `size` tokens is larger than the target's."""
    if size is not None and size > target.vocab_size:
        raise UserError(f"draft_vocabulary={size}: the target has {target.vocab_size} tokens; expected at most as many")


def pick_tokens(
    size: int | None, target: OpenTarget, rows: TrainRows, heldout: TrainRows, always: Collection[int] = ()
) -> Tensor | None:
    """The draft vocabulary [size], with `always` in it; prints its coverage. None for all tokens."""
    if size is None:
        return None
    vocabulary = target.config.vocab_size
    step = -(-len(rows) // COUNTED_ROWS)
    counts = count_tokens((rows[index] for index in range(0, len(rows), step)), vocabulary)
    always = [*always, *(token for token in sorted(end_tokens(target)) if token < vocabulary)][:size]
    tokens = choose_tokens(counts, size, always)
    held = count_tokens((heldout[index] for index in range(len(heldout))), vocabulary)
    shares = f"coverage_train={coverage(counts, tokens):.4f} coverage_heldout={coverage(held, tokens):.4f}"
    print(f"draft_vocabulary={size} of={vocabulary} {shares}", flush=True)
    return tokens


def frozen_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of frozen layers, from the option of that name."""
    return fast_dtype(device) if name == "fast" else getattr(torch, name)


def require_context(model: PreTrainedConfig, seq_len: int, decode_tokens: int, whose: str = "target") -> None:
    """Raise `UserError` if rows or continuations are longer than the model's context. decode_tokens: 0 for none."""
    limit = context_limit(model)
    if seq_len > limit:
        raise UserError(f"seq_len={seq_len}: the {whose}'s context is {limit} tokens")
    if decode_tokens >= limit:
        raise UserError(f"decode_tokens={decode_tokens}: expected less than the {whose}'s context of {limit} tokens")


def llama_config(
    shape: DrafterConfig | ToyTargetConfig, vocabulary: int, positions: int, tokenizer: PreTrainedTokenizerBase
) -> LlamaConfig:
    """The config of a Llama of this shape. positions: the context that its config states."""
    described = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": shape.tied,
    }
    return LlamaConfig.from_dict({**described, **special_tokens(tokenizer)})


def parameters_of(student: nn.Module) -> tuple[int, int]:
    """The numbers of trained and of frozen parameters."""
    trained, frozen = (sum(p.numel() for p in student.parameters() if p.requires_grad == on) for on in (True, False))
    return trained, frozen


def fit_memory(config: DrafterTraining, student: nn.Module, read: int, vocabulary: int) -> list[Memory]:
    """The memory of training `student` (it may be on meta): its state, and what a step keeps for backward.

    read: numbers per token in the hidden states that the frozen layers hand over. A student with `steps` runs its
    layers that many times.
    """
    fit, device, matrices = config.fit, planned_device(), layer_matrices(student)
    width = round(config.seq_len * max(1.0, Parallel(getattr(config, "parallel", 0), 0, 0).predictions))
    rows, inner = fit.micro_batch_rows or fit.batch_rows, {id(matrix) for matrix in matrices}
    frozen = sum(p.nbytes for p in student.parameters() if not p.requires_grad)
    muon = sum(matrix.numel() for matrix in matrices) if fit.optimizer == "muon" else 0  # which has one moment
    state = FLOAT32_BYTES * (4 * parameters_of(student)[0] - muon)
    loose = [p.numel() for p in trained_parameters(student).values() if p.ndim == 2 and id(p) not in inner]
    steps = getattr(student, "steps", 1)
    handed_on = 5 * max((min(matrix.shape) for matrix in matrices), default=0)  # outputs, predictions, keys, values
    # inputs and outputs of its products, and half as much between them: norms, attention, the MLP's own product
    inside = 0 if fit.gradient_checkpointing else 3 * sum(sum(matrix.shape) for matrix in matrices) // 2
    held = [
        Memory("frozen weights", frozen, "frozen_dtype=bfloat16"),
        Memory(
            "trained: masters, gradients, moments", state, "train_head=false, draft_vocabulary or fit.optimizer=muon"
        ),
        Memory(
            f"activations of {rows} rows × {width} tokens",
            rows * width * FLOAT32_BYTES * (2 * read + steps * (handed_on + inside)),
            "fit.micro_batch_rows=1, seq_len or fit.gradient_checkpointing=true",
        ),
        Memory("logits and the loss, some rows at a time", loss_bytes(vocabulary, vocabulary, device)),
        Memory("a matrix's gradient in the loss", FLOAT32_BYTES * max(loose, default=0)),
    ]
    return [*held, *([Memory("the program", PROGRAM_BYTES)] if device.type == "cpu" else [])]


def write_drafters_card(
    config: DrafterTraining, use: str, facts: Mapping[str, object], trained: Trained, metrics: Collection[str]
) -> None:
    """Write the card of a finished drafter. use: of it; facts: about it; metrics: those that it says."""
    rows: dict[str, object] = {"data": config.data.source, "steps": trained.result.steps}
    rows |= {"chosen step": trained.step} if "tau" in metrics else {}
    arguments = [part.chat_template_kwargs for _, _, part in config.data.parts()] or [config.data.chat_template_kwargs]
    rows |= {name: round(trained.metrics[name], 3) for name in metrics}
    rows |= {KWARGS: arguments} if any(arguments) else {}
    write_card(Path(config.out_dir), use, config.target, {**facts, **rows})


def write_records(
    file: str,
    config: DrafterTraining,
    identity: Mapping[str, object],
    trained: Trained,
    use: str,
    facts: Mapping[str, object],
    metrics: Collection[str],
) -> None:
    """Write a finished drafter's card (see `write_drafters_card`) and, last, `file`, the record of its training; say
    that it is saved."""
    write_drafters_card(config, use, facts, trained, metrics)
    result = trained.result
    report = {"target": config.target, "step": trained.step, "metrics": trained.metrics, "steps": result.steps}
    report |= {"training_seconds": result.seconds, "last_metrics": result.metrics}
    out_dir = Path(config.out_dir)
    write_json(out_dir / file, {**report, "settings": identity, "fit": asdict(config.fit), "made_with": provenance()})
    say(f"saved drafter={out_dir} step={trained.step} {figures(trained, metrics)}")


def figures(trained: Trained, metrics: Collection[str]) -> str:
    """The metrics of a trained drafter, as its last line prints them."""
    return " ".join(f"{name}={trained.metrics[name]:.4f}" for name in metrics)


def export(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: Path,
    convert: Callable[[Path], Path] = lambda staged: staged,
) -> None:
    """Write the Hugging Face directory; config.json is moved last, so an incomplete directory does not load.

    convert: (folder) → the files to write instead, made in that folder. Raises `UserError`.
    """
    staged = out_dir / run_dir.STAGING
    shutil.rmtree(staged, ignore_errors=True)
    try:
        save_parts(staged, lm, tokenizer, remedy=_REMEDY)
        if (draft_vocabulary := draft_vocabulary_of(lm)) is not None:
            save_tokens(staged, draft_vocabulary)
        for file in sorted(convert(staged).iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, out_dir / file.name)
    except OSError as error:
        raise UserError(f"out_dir={out_dir}: cannot be written ({error}); {_REMEDY}") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
