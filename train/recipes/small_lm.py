"""Recipe for small LMs as drafters: trained on text, or distilled from the target.

The training step is `SmallLMStudent.forward`.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider.base.errors import UserError
from outrider.base.processes import from_main, say
from outrider.base.streams import Streams
from outrider.data_prep.text.rows import load_rows
from outrider.draft_models.draft_vocabulary import fit_rows, narrow, narrow_config, places, read_draft_vocabulary
from outrider.draft_models.losses import (
    IGNORE,
    head_product,
    linear_cross_entropy,
    linear_divergence,
    linear_topk_divergence,
)
from outrider.draft_models.small_lm.model import TRAINING_FILE, USE, USE_OF_SOME, require_same_vocabulary
from outrider.draft_models.targets.attention import ATTENTION, stock_name
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.model_files import empty_model, layer_stack
from outrider.draft_models.targets.model_spec import LogitRule, context_limit
from outrider.draft_models.targets.narrowed import DraftVocabulary, is_narrowed
from outrider.draft_models.targets.open_target import (
    OpenTarget,
    load_config,
    load_proven,
    load_tokenizer,
    open_target,
    pick_dtype,
    special_tokens,
    stored_dtype,
)
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.drafters.small_lm import SmallLMSource
from outrider.inference.loading.memory_plan import Held, Place, explained, planned_device, target_memory
from outrider.inference.loading.rehearsal import rehearsable
from outrider.train.core.driver import run_training
from outrider.train.core.sharding import is_shared_out
from outrider.train.core.training import Metrics, Trained, Training, TrainRows
from outrider.train.parts.drafter import (
    export,
    fit_memory,
    parameters_of,
    pick_tokens,
    require_context,
    require_vocabulary,
    write_records,
)
from outrider.train.parts.heldout import Decoding, HeldOutText, evaluation, judged, packed_hidden
from outrider.train.parts.on_policy import OnPolicy, choose_prefix, continue_prefixes, own_labels, row_generator
from outrider.train.parts.top_k_rows import load_taught_rows
from outrider.train.settings.drafters import DrafterConfig, FinetuneConfig


@rehearsable
def finetune_drafter(config: FinetuneConfig) -> None:
    """Train a small LM according to `config`. The drafter is `config.out_dir`, a Hugging Face directory.

    It contains the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, drafter, data set or directory, before any weight is read.
    """
    with explained(lambda: memory_of(config)):
        run_training(config, partial(prepare, config))


def memory_of(config: FinetuneConfig) -> list[Held]:
    """Of each device in a training."""
    target = open_target(config.target, config.revision)
    shape, device = drafter_config(config.drafter, target.config, target.tokenizer), planned_device()
    place = Place.of(config.frozen_dtype, target.config, config.seq_len, device)
    fitted = fit_memory(empty_model(shape), config.fit, config.seq_len, 0, target.config.vocab_size, device)
    return target_memory(target.config, place) + fitted


def prepare(config: FinetuneConfig, state: PartialState) -> "Training[SmallLMStudent]":
    """The training. Raises `UserError` for unusable or incompatible inputs."""
    target = open_target(config.target, config.revision)
    shape = drafter_config(config.drafter, target.config, target.tokenizer)
    require_vocabulary(config.draft_vocabulary, target.config)
    for whose, model in (("target", target.config), ("drafter", shape)):
        require_context(model, config.seq_len, config.decode_tokens, whose)
    rows = load_taught_rows(config.data, target.tokenizer, config.seq_len, "train", cached=config.teacher == "cached")
    heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=config.decode_prompts)
    own = None if config.drafter.path is None else tokens_of_finished(config, target.config)
    if own is None:
        tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout))
        own = None if tokens is None else DraftVocabulary(tokens, target.config.vocab_size)
    stack = None
    if config.online or state.is_main_process:  # other processes do not decode
        dtype = pick_dtype(config.frozen_dtype, target.config, state.device)
        stack = target.stack(dtype=dtype, device=state.device)
    sampled = OnPolicy(config.on_policy, config.on_policy_tokens, config.fit.seed, target.tokenizer.eos_token_id)
    student = SmallLMStudent(
        start_lm(config, shape, target.tokenizer, state.device, own, target.config.vocab_size),
        config.objective,
        stack if config.online else None,
        sampled if config.on_policy > 0 else None,
    )
    say(describe(student, config))
    identity = identity_of(config, target, rows.key, state)
    return Training(
        student,
        rows,
        config.fit,
        identity,
        evaluation_of(config, target, heldout, student, stack if state.is_main_process else None),
        partial(save, config, target, student, own, identity),
        finished=TRAINING_FILE,
        keeps_best=True,
        saved_whole=student,  # adapters are merged into frozen weights
        on_step=student.begin_step,
        minutes=config.minutes,
    )


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
        generators = [row_generator(self.on_policy.seed, self.step, row) for row in input_ids]
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


def _plain(lm: PreTrainedModel) -> PreTrainedModel:
    """The LM itself, without peft's wrapper."""
    return lm.get_base_model() if hasattr(lm, "peft_config") else lm  # type: ignore[operator]


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


