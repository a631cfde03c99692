"""The small LM in training: what it begins with, the module that its recipe trains, and what that holds."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.draft_vocabulary import fit_rows, narrow, narrow_config, read_draft_vocabulary
from outrider.draft_models.losses import head_product, linear_divergence
from outrider.draft_models.small_lm.model import MASK_TOKEN, PASS_TOKENS, pass_tokens_of, require_same_vocabulary
from outrider.draft_models.targets.attention import ATTENTION
from outrider.draft_models.targets.model_files import empty_model, layer_stack
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.narrowed import DraftVocabulary, is_narrowed
from outrider.draft_models.targets.open_target import load_config, load_proven, load_tokenizer, special_tokens
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.loading.memory_plan import Storage, planned_device, target_memory
from outrider.train.core.sharding import is_shared_out
from outrider.train.core.training import Plan
from outrider.train.parts.drafter import fit_memory, llama_config
from outrider.train.parts.heldout import packed_hidden
from outrider.train.parts.on_policy import OnPolicy
from outrider.train.parts.parallel import DraftStudent, Parallel
from outrider.train.settings.drafters import DrafterConfig, FinetuneConfig


def drafter_config(
    drafter: DrafterConfig, target: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """The config of the drafter to start from; reads no weights. A new one gets the target's vocabulary and context.

    Raises `UserError` if the vocabulary of a finished drafter is not the target's.
    """
    if drafter.path is not None:
        config = load_config(drafter.path, drafter.revision, role="drafter.path")
        require_same_vocabulary(load_tokenizer(drafter.path, drafter.revision, role="drafter.path"), tokenizer)
        return config
    return llama_config(drafter, target.vocab_size, context_limit(target), tokenizer)


def tokens_of_finished(config: FinetuneConfig, target: PreTrainedConfig) -> DraftVocabulary | None:
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


def parallel_of(
    config: FinetuneConfig, drafter: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, rows: int
) -> Parallel | None:
    """How the small LM `drafter` is to draft several tokens in one pass; None: it drafts one a pass.

    Its mask is a finished one's, or a token that no text has: of the target's `rows` the first beyond the tokenizer's,
    else the last added one that is neither special nor in the chat template. Raises `UserError` if there is none.
    """
    if not config.parallel:
        return None
    used, template = {*special_tokens(tokenizer).values()}, str(tokenizer.chat_template)
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.content not in template]
    finished_mask, beyond = pass_tokens_of(drafter)[0], 1 + max(tokenizer.get_vocab().values())  # ids may have gaps
    unused = beyond if beyond < rows else max((i for i in added if i < rows and i not in used), default=rows)
    mask = unused if finished_mask is None else finished_mask
    config.require("parallel", mask < rows, f"0, as every token of {config.target} may be text")
    return Parallel(config.parallel, mask, config.fit.seed)


def start_lm(
    config: FinetuneConfig,
    shape: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    vocabulary: DraftVocabulary | None = None,
    rows: int | None = None,
    parallel: Parallel | None = None,
) -> PreTrainedModel:
    """The drafter before training, float32: a fixed function of config, files and draft `vocabulary` (None: all).

    rows: those of the target's embedding, to pad it to (see `fit_rows`); None: leave its size.
    Exactly the parameters to train require a gradient.
    """
    drafter = config.drafter
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(config.fit.seed).number("weights", bits=64))
        if drafter.path is None:
            lm_config = copy.deepcopy(shape)
            if vocabulary is not None:
                narrow_config(lm_config, vocabulary)
            lm = AutoModelForCausalLM.from_config(
                lm_config, attn_implementation=ATTENTION, dtype=torch.float32, trust_remote_code=False
            )
            special = {} if vocabulary is not None else special_tokens(tokenizer)
            lm.generation_config = GenerationConfig(do_sample=False, **special)
            lm.draft_vocabulary = vocabulary
        else:
            files = open_tensors(drafter.path, drafter.revision)
            layers = range(shape.num_hidden_layers)
            lm = load_proven(files, shape, layers, dtype=torch.float32, role="drafter.path")
            if vocabulary is not None and is_narrowed(shape):
                narrow_config(lm.config, vocabulary)
                lm.draft_vocabulary = vocabulary
            else:
                fit_rows(lm, rows or shape.vocab_size, special_tokens(tokenizer))
                if vocabulary is not None:
                    narrow(lm, vocabulary)
            lm.requires_grad_(True)
        for name in (MASK_TOKEN, PASS_TOKENS):  # of a finished one, perhaps
            lm.config.__dict__.pop(name, None)
        lm.config.update({} if parallel is None else {MASK_TOKEN: parallel.mask, PASS_TOKENS: parallel.tokens})
        if config.lora_rank:
            alpha = 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
            lora = LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules="all-linear")  # type: ignore[arg-type]
            lm = get_peft_model(lm, lora)
    return lm.to(device)


class SmallLMAndTeacher(DraftStudent):
    """A float32 small LM, trained whole or through adapters as given: the training module, without the loss.

    objective: cross_entropy on the labels, or one of `draft_models.losses.DIVERGENCES` from `teacher`, the whole
    target. Without a teacher a divergence needs the target's cached top-k in the rows. The teacher is not a submodule:
    it is not trained, saved or wrapped. stack: the layers of the small LM, adapters included.
    """

    teacher: LayerStack | None

    def __init__(
        self,
        lm: PreTrainedModel,
        objective: str,
        teacher: LayerStack | None = None,
        on_policy: OnPolicy | None = None,
        parallel: Parallel | None = None,
    ):
        super().__init__()
        self.lm, self.objective, self.on_policy, self.parallel = lm, objective, on_policy, parallel
        vars(self).update(stack=layer_stack(plain(lm), rotary_dtype=torch.float32), teacher=teacher)  # no submodules

    def begin_step(self, step: int) -> None:
        """Raises `UserError` if parameters are sharded: every forward gathers them from all processes, but sampling
        needs a different number of forwards on each process."""
        if self.on_policy is not None and any(map(is_shared_out, self.parameters())):
            raise UserError("on_policy: needs whole parameters; use ddp or zero2, or on_policy=0")
        super().begin_step(step)

    def gradient_checkpointing_enable(self) -> None:
        plain(self.lm).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def merged(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model to serve: a frozen copy in `dtype`, adapters merged in float32."""
        lm = copy.deepcopy(self.lm)
        if plain(lm) is not lm:
            lm = lm.merge_and_unload()  # type: ignore[operator]
        return lm.to(dtype).requires_grad_(False).eval()  # type: ignore[arg-type]

    def product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Like `head_product`, without the row for tokens outside the draft vocabulary, which is never proposed."""
        states, weight = head_product(self.stack.head, hidden)
        vocabulary = self.stack.draft_vocabulary
        return states, weight if vocabulary is None else weight[: len(vocabulary.tokens)]

    def divergence(self, hidden: Tensor, taught: Tensor, labels: Tensor) -> Tensor:
        """From the teacher's states `taught` to the student's `hidden` [..., d], summed over supervised positions."""
        assert self.teacher is not None
        sides = (*self.product(hidden), *head_product(self.teacher.head, taught))
        rule, target_rule, vocabulary = self.stack.spec.logits, self.teacher.spec.logits, self.stack.draft_vocabulary
        tokens = None if vocabulary is None else vocabulary.tokens
        return linear_divergence(*sides, labels, self.objective, rule=rule, target_rule=target_rule, tokens=tokens)

    @torch.no_grad()
    def teach(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.autocast(input_ids.device.type, enabled=False):
            return packed_hidden(self.teacher, input_ids, positions, documents)


def plain(lm: PreTrainedModel) -> PreTrainedModel:
    """The LM itself, without peft's wrapper."""
    return lm.get_base_model() if hasattr(lm, "peft_config") else lm  # type: ignore[operator]


def small_lm_plan(config: FinetuneConfig, target: PreTrainedConfig, drafter: PreTrainedConfig) -> Plan:
    """The memory of training a small LM of config `drafter`, with the target."""
    storage = Storage.of(config.frozen_dtype, target, config.seq_len, planned_device())
    fitted = fit_memory(config, empty_model(drafter), 0, target.vocab_size)
    return Plan(target_memory(target, storage) + fitted, {})
