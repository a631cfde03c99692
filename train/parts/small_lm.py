"""The small LM in training: its initialisation, and its losses on text, against a frozen target, and on samples."""

import copy
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draft_models.draft_vocabulary import fit_rows, narrow, narrow_config, places, read_draft_vocabulary
from draft_models.losses import IGNORE, head_product, linear_cross_entropy, linear_divergence, linear_topk_divergence
from draft_models.small_lm.model import require_same_vocabulary
from draft_models.targets.architectures import load_config
from draft_models.targets.attention import ATTENTION
from draft_models.targets.empty_models import layer_stack
from draft_models.targets.model_spec import LogitRule, context_limit
from draft_models.targets.narrowed import DraftVocabulary, draft_vocabulary_of, is_narrowed
from draft_models.targets.open_target import load_proven, load_tokenizer, special_tokens
from draft_models.targets.stack import LayerStack
from draft_models.targets.tensor_files import open_tensors
from inference.core.sampling import invert
from outrider.errors import UserError
from outrider.streams import Streams
from train.core.sharding import is_shared_out
from train.parts.heldout import packed_hidden
from train.settings.drafters import DrafterConfig, FinetuneConfig


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
    shape = {
        "vocab_size": target.vocab_size,
        "hidden_size": drafter.hidden,
        "intermediate_size": drafter.intermediate,
        "num_hidden_layers": drafter.layers,
        "num_attention_heads": drafter.heads,
        "num_key_value_heads": drafter.kv_heads or drafter.heads,
        "max_position_embeddings": context_limit(target),
        "tie_word_embeddings": drafter.tied,
    }
    return LlamaConfig.from_dict({**shape, **special_tokens(tokenizer)})


def tokens_of_finished(config: FinetuneConfig, target: PreTrainedConfig) -> DraftVocabulary | None:
    """The draft vocabulary of the finished drafter to continue from; None if it has all tokens.

    Raises `UserError` if it belongs to another target, or if another one is requested.
    """
    path, revision = config.drafter.path, config.drafter.revision
    assert path is not None
    own = read_draft_vocabulary(path, revision, load_config(path, revision, role="drafter.path"), role="drafter.path")
    if own is None:
        return None
    if config.draft_vocabulary is not None:
        raise UserError(f"draft_vocabulary={config.draft_vocabulary}: expected null, as drafter.path={path} has its "
                        f"own {len(own.tokens)} tokens")  # fmt: skip
    if int(own.tokens.max()) >= target.vocab_size:
        raise UserError(f"drafter.path={path}: its tokens are some of {own.vocabulary}, the target has "
                        f"{target.vocab_size}; give the drafter of this target")  # fmt: skip
    return DraftVocabulary(own.tokens, target.vocab_size)  # which may be padded to another size


def start_lm(
    config: FinetuneConfig,
    shape: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    own: DraftVocabulary | None = None,
    rows: int | None = None,
) -> PreTrainedModel:
    """The drafter before training, float32: a fixed function of config, files and draft vocabulary `own` (None: all).

    rows: of the target's embedding, which its own gets as well (see `fit_rows`); None: as it is.
    Exactly the parameters to train require a gradient.
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
            lm.draft_vocabulary = own
        else:
            files = open_tensors(drafter.path, drafter.revision)
            layers = range(shape.num_hidden_layers)
            lm = load_proven(files, shape, layers, dtype=torch.float32, role="drafter.path")
            if own is not None and is_narrowed(shape):
                narrow_config(lm.config, own)
                lm.draft_vocabulary = own
            else:
                fit_rows(lm, rows or shape.vocab_size, special_tokens(tokenizer))
                if own is not None:
                    narrow(lm, own)
            lm.requires_grad_(True)
        if config.lora_rank:
            alpha = 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
            lora = LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules="all-linear")  # type: ignore[arg-type]
            lm = get_peft_model(lm, lora)
    return lm.to(device)


@dataclass(frozen=True)
class OnPolicy:
    """On-policy distillation: in a share of the steps the loss is on the drafter's own continuations."""

    share: float
    tokens: int  # sampled per row
    seed: int
    eos: int | None  # a continuation ends with it

    def due(self, step: int) -> bool:
        """Whether optimizer step `step` is one of them: a pure function of seed and step."""
        return Streams(self.seed).of("on_policy", step).random() < self.share


