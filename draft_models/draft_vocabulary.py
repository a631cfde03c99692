"""Draft vocabularies: drafters that predict only the target's most frequent tokens.

The head of a small target is a fifth of its weights or more, and a drafter reads it in every step. Most tokens of a
large vocabulary are rare. Verification stays exact: the drafter's probability of every other token is 0. A narrowed
model has the ids 0 to k − 1 for its k tokens, and the id k for every other token of the target.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError
from outrider.base.files import write_atomically
from outrider.draft_models.formats.stored_tensors import name_unreadable, read_with_digest
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.narrowed import MARK, DraftVocabulary, is_narrowed, require_tokens, widen_rows
from outrider.draft_models.targets.settings import SMALL_LM
from outrider.draft_models.targets.tensor_files import find_file

TOKENS_FILE = "draft_tokens.safetensors"  # of a narrowed model: the target's id of each of its ids


def count_tokens(examples: Iterable[Mapping[str, Tensor]], vocab_size: int) -> Tensor:
    """Counts [vocabulary] of each token as a supervised label in `examples`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in examples:
        labels = example["labels"]  # `IGNORE` where a token is not supervised
        counts += torch.bincount(labels[labels != IGNORE], minlength=vocab_size)[:vocab_size]
    return counts


def choose_tokens(counts: Tensor, draft_size: int, required_ids: Iterable[int] = ()) -> Tensor:
    """The `draft_size` most frequent tokens, ascending; ties go to lower ids. required_ids: ids that are included."""
    priority = counts.clone()
    priority[list(required_ids)] = torch.iinfo(priority.dtype).max
    return priority.sort(descending=True, stable=True).indices[:draft_size].sort().values


def coverage(counts: Tensor, draft_tokens: Tensor) -> float:
    """The share of the counted tokens that is in `draft_tokens`; 1 if nothing was counted."""
    return float(counts[draft_tokens].sum() / counts.sum()) if counts.sum() else 1.0


def draft_indices(labels: Tensor, draft_tokens: Tensor | None, vocab_size: int) -> Tensor:
    """Each label's index in `draft_tokens`; IGNORE for labels outside. draft_tokens None: the whole vocabulary."""
    if draft_tokens is None:
        return labels
    index_by_token = torch.full((vocab_size,), IGNORE, dtype=labels.dtype, device=labels.device)
    index_by_token[draft_tokens] = torch.arange(len(draft_tokens), dtype=labels.dtype, device=labels.device)
    return torch.where(labels == IGNORE, IGNORE, index_by_token[labels.clamp(min=0)])


def narrow_config(config: PreTrainedConfig, draft_vocabulary: DraftVocabulary) -> None:
    """Reduce the `config` of a model to `draft_vocabulary`: k + 1 ids without special tokens, and the key `MARK`."""
    mark = {"tokens": len(draft_vocabulary.tokens), "sha256": hashlib.sha256(_blob(draft_vocabulary)).hexdigest()}
    config.update({"vocab_size": len(draft_vocabulary.tokens) + 1, MARK: mark})
    config.update(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))


@torch.no_grad()
def narrow(model: PreTrainedModel, draft_vocabulary: DraftVocabulary) -> None:
    """Reduce `model` to `draft_vocabulary`: embedding and head keep these rows unchanged.

    A further row stands for all other tokens: the mean of their rows.
    """

    def cut(rows: Tensor) -> Tensor:
        is_outside = torch.ones(len(rows), dtype=torch.bool).index_fill_(0, draft_vocabulary.tokens, False)
        outside_rows = rows[is_outside] if bool(is_outside.any()) else rows
        return torch.cat([rows[draft_vocabulary.tokens], outside_rows.mean(0, keepdim=True)])

    _replace_rows(model, cut)
    narrow_config(model.config, draft_vocabulary)
    model.draft_vocabulary = draft_vocabulary


