"""A small causal LM as a drafter: any model that shares the target's vocabulary and can run a tree of tokens.

A draft vocabulary is the part of the target's tokens that a drafter has logits for; a file beside the weights lists it.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Lt
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError, require
from outrider.base.settings import construct
from outrider.draft_models.card import describe_serving
from outrider.draft_models.draft_vocabulary import fit_rows, read_draft_vocabulary, widen
from outrider.draft_models.small_lm.pard2 import Pard2, TargetProjection, projection_config, read_projection
from outrider.draft_models.targets.model_files import layer_stack, load_causal_lm
from outrider.draft_models.targets.model_spec import UNLIMITED
from outrider.draft_models.targets.narrowed import is_narrowed
from outrider.draft_models.targets.open_target import (
    load_proven,
    load_tokenizer,
    read_config,
    special_tokens,
    why_not_by_layers,
)
from outrider.draft_models.targets.proof import NotByLayersError, prove_rows, require_all_kept
from outrider.draft_models.targets.stack import LayerStack, WholeModel
from outrider.draft_models.targets.target import Target
from outrider.draft_models.targets.tensor_files import open_tensors

SmallLM = LayerStack | WholeModel
# In the config of a drafter of several tokens a pass: the id (vLLM's name for it) that stands for each token still to
# be drafted, and how many tokens it learned to draft so. Without such an id a model drafts one token a pass.
MASK_TOKEN, PASS_TOKENS = "pard_token", "parallel_tokens"
TRAINING_FILE = "finetune_drafter.json"  # written next to the weights, last, by training in this toolkit


def load_small_lm(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    target: PreTrainedConfig | None = None,
) -> SmallLM:
    """The causal LM in `source` (local directory or Hub), frozen, for a target with `tokenizer`.

    It runs layer by layer (`LayerStack`) if a check at load shows that this computes the same as its own forward, else
    by its own forward (`WholeModel`). Layer by layer on a CPU, quantised weights stay as they are stored. Its embedding
    may be padded to another size than the target's, but the tokens must be the same. If they differ, a `UserError`
    names both sizes and the first differing token before weights are read. Raises `UserError` too if it cannot run
    trees.

    target: the config of the target, whose hidden states a PARD-2 model projects (see `pard2`); None, or if the target
    does not fit: the projection is left out.
    """
    config = read_config(source, revision, role="small_lm")
    pard2, projection = projection_config(config), None
    has_mask = pass_tokens_of(config)[0] is not None
    require(pard2 is None or has_mask, f"small_lm={source}: {MASK_TOKEN}", None, "the id of the mask, as in PARD-2")
    vocabulary = read_draft_vocabulary(source, revision, config)
    require_same_vocabulary(load_tokenizer(source, revision, role="small_lm"), tokenizer)
    try:
        if vocabulary is None and (why := why_not_by_layers(config)) is not None:
            raise NotByLayersError(why)
        files, layer_ids = open_tensors(source, revision), range(config.num_hidden_layers)
        if pard2 is not None and target is not None and pard2.boundaries(target) is not None:
            tensors = read_projection(files, pard2, config.hidden_size, dtype, device)
            projection = TargetProjection(pard2, tensors, target)
        keep_coded = torch.device(device).type == "cpu"
        model = load_proven(files, config, layer_ids, dtype=dtype, device=device, role="small_lm", coded=keep_coded)
    except NotByLayersError:
        if vocabulary is not None or pard2 is not None:
            raise
        return load_whole_model(source, config, revision, dtype, device)
    model.draft_vocabulary = None if vocabulary is None else vocabulary.to(device)  # type: ignore[assignment]
    return layer_stack(model) if projection is None else Pard2(model, projection)


def pass_tokens_of(config: PreTrainedConfig) -> tuple[int | None, int | None]:
    """The config's `MASK_TOKEN` and `PASS_TOKENS`, None if missing. Raises `UserError` for impossible values."""
    # A narrowed model has a draft vocabulary: its ids are the target's, and may exceed its own embedding.
    id_count = UNLIMITED if is_narrowed(config) else config.get_text_config().vocab_size
    value_type, option = Annotated[int, Ge(0), Lt(id_count)] | None, f"small_lm={config.name_or_path}"
    mask_id = construct(value_type, getattr(config, MASK_TOKEN, None), f"{option}: {MASK_TOKEN}")
    value_type = Annotated[int, Ge(1), Lt(2**10)] | None
    return mask_id, construct(value_type, getattr(config, PASS_TOKENS, None), f"{option}: {PASS_TOKENS}")


