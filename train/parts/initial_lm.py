"""The small LM that a training of drafters starts from: a finished one, or one of a given shape with random weights."""

import copy
from typing import cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider.base.errors import UserError, warn_once
from outrider.base.streams import Streams
from outrider.draft_models.draft_vocabulary import fit_rows, narrow, narrow_config, read_draft_vocabulary
from outrider.draft_models.small_lm.model import MASK_TOKEN, PASS_TOKENS, pass_tokens_of, require_same_vocabulary
from outrider.draft_models.small_lm.pard2 import CONFIG_KEYS, projection_config
from outrider.draft_models.targets.attention import ATTENTION
from outrider.draft_models.targets.model_spec import UNLIMITED, context_limit
from outrider.draft_models.targets.narrowed import DraftVocabulary, draft_vocabulary_of, is_narrowed
from outrider.draft_models.targets.open_target import load_config, load_proven, load_tokenizer, special_tokens
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.train.parts.drafter import llama_config
from outrider.train.parts.parallel import ONE_A_PASS, Parallel
from outrider.train.settings.drafters import DrafterConfig, FinetuneConfig

_UNKNOWN_CONTEXT = 2**17  # positions that a new drafter's config states if the target's does not


def drafter_config(
    drafter: DrafterConfig, target: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """The config of the drafter to start from; reads no weights. A new one gets the target's vocabulary and context.

    Raises `UserError` if the vocabulary of a finished drafter is not the target's.
    """
    if drafter.path is None:
        positions = _UNKNOWN_CONTEXT if context_limit(target) == UNLIMITED else context_limit(target)
        return llama_config(drafter, target.vocab_size, positions, tokenizer)
    config = load_config(drafter.path, drafter.revision, role="drafter.path")
    drafters_tokenizer = load_tokenizer(drafter.path, drafter.revision, role="drafter.path")
    require_same_vocabulary(drafters_tokenizer, tokenizer)
    return config


def read_finished_vocabulary(config: FinetuneConfig, target: PreTrainedConfig) -> DraftVocabulary | None:
    """The draft vocabulary of the finished drafter to continue from; None if it has all tokens.

    Raises `UserError` if it belongs to another target, or if another one is requested.
    """
    path, revision, role = config.drafter.path, config.drafter.revision, "drafter.path"
    assert path is not None
    subset = read_draft_vocabulary(path, revision, load_config(path, revision, role=role), role=role)
    if subset is None:
        return None
    expected = f"null, as drafter.path={path} has its own {len(subset.tokens)} tokens"
    config.require("draft_vocabulary", config.draft_vocabulary is None, expected)
    if int(subset.tokens.max()) >= target.vocab_size:
        raise UserError(f"drafter.path={path}: its tokens are some of {subset.vocabulary}, the target has "
                        f"{target.vocab_size}; give the drafter of this target")  # fmt: skip
    return DraftVocabulary(subset.tokens, target.vocab_size)  # which may be padded to another size


def start_lm(
    config: FinetuneConfig,
    shape: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    vocabulary: DraftVocabulary | None = None,
    rows: int | None = None,
    parallel: Parallel = ONE_A_PASS,
) -> PreTrainedModel:
    """The drafter before training, float32: a fixed function of config, files and draft `vocabulary` (None: all).

    rows: those of the target's embedding, to pad it to (see `fit_rows`); None: leave its size.
    Exactly the parameters to train require a gradient.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(config.fit.seed).number("weights", bits=64))
        if config.drafter.path is None:
            lm = make_lm(shape, tokenizer, vocabulary)
        else:
            lm = load_finished_lm(config.drafter, shape, tokenizer, vocabulary, rows)
            if projection_config(shape) is not None:
                warn_once(f"drafter.path={config.drafter.path}: PARD-2 is trained without the target's hidden states")
            if parallel.tokens > 1 and pass_tokens_of(shape)[0] is None:
                start_mask(lm, parallel.mask)
        for name in (MASK_TOKEN, PASS_TOKENS, *CONFIG_KEYS):  # of a finished one, perhaps
            lm.config.__dict__.pop(name, None)
        passes = {MASK_TOKEN: parallel.mask, PASS_TOKENS: parallel.tokens}
        lm.config.update(passes if parallel.tokens > 1 else {})
        if config.lora_rank:
            alpha = 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
            # Only its type says integer: peft divides it by r.
            lora = LoraConfig(r=config.lora_rank, lora_alpha=cast(int, alpha), target_modules="all-linear")
            lm = cast(PreTrainedModel, get_peft_model(lm, lora))
    return nn.Module.to(lm, device)


@torch.no_grad()
def start_mask(lm: PreTrainedModel, mask: int) -> None:
    """Set the embedding of the id `mask`, which no text has trained, to the mean of all embeddings.

    A mask outside the draft vocabulary has the row for all other tokens, which stays as it is.
    """
    embedding, vocabulary = lm.get_input_embeddings(), draft_vocabulary_of(lm)
    assert isinstance(embedding, nn.Embedding)
    if vocabulary is None or mask in vocabulary.tokens:
        row = mask if vocabulary is None else int(vocabulary.inward(torch.tensor(mask)))
        embedding.weight[row] = embedding.weight.mean(0)


def make_lm(
    shape: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: DraftVocabulary | None
) -> PreTrainedModel:
    """A small LM of this shape with random weights."""
    config, special = copy.deepcopy(shape), {} if vocabulary is not None else special_tokens(tokenizer)
    if vocabulary is not None:
        narrow_config(config, vocabulary)
    lm = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION, dtype=torch.float32, trust_remote_code=False
    )
    lm.generation_config = GenerationConfig(do_sample=False, **special)
    lm.draft_vocabulary = vocabulary
    return lm


def load_finished_lm(
    drafter: DrafterConfig,
    shape: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: DraftVocabulary | None,
    rows: int | None,
) -> PreTrainedModel:
    """The small LM in `drafter.path`, all of whose weights are trained. rows: see `start_lm`."""
    assert drafter.path is not None
    files = open_tensors(drafter.path, drafter.revision)
    lm = load_proven(files, shape, range(shape.num_hidden_layers), dtype=torch.float32, role="drafter.path")
    if vocabulary is not None and is_narrowed(shape):
        narrow_config(lm.config, vocabulary)
        lm.draft_vocabulary = vocabulary
    else:
        fit_rows(lm, rows or shape.vocab_size, special_tokens(tokenizer))
        if vocabulary is not None:
            narrow(lm, vocabulary)
    return lm.requires_grad_(True)