@torch.no_grad()
def widen(model: PreTrainedModel, draft_vocabulary: DraftVocabulary, special_ids: Mapping[str, object]) -> None:
    """Undo `narrow`, for engines in which target and drafter share a vocabulary. special_ids: the target's special ids.

    Other tokens get, in the embedding, the row for other tokens; in the head the mean row, which is never the
    argmax.
    """
    target_size, draft_size = draft_vocabulary.vocabulary, len(draft_vocabulary.tokens)

    def widened_rows(rows: Tensor, filler: Tensor) -> Tensor:
        return widen_rows(rows[:draft_size], filler, draft_vocabulary.tokens, target_size)

    _replace_rows(model, lambda x: widened_rows(x, x[draft_size]), lambda x: widened_rows(x, x[:draft_size].mean(0)))
    model.config.update({"vocab_size": target_size, "tie_word_embeddings": False, **special_ids})
    delattr(model.config, MARK)


@torch.no_grad()
def fit_rows(model: PreTrainedModel, target_row_count: int, special_ids: Mapping[str, object]) -> None:
    """Give `model` as many rows as its target, for engines that require it. special_ids: the target's special ids.

    Embeddings of one vocabulary are padded to various sizes; padding ids occur in no text. A new row is the mean of all
    rows, and never the argmax (see `widen_rows`).
    """
    config = model.config.get_text_config()
    if config.vocab_size == target_row_count:
        return
    shared_ids = torch.arange(min(target_row_count, config.vocab_size))
    _replace_rows(model, lambda rows: widen_rows(rows[: len(shared_ids)], rows.mean(0), shared_ids, target_row_count))
    config.update({"vocab_size": target_row_count, **special_ids})


def _replace_rows(
    model: PreTrainedModel, embed_map: Callable[[Tensor], Tensor], head_map: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Map the embedding's rows by `embed_map`, the head's by `head_map`; None: by `embed_map`, and tied if it was."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    is_tied, old_head_weight = head_map is None and head.weight is embedding.weight, head.weight
    embedding.weight = nn.Parameter(embed_map(embedding.weight))
    head.weight = embedding.weight if is_tied else nn.Parameter((head_map or embed_map)(old_head_weight))
    if head.bias is not None:
        head.bias = nn.Parameter((head_map or embed_map)(head.bias))
    embedding.num_embeddings = head.out_features = len(head.weight)
    embedding.padding_idx = None


def save_tokens(folder: Path, draft_vocabulary: DraftVocabulary) -> None:
    """Write `TOKENS_FILE` of a narrowed model."""
    write_atomically(folder / TOKENS_FILE, _blob(draft_vocabulary))


def read_draft_vocabulary(
    source: str, revision: str | None, config: PreTrainedConfig, *, role: str = SMALL_LM
) -> DraftVocabulary | None:
    """The draft vocabulary of the model in `source`; None without one. Raises `UserError` if it cannot be read.

    role: the option that names the model.
    """
    if not is_narrowed(config):
        return None
    file, remedy = find_file(source, TOKENS_FILE, revision), f"restore {TOKENS_FILE}, or train the drafter again"
    if file is None:
        raise UserError(f"{role}={source}: no {TOKENS_FILE} there, which says what its tokens are; {remedy}")
    mark = getattr(config, MARK)
    read_with_digest(Path(file), mark.get("sha256") if isinstance(mark, dict) else None, remedy)
    with name_unreadable(file, "draft vocabulary"), safe_open(file, framework="pt") as stored:
        tokens, target_size = stored.get_tensor("tokens"), int(stored.metadata()["of"])  # see `_blob`
    require_tokens(tokens, config.vocab_size - 1, target_size, file)  # its last id stands for other tokens
    return DraftVocabulary(tokens, target_size)


def _blob(draft_vocabulary: DraftVocabulary) -> bytes:
    """The content of `TOKENS_FILE`; of: the size of the target's vocabulary."""
    return save({"tokens": draft_vocabulary.tokens.cpu()}, metadata={"of": str(draft_vocabulary.vocabulary)})