def last_id(lm: Target) -> int:
    """The highest id that `lm` can read; no limit with a draft vocabulary: all other tokens share an embedding row."""
    return UNLIMITED if lm.predicted is not None else lm.config.vocab_size - 1


def load_for_engine(
    source: str, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | str, padded_rows: int | None
) -> PreTrainedModel:
    """The causal LM in `source` as engines load it: a draft vocabulary is widened to the target's. padded_rows: size of
    the target's embedding, to pad it to; None: unknown. Raises `UserError` if it cannot be loaded."""
    config = read_config(source, role="small_lm")
    if projection_config(config) is not None:
        raise UserError(f"small_lm={source}: PARD-2, which `outrider export` cannot write; give an engine its files")
    model = load_causal_lm(source, revision=None, role="small_lm", dtype=dtype)
    if (vocabulary := read_draft_vocabulary(source, revision=None, config=config)) is not None:
        widen(model, vocabulary, special_tokens(tokenizer))
    if padded_rows is not None:
        fit_rows(model, padded_rows, special_tokens(tokenizer))
    return model


def load_whole_model(
    source: str, config: PreTrainedConfig, revision: str | None, dtype: torch.dtype, device: torch.device | str
) -> WholeModel:
    """The causal LM in `source`, frozen, run as a whole. Raises `UserError` if it cannot be loaded or run a tree."""

    def load(dtype: torch.dtype) -> WholeModel:
        return WholeModel(load_causal_lm(source, revision, role="small_lm", dtype=dtype))

    lm = load(torch.float32)  # in 16 bits the check could not distinguish rounding from an error
    try:
        require_all_kept(config)  # every layer keeps every key and value
        prove_rows(lm)  # each path of a tree gets the same logits as alone
    except UserError as error:
        refusal = f"small_lm={source}: architecture {config.model_type!r} cannot draft trees"
        raise UserError(f"{refusal}: {error}. Use a drafter of another architecture") from None
    return (lm if dtype == torch.float32 else load(dtype)).to(device)


def require_same_vocabulary(drafter: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` unless both tokenizers give every token the same id."""
    drafter_ids, target_ids = drafter.get_vocab(), target.get_vocab()
    if drafter_ids == target_ids:
        return
    conflicts = sorted(
        (target_ids.get(token, drafter_ids.get(token, 0)), token)
        for token in drafter_ids.keys() | target_ids.keys()
        if drafter_ids.get(token) != target_ids.get(token)
    )
    _, token = conflicts[0]  # by the target's id, else the drafter's
    raise UserError(
        f"small_lm={drafter.name_or_path}: its vocabulary ({len(drafter_ids)} tokens) is not the target's "
        f"({target.name_or_path}: {len(target_ids)} tokens); {len(conflicts)} tokens differ, first {token!r}: drafter "
        f"id {drafter_ids.get(token)}, target id {target_ids.get(token)}. Use a drafter of the target's own family"
    )


USE_OF_SOME = """A causal LM over some of the target's tokens, in an ordinary Hugging Face directory but for
`draft_tokens.safetensors`, which says what its ids stand for. Its tokenizer is the target's.

**transformers, vLLM and SGLang cannot draft with it**: they would take its ids for the target's. For them,
`outrider export checkpoint={path:option} out_dir=DIR engine=ENGINE` writes it over all tokens.

Outrider:

```
evaluate-checkpoint target={target:option} small_lm={path:option}
```"""

WHAT = "An ordinary causal LM with the target's tokenizer."


def describe_use(tokens_per_pass: int) -> str:
    """Instructions for a drafter of all tokens that drafts so many in one pass; 0: one, and 5 in a draft."""
    return f"""{WHAT}

Outrider:

```
evaluate-checkpoint target={{target:option}} small_lm={{path:option}}
```

{describe_serving(tokens_per_pass or 5, one_pass=tokens_per_pass > 0)}

llama.cpp and OpenVINO: `outrider export checkpoint={{path:option}} engine=llama_cpp out_dir=DIR`, or \
`engine=openvino`."""
