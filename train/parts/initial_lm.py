"""The small LM that a training of drafters starts from: a finished one, or one of a given shape with random weights.

A draft vocabulary is the part of the target's tokens that a drafter predicts. `Parallel`: several tokens are drafted in
a pass, all but the first from a mask token. role: the option that names a model, for errors.
"""

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
    drafter: DrafterConfig, target_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """The config of the drafter to start from; reads no weights. A new one gets the target's vocabulary and context.

    Raises `UserError` if the vocabulary of a finished drafter is not the target's.
    """
    if drafter.path is None:
        max_positions = _UNKNOWN_CONTEXT if context_limit(target_config) == UNLIMITED else context_limit(target_config)
        return llama_config(drafter, target_config.vocab_size, max_positions, tokenizer)
    config = load_config(drafter.path, drafter.revision, role="drafter.path")
    require_same_vocabulary(load_tokenizer(drafter.path, drafter.revision, role="drafter.path"), tokenizer)
    return config


def read_finished_vocabulary(config: FinetuneConfig, target_config: PreTrainedConfig) -> DraftVocabulary | None:
    """The draft vocabulary of the finished drafter to continue from; None if it has all tokens.

    Raises `UserError` if it belongs to another target, or if another one is requested.
    """
    path, revision, role = config.drafter.path, config.drafter.revision, "drafter.path"
    assert path is not None
    stored_vocab = read_draft_vocabulary(path, revision, load_config(path, revision, role=role), role=role)
    if stored_vocab is None:
        return None
    expected = f"null, as drafter.path={path} has its own {len(stored_vocab.tokens)} tokens"
    config.require("draft_vocabulary", config.draft_vocabulary is None, expected)
    if int(stored_vocab.tokens.max()) >= target_config.vocab_size:
        raise UserError(f"drafter.path={path}: its tokens are some of {stored_vocab.vocabulary}, the target has "
                        f"{target_config.vocab_size}; give the drafter of this target")  # fmt: skip
    return DraftVocabulary(stored_vocab.tokens, target_config.vocab_size)  # which may be padded to another size


def start_lm(
    config: FinetuneConfig,
    lm_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    draft_vocabulary: DraftVocabulary | None = None,
    target_vocab_size: int | None = None,
    parallel: Parallel = ONE_A_PASS,
) -> PreTrainedModel:
    """The drafter before training, float32: a fixed function of config, files and `draft_vocabulary` (None: all).

    target_vocab_size: the rows of the target's embedding, to which the drafter's is padded (see `fit_rows`); None: its
    size stays. Exactly the parameters to train require a gradient.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(config.fit.seed).number("weights", bits=64))
        if config.drafter.path is None:
            lm = make_lm(lm_config, tokenizer, draft_vocabulary)
        else:
            lm = load_finished_lm(config.drafter, lm_config, tokenizer, draft_vocabulary, target_vocab_size)
            if projection_config(lm_config) is not None:
                warn_once(f"drafter.path={config.drafter.path}: PARD-2 is trained without the target's hidden states")
            if parallel.tokens > 1 and pass_tokens_of(lm_config)[0] is None:  # it was trained without a mask
                start_mask(lm, parallel.mask)
        for name in (MASK_TOKEN, PASS_TOKENS, *CONFIG_KEYS):  # keys that a finished drafter may have from its training
            lm.config.__dict__.pop(name, None)
        pass_config = {MASK_TOKEN: parallel.mask, PASS_TOKENS: parallel.tokens}
        lm.config.update(pass_config if parallel.tokens > 1 else {})
        if config.lora_rank:
            alpha = 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
            # Only the type of lora_alpha says integer: peft divides it by r.
            lora = LoraConfig(r=config.lora_rank, lora_alpha=cast(int, alpha), target_modules="all-linear")
            lm = cast(PreTrainedModel, get_peft_model(lm, lora))
    return nn.Module.to(lm, device)  # PreTrainedModel's has no type


@torch.no_grad()
def start_mask(lm: PreTrainedModel, mask_id: int) -> None:
    """Set the embedding of the id `mask_id`, which no text has trained, to the mean of all embeddings.

    A mask outside the draft vocabulary has the row for all other tokens, which stays as it is.
    """
    embedding, vocabulary = lm.get_input_embeddings(), draft_vocabulary_of(lm)
    assert isinstance(embedding, nn.Embedding)
    if vocabulary is None or mask_id in vocabulary.tokens:
        mask_row = mask_id if vocabulary is None else int(vocabulary.to_draft_ids(torch.tensor(mask_id)))
        embedding.weight[mask_row] = embedding.weight.mean(0)


def make_lm(
    lm_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, draft_vocabulary: DraftVocabulary | None
) -> PreTrainedModel:
    """A small LM of this shape with random weights."""
    config, special_ids = copy.deepcopy(lm_config), {} if draft_vocabulary is not None else special_tokens(tokenizer)
    if draft_vocabulary is not None:
        narrow_config(config, draft_vocabulary)
    lm = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION, dtype=torch.float32, trust_remote_code=False
    )
    lm.generation_config = GenerationConfig(do_sample=False, **special_ids)
    lm.draft_vocabulary = draft_vocabulary
    return lm


def load_finished_lm(
    drafter: DrafterConfig,
    lm_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    draft_vocabulary: DraftVocabulary | None,
    target_vocab_size: int | None,
) -> PreTrainedModel:
    """The small LM in `drafter.path`, all of whose weights are trained. target_vocab_size: see `start_lm`."""
    assert drafter.path is not None
    files = open_tensors(drafter.path, drafter.revision)
    lm = load_proven(files, lm_config, range(lm_config.num_hidden_layers), dtype=torch.float32, role="drafter.path")
    if draft_vocabulary is not None and is_narrowed(lm_config):  # the files have only its rows already
        narrow_config(lm.config, draft_vocabulary)
        lm.draft_vocabulary = draft_vocabulary
    else:
        fit_rows(lm, target_vocab_size or lm_config.vocab_size, special_tokens(tokenizer))
        if draft_vocabulary is not None:
            narrow(lm, draft_vocabulary)
    return lm.requires_grad_(True)
