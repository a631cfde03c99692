"""What the trainings of drafters share, in the order of a training; their evaluation is in `heldout`.

Before the rows are read, `require_vocabulary` and `require_context` check sizes. `pick_tokens` chooses the draft
vocabulary from the rows. At the end `export_model` writes a small LM, and `write_records` the card of any drafter.
"""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.files import write_json
from outrider.base.machine import fast_dtype
from outrider.base.processes import say
from outrider.draft_models.card import write_card
from outrider.draft_models.draft_vocabulary import choose_tokens, count_tokens, coverage, save_tokens
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.narrowed import draft_vocabulary_of
from outrider.draft_models.targets.open_target import OpenTarget, special_tokens
from outrider.draft_models.targets.vocabulary import KWARGS
from outrider.inference.loading.target_setup import end_tokens
from outrider.train.core import run_dir
from outrider.train.core.training import FitResult, TrainRows
from outrider.train.settings.drafters import DrafterConfig, DrafterTraining
from outrider.train.settings.toy import ToyTargetConfig

COUNTED_ROWS = 20_000  # evenly spread rows for counting token frequencies
_REMEDY = "free space, then resume=true"


def require_vocabulary(size: int | None, target: PreTrainedConfig) -> None:
    """Raise `UserError` if a draft vocabulary of `size` tokens is larger than the target's."""
    if size is not None and size > target.vocab_size:
        raise UserError(f"draft_vocabulary={size}: the target has {target.vocab_size} tokens; expected at most as many")


def pick_tokens(
    draft_size: int | None, target: OpenTarget, rows: TrainRows, heldout: TrainRows, required_ids: Collection[int] = ()
) -> Tensor | None:
    """The draft vocabulary [size], with `required_ids` in it; prints its coverage. None for all tokens."""
    if draft_size is None:
        return None
    vocab_size = target.config.vocab_size
    stride = -(-len(rows) // COUNTED_ROWS)  # rounded up
    counts = count_tokens((rows[index] for index in range(0, len(rows), stride)), vocab_size)  # [vocab_size]
    required_ids = [*required_ids, *(token for token in sorted(end_tokens(target)) if token < vocab_size)][:draft_size]
    tokens = choose_tokens(counts, draft_size, required_ids)  # [draft_size]
    heldout_counts = count_tokens((heldout[index] for index in range(len(heldout))), vocab_size)
    figures = f"coverage_train={coverage(counts, tokens):.4f} coverage_heldout={coverage(heldout_counts, tokens):.4f}"
    print(f"draft_vocabulary={draft_size} of={vocab_size} {figures}", flush=True)
    return tokens


def frozen_dtype(dtype_name: str, device: torch.device) -> torch.dtype:
    """The dtype of frozen layers, from the option of that name."""
    return fast_dtype(device) if dtype_name == "fast" else getattr(torch, dtype_name)


def require_context(model_config: PreTrainedConfig, seq_len: int, decode_tokens: int, role: str = "target") -> None:
    """Raise `UserError` if rows or continuations are longer than the model's context. decode_tokens: 0 for none."""
    limit = context_limit(model_config)
    if seq_len > limit:
        raise UserError(f"seq_len={seq_len}: the {role}'s context is {limit} tokens")
    if decode_tokens >= limit:
        raise UserError(f"decode_tokens={decode_tokens}: expected less than the {role}'s context of {limit} tokens")


def llama_config(
    shape: DrafterConfig | ToyTargetConfig, vocab_size: int, max_positions: int, tokenizer: PreTrainedTokenizerBase
) -> LlamaConfig:
    """The config of a Llama of this shape. max_positions: the context that its config states."""
    config_fields = {
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": shape.tied,
    }
    return LlamaConfig.from_dict({**config_fields, **special_tokens(tokenizer)})


def write_records(
    config: DrafterTraining,
    usage: str,
    card_facts: Mapping[str, object],
    result: FitResult,
    metrics: Collection[str],
    record_parts: tuple[str, Mapping[str, object]] | None = None,
    shape: str = "",
) -> None:
    """Write the card of a finished drafter, a README.md, then any record of its training; print that it is saved.

    usage: how the drafter is used, the text of the card. card_facts: rows of the card about this kind of drafter.
    metrics: names of metrics in `result`, which the card and the printed line show. record_parts: the name of a file in
    out_dir, and the settings that it contains besides the results. shape: the drafter's, for the printed line.
    """
    out_dir = Path(config.out_dir)
    write_card(out_dir, usage, config.target or "MODEL", {**card_facts, **_training_facts(config, result, metrics)})
    if record_parts is not None:
        file_name, settings = record_parts
        record_content: dict[str, object] = {"target": config.target, "step": result.step, "metrics": result.metrics}
        record_content |= {"steps": result.steps, "training_seconds": result.seconds}
        record_content |= {"last_metrics": result.last_metrics, "settings": settings}
        write_json(out_dir / file_name, {**record_content, "fit": asdict(config.fit), "made_with": provenance()})
    figures = [f"{name}={result.metrics[name]:.4f}" for name in metrics]
    say(" ".join(filter(None, [f"saved drafter={out_dir}", shape, f"step={result.step}", *figures])))


def _training_facts(config: DrafterTraining, result: FitResult, metric_names: Collection[str]) -> dict[str, object]:
    """The rows of a card about the training: data, steps, metrics, and the arguments of the chat template."""
    facts: dict[str, object] = {"data": config.data.source, "steps": result.steps}
    if "tau" in metric_names:  # the step with the highest tau is chosen (see `BestWeights`)
        facts["chosen step"] = result.step
    facts |= {name: round(result.metrics[name], 3) for name in metric_names}
    arguments = [part.chat_template_kwargs for _, _, part in config.data.parts()] or [config.data.chat_template_kwargs]
    return facts | ({KWARGS: arguments} if any(arguments) else {})


def export_model(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: Path,
    convert: Callable[[Path], Path] = lambda staging_dir: staging_dir,
) -> None:
    """Write `lm` and `tokenizer` to `out_dir` as a Hugging Face directory.

    The files are written to a folder in `out_dir`, then moved. config.json is moved last, so an incomplete directory
    does not load. convert: from that folder to a folder in it, whose files are moved instead. Raises `UserError` if
    `out_dir` cannot be written.
    """
    staging_dir = out_dir / run_dir.STAGING
    shutil.rmtree(staging_dir, ignore_errors=True)
    try:
        save_parts(staging_dir, lm, tokenizer, remedy=_REMEDY)
        if (draft_vocabulary := draft_vocabulary_of(lm)) is not None:
            save_tokens(staging_dir, draft_vocabulary)
        for file in sorted(convert(staging_dir).iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, out_dir / file.name)
    except OSError as error:
        raise UserError(f"out_dir={out_dir}: cannot be written ({error}); {_REMEDY}") from None
    finally:
        shutil.rmtree(staging_dir, ignore_errors=True)