class SmallLMStudent(nn.Module):
    """A float32 small LM, trained whole or through adapters as given, with the contract of `fit`.

    objective: cross_entropy on the labels, or one of `draft_models.losses.DIVERGENCES` from `teacher`, the whole
    target. Without a teacher a divergence needs the target's cached top-k in the rows. The teacher is not a submodule:
    it is not trained, saved or wrapped.
    """

    def __init__(
        self, lm: PreTrainedModel, objective: str, teacher: LayerStack | None = None, on_policy: OnPolicy | None = None
    ):
        super().__init__()
        self.lm = lm
        self.objective = objective
        self.on_policy = on_policy
        self.step = 0
        self._unregistered = (layer_stack(_plain(lm), rotary_dtype=torch.float32), teacher)

    @property
    def stack(self) -> LayerStack:
        """The layers of the small LM, adapters included."""
        return self._unregistered[0]

    @property
    def teacher(self) -> LayerStack | None:
        return self._unregistered[1]

    def begin_step(self, step: int) -> None:
        """Called by `fit` before each step, since the samples depend on the step.

        Raises `UserError` if parameters are sharded: every forward gathers them from all processes, but sampling needs
        a different number of forwards on each process.
        """
        if self.on_policy is not None and any(map(is_shared_out, self.parameters())):
            raise UserError("on_policy: needs whole parameters; use ddp or zero2, or on_policy=0")
        self.step = step

    def gradient_checkpointing_enable(self) -> None:
        _plain(self.lm).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def merged(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model to serve: a frozen copy in `dtype`, adapters merged in float32."""
        lm = copy.deepcopy(self.lm)
        if _plain(lm) is not lm:
            lm = lm.merge_and_unload()  # type: ignore[operator]
        return lm.to(dtype).requires_grad_(False).eval()  # type: ignore[arg-type]

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, **top_k: Tensor
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`), labels shifted;
        top_k: top_ids, top_logprobs [B, T, k] and tail [B, T] of `train.parts.top_k_rows`."""
        if self.training and self.on_policy is not None and self.on_policy.due(self.step):
            return {"loss_sum": self._on_own_samples(input_ids, labels, positions)}
        hidden = packed_hidden(self.stack, input_ids, positions, documents)
        own = self.stack.draft_vocabulary
        if self.objective == "cross_entropy":
            labels = labels if own is None else places(labels, own.tokens, own.vocabulary)
            return {"loss_sum": linear_cross_entropy(*self._product(hidden), labels, rule=self._rule)}
        if self.teacher is None:
            ids = top_k["top_ids"]
            ids = ids if own is None else places(ids, own.tokens, own.vocabulary)
            known = (ids, top_k["top_logprobs"], top_k["tail"])
            mine = self._product(hidden)
            return {"loss_sum": linear_topk_divergence(*mine, *known, labels, self.objective, rule=self._rule)}
        taught = self._teach(input_ids, positions, documents)
        return {"loss_sum": self._divergence(hidden, taught, labels)}

    def _product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Like `head_product`, without the row for tokens outside the draft vocabulary, which is never proposed."""
        states, weight = head_product(self.stack.head, hidden)
        own = self.stack.draft_vocabulary
        return states, weight if own is None else weight[: len(own.tokens)]

    @property
    def _rule(self) -> LogitRule:
        return self.stack.spec.logits

    def _divergence(self, hidden: Tensor, taught: Tensor, labels: Tensor) -> Tensor:
        assert self.teacher is not None
        mine, theirs = self._product(hidden), head_product(self.teacher.head, taught)
        own, target_rule = self.stack.draft_vocabulary, self.teacher.spec.logits
        tokens = None if own is None else own.tokens
        return linear_divergence(
            *mine, *theirs, labels, self.objective, rule=self._rule, target_rule=target_rule, tokens=tokens
        )

    @torch.no_grad()
    def _teach(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.autocast(input_ids.device.type, enabled=False):
            return packed_hidden(self.teacher, input_ids, positions, documents)

    def _on_own_samples(self, input_ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """The divergence on sampled continuations: each row's mean times the number of supervised tokens of its text.

        So after the loop's division by the text's tokens each row has the same weight as in other steps.
        """
        assert self.on_policy is not None
        assert self.teacher is not None
        generators = [_row_generator(self.on_policy.seed, self.step, row) for row in input_ids]
        prefixes = [
            choose_prefix(ids, wanted, where, self.on_policy.tokens, generator)
            for ids, wanted, where, generator in zip(input_ids, labels, positions, generators, strict=True)
        ]
        numbers = torch.stack([torch.from_numpy(g.random(self.on_policy.tokens)) for g in generators])
        vocabulary = min(self.stack.head.weight.shape[0], self.teacher.head.weight.shape[0])
        was_training = self.lm.training
        self.lm.eval()
        ids, sampled = continue_prefixes(_plain(self.lm), prefixes, numbers.to(input_ids.device), vocabulary)
        self.lm.train(was_training)
        own = own_labels(ids, [len(prefix) for prefix in prefixes], sampled, self.on_policy.eos)
        where = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        lengths = torch.tensor([len(prefix) for prefix in prefixes], device=ids.device)[:, None]
        documents = (where < lengths + self.on_policy.tokens).long() - 1
        hidden = packed_hidden(self.stack, ids, where, documents)
        taught = self._teach(ids, where, documents)
        weights = (labels != IGNORE).sum(1) / (own != IGNORE).sum(1)
        losses = [self._divergence(*row) for row in zip(hidden, taught, own, strict=True)]
        return (torch.stack(losses) * weights).sum()


def choose_prefix(
    input_ids: Tensor, labels: Tensor, positions: Tensor, room: int, generator: np.random.Generator
) -> Tensor:
    """The prefix of a row's continuation: its document up to a supervised position drawn with `generator`.

    All [T]. It has at most T − room tokens, cut from the left, so that `room` new ones fit within T.
    """
    supervised = (labels != IGNORE).nonzero()[:, 0]
    if not len(supervised):
        return input_ids[:1]
    place = int(supervised[int(generator.integers(len(supervised)))])
    start = max(place - int(positions[place]), place + 1 - (len(input_ids) - room))
    return input_ids[start : place + 1]


@torch.no_grad()
def continue_prefixes(
    lm: PreTrainedModel, prefixes: list[Tensor], numbers: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Continue each prefix [n_b] by samples from `lm`, at temperature 1, over its first `vocabulary` tokens.

    numbers [B, count]: uniform in [0, 1); token i of row b is the one at which the cumulative probability passes
    numbers[b, i], so a row does not depend on the other rows. All ids are the target's; an `lm` with a draft vocabulary
    samples from it. Returns (ids [B, longest + count], padded with 0, the new tokens [B, count]).
    """
    count, own = numbers.shape[1], draft_vocabulary_of(lm)
    vocabulary = vocabulary if own is None else len(own.tokens)
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=numbers.device)
    ids = numbers.new_zeros((len(prefixes), int(lengths.max()) + count), dtype=torch.long)
    for row, prefix in zip(ids, prefixes, strict=True):
        row[: len(prefix)] = prefix
    # Float32 whatever the loop's precision; also, autocast might cache copies of the weights without gradients.
    with torch.autocast(ids.device.type, enabled=False):
        cache = DynamicCache(config=lm.config)
        feed = ids[:, : int(lengths.min())]
        for place in range(feed.shape[1], ids.shape[1]):
            feed = feed if own is None else own.inward(feed)
            logits = lm(feed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1, :vocabulary]
            turn = place - lengths
            drawn = invert(logits.softmax(-1), numbers.gather(1, turn.clamp(0, count - 1)[:, None]))[:, 0]
            drawn = drawn if own is None else own.tokens[drawn]
            ids[:, place] = torch.where((turn >= 0) & (turn < count), drawn, ids[:, place])
            feed = ids[:, place : place + 1]
    offsets = torch.arange(count, device=ids.device)
    return ids, ids.gather(1, lengths[:, None] + offsets)


def own_labels(ids: Tensor, lengths: list[int], sampled: Tensor, eos: int | None) -> Tensor:
    """Labels [B, T] that supervise the sampled tokens, up to and including the first `eos`; shifted as in rows."""
    labels = torch.full_like(ids, IGNORE)
    ends = (sampled == (IGNORE if eos is None else eos)).long()
    wanted = sampled.masked_fill(ends.cumsum(1) > ends, IGNORE)
    for row, start, tokens in zip(labels, lengths, wanted, strict=True):
        row[start - 1 : start - 1 + len(tokens)] = tokens
    return labels


def _row_generator(seed: int, step: int, row: Tensor) -> np.random.Generator:
    """A stream that depends on the row's content, not on its place in the global batch or on its process."""
    content = hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()
    return Streams(seed).arrays("on_policy", step, content)


def _plain(lm: PreTrainedModel) -> PreTrainedModel:
    """The LM itself, without peft's wrapper."""
    return lm.get_base_model() if hasattr(lm, "peft_config") else lm  # type: ignore[operator]