def identity_of(config: FinetuneConfig, target: OpenTarget, data_key: str, state: PartialState) -> dict[str, object]:
    """The identity of the run: everything that determines the result."""
    identity = {
        **config.deciding(),
        "target": asdict(from_main(state, lambda: target.fingerprint)),
        "drafter_model": None,
        "data_key": data_key,
    }
    if config.drafter.path is not None:
        identity["drafter_model"] = model_identity(open_tensors(config.drafter.path, config.drafter.revision))
    return identity


def describe(student: SmallLMStudent, config: FinetuneConfig) -> str:
    """One greppable line: the drafter, its objective, and parameter counts."""
    trained, frozen = parameters_of(student)
    taught = f" teacher={config.teacher} on_policy={config.on_policy}" if config.distils else ""
    return (
        f"finetune_drafter drafter={config.drafter.path or 'new'} objective={config.objective}{taught} "
        f"trained_parameters={trained} parameters={trained + frozen}"
    )


def evaluation_of(
    config: FinetuneConfig, target: OpenTarget, heldout: TrainRows, student: SmallLMStudent, stack: LayerStack | None
) -> Callable[[SmallLMStudent, int], Metrics] | None:
    """The evaluation during training, of the model as it would be served. None without the whole target, `stack`.

    top1_target, tau_analytic: of the rows whose beginnings are the prompts (see `HeldOutText`). In addition, real
    decoding (`Decoding`) and `MovedNorms`.
    """
    if stack is None:
        return None
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens)
    text = HeldOutText(heldout, 1, stack)

    def evaluate(student: SmallLMStudent) -> Metrics:
        drafter = layer_stack(student.merged(stack.dtype))
        found = text.judge(partial(judged, drafter))
        known = {name: found[name] for name in ("top1_target", "tau_analytic") if name in found}
        return known | decoding(stack, SmallLMSource(drafter))

    return evaluation(student, stored_dtype(target.config), evaluate)


def save(
    config: FinetuneConfig,
    target: OpenTarget,
    student: SmallLMStudent,
    own: DraftVocabulary | None,
    identity: dict[str, object],
    trained: Trained,
) -> None:
    """Write the drafter, its card and, last, the record of its training."""
    out_dir = Path(config.out_dir)
    drafter = student.merged(stored_dtype(target.config))
    drafter.set_attn_implementation(stock_name(drafter))  # ours does not exist outside this project
    export(drafter, target.tokenizer, out_dir)
    facts: dict[str, object] = {"objective": config.objective}
    facts |= {} if own is None else {"tokens": f"{len(own.tokens)} of the target's {own.vocabulary}"}
    write_records(out_dir / TRAINING_FILE, config, identity, trained, USE if own is None else USE_OF_SOME, facts)
