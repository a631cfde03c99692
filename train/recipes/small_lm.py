"""Small LMs as drafters: trained on text, or distilled from the target.

`prepare` makes rows and student; `SmallLMStudent.forward` is the step with its loss; train/core/loop.py is the loop.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.base.processes import from_main, say
from outrider.data_prep.text.rows import load_rows
from outrider.draft_models.draft_vocabulary import draft_indices
from outrider.draft_models.losses import IGNORE, linear_cross_entropy, linear_topk_divergence
from outrider.draft_models.small_lm.model import TRAINING_FILE, USE_OF_SOME, describe_use
from outrider.draft_models.targets.attention import stock_name
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.draft_models.targets.open_target import OpenTarget, open_target, pick_dtype, stored_dtype
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.drafters.small_lm.drafter import draft_model_of
from outrider.inference.loading.models import prepare_models
from outrider.train.core.driver import train
from outrider.train.core.training import Metrics, Trained, Training, TrainRows
from outrider.train.parts.drafter import (
    export,
    parameters_of,
    pick_tokens,
    require_context,
    require_vocabulary,
    write_records,
)
from outrider.train.parts.heldout import Decoding, HeldOutText, MovedNorms, packed_hidden, supervised_hidden
from outrider.train.parts.on_policy import OnPolicy
from outrider.train.parts.top_k_rows import load_top_k_rows
from outrider.train.settings.drafters import FinetuneConfig
from outrider.train.students import small_lm as students


def finetune_drafter(config: FinetuneConfig) -> None:
    """Train a small LM according to `config`. The drafter is `config.out_dir`, a Hugging Face directory.

    It contains the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, drafter, data set or directory, before any weight is read.
    """
    target = open_target(config.target, config.revision)
    shape = students.drafter_config(config.drafter, target.config, target.tokenizer)
    plan = partial(students.small_lm_plan, config, target.config, shape)
    train(config, plan, partial(prepare, config, target, shape))


def prepare(
    config: FinetuneConfig, target: OpenTarget, shape: PreTrainedConfig, state: PartialState
) -> "Training[SmallLMStudent]":
    """The training. shape: of the drafter. Raises `UserError` for unusable or incompatible inputs."""
    require_vocabulary(config.draft_vocabulary, target.config)
    for whose, model in (("target", target.config), ("drafter", shape)):
        require_context(model, config.seq_len, config.decode_tokens, whose)
    parallel = students.parallel_of(config, shape, target.tokenizer, target.config.vocab_size)
    vocabulary = None if config.drafter.path is None else students.tokens_of_finished(config, target.config)
    load = load_top_k_rows if config.teacher == "cached" else load_rows
    rows = load(config.data, target.tokenizer, config.seq_len, "train")
    heldout = load_rows(config.data, target.tokenizer, config.seq_len, "heldout", max_rows=config.decode_prompts)

    if vocabulary is None:
        always = [] if parallel is None else [parallel.mask]
        tokens = from_main(state, lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout, always))
        vocabulary = None if tokens is None else DraftVocabulary(tokens, target.config.vocab_size)
    stack = None
    if config.online or state.is_main_process:  # other processes do not decode
        dtype = pick_dtype(config.frozen_dtype, target.config, state.device)
        stack = target.stack(dtype=dtype, device=state.device, coded=not config.online and state.device.type == "cpu")
        if not config.online:  # it only decodes
            prepare_models(stack, {})
    size = target.config.vocab_size
    lm = students.start_lm(config, shape, target.tokenizer, state.device, vocabulary, size, parallel)
    sampled = OnPolicy(config.on_policy, config.on_policy_tokens, config.fit.seed, target.tokenizer.eos_token_id)
    teacher, on_policy = stack if config.online else None, sampled if config.on_policy > 0 else None
    student = SmallLMStudent(lm, config.objective, teacher, on_policy, parallel)
    trained, frozen = parameters_of(student)
    taught = f" teacher={config.teacher} on_policy={config.on_policy}" if config.distils else ""
    say(f"finetune_drafter drafter={config.drafter.path or 'new'} objective={config.objective}{taught} "
        f"trained_parameters={trained} parameters={trained + frozen}")  # fmt: skip

    path, fingerprint = config.drafter.path, from_main(state, lambda: target.fingerprint)
    begun = None if path is None else model_identity(open_tensors(path, config.drafter.revision))
    identity = {**config.deciding(), "target": asdict(fingerprint), "drafter_model": begun, "data_key": rows.key}
    return Training(
        student,
        rows,
        config.fit,
        identity,
        evaluation_of(config, target, heldout, student, stack) if stack and state.is_main_process else None,
        partial(save, config, target, student, identity),
        finished=TRAINING_FILE,
        keeps_best=True,
        saved_whole=student,  # adapters are merged into frozen weights
        on_step=student.begin_step,
        minutes=config.minutes,
    )


class SmallLMStudent(students.SmallLMAndTeacher):
    """A small LM that learns, with the contract of `fit`."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, **top_k: Tensor
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`), labels shifted;
        top_k: top_ids, top_logprobs [B, T, k] and tail [B, T] of `train.parts.top_k_rows`."""
        if self.training and self.on_policy is not None and self.on_policy.due(self.step):
            return {"loss_sum": self._on_own_samples(input_ids, labels, positions)}
        rows = self.rows(input_ids, labels, positions, documents)
        hidden = packed_hidden(self.stack, rows.ids, rows.positions, documents, rows.seen)
        rule, draft_vocabulary = self.stack.spec.logits, self.stack.draft_vocabulary
        tokens, size = (None, 0) if draft_vocabulary is None else (draft_vocabulary.tokens, draft_vocabulary.vocabulary)
        if self.objective == "cross_entropy":
            loss = linear_cross_entropy(*self.product(hidden), draft_indices(rows.labels, tokens, size), rule=rule)
        elif self.teacher is None:
            ids, logprobs, tail = (rows.of(top_k[name]) for name in ("top_ids", "top_logprobs", "tail"))
            cached = (draft_indices(ids, tokens, size), logprobs, tail)
            loss = linear_topk_divergence(*self.product(hidden), *cached, rows.labels, self.objective, rule=rule)
        else:
            loss = self.divergence(hidden, rows.of(self.teach(input_ids, positions, documents)), rows.labels)
        return {"loss_sum": loss / self.predictions}

    def _on_own_samples(self, input_ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """The divergence on sampled continuations: each row's mean times the number of supervised tokens of its text.

        So after the loop's division by the text's tokens each row has the same weight as in other steps.
        """
        assert self.on_policy is not None
        assert self.teacher is not None
        vocabulary = min(self.stack.head.weight.shape[0], self.teacher.head.weight.shape[0])
        text, lm = (input_ids, labels, positions), students.plain(self.lm)
        ids, new_labels, where, documents = self.on_policy.continued(lm, self.step, *text, vocabulary)
        rows = self.rows(ids, new_labels, where, documents)
        hidden = packed_hidden(self.stack, rows.ids, rows.positions, documents, rows.seen)
        taught = rows.of(self.teach(ids, where, documents))
        weights = (labels != IGNORE).sum(1) / (new_labels != IGNORE).sum(1)
        losses = [self.divergence(*row) for row in zip(hidden, taught, rows.labels, strict=True)]
        return (torch.stack(losses) * weights).sum() / self.predictions


def evaluation_of(
    config: FinetuneConfig, target: OpenTarget, heldout: TrainRows, student: SmallLMStudent, stack: LayerStack
) -> Callable[[SmallLMStudent, int], Metrics]:
    """The evaluation during training, of the model as it would be served.

    top1_target, tau_analytic: of the rows whose beginnings are the prompts (see `HeldOutText`). In addition, real
    decoding (`Decoding`) by the whole target, `stack`, and `MovedNorms`.
    """
    shape = students.plain(student.lm).config
    decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens, shape)
    text, norms = HeldOutText(heldout, 1, stack), MovedNorms(student, stored_dtype(target.config))

    def evaluate(student: SmallLMStudent, step: int) -> Metrics:
        drafter = layer_stack(student.merged(stack.dtype))
        judged = text.judge(drafter.logits_after_norm, lambda batch: (supervised_hidden(drafter, batch), None))
        analytic = () if student.parallel else ("tau_analytic",)  # it is of one pass a token
        metrics = {name: judged[name] for name in ("top1_target", *analytic) if name in judged}
        return metrics | decoding(stack, draft_model_of(drafter)) | norms(student, step)

    return evaluate


def save(
    config: FinetuneConfig, target: OpenTarget, student: SmallLMStudent, identity: dict[str, object], trained: Trained
) -> None:
    """Write the drafter, its card and, last, the record of its training."""
    drafter, subset = student.merged(stored_dtype(target.config)), student.stack.draft_vocabulary
    drafter.set_attn_implementation(stock_name(drafter))  # ours does not exist outside this project
    export(drafter, target.tokenizer, Path(config.out_dir))
    facts: dict[str, object] = {"objective": config.objective}
    facts |= {"tokens a pass": config.parallel} if config.parallel else {}
    facts |= {} if subset is None else {"tokens": f"{len(subset.tokens)} of the target's {subset.vocabulary}"}
    use = describe_use(config.parallel) if subset is None else USE_OF_SOME
    write_records(TRAINING_FILE, config, identity, trained, use, facts, trained.metrics)
