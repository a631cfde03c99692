"""Small LMs as drafters: trained on text, or distilled from the target.

    python train/finetune_drafter.py target=MODEL drafter.path=SMALL data=ultrachat

`finetune_drafter` is the whole training, `SmallLMStudent.forward` its step with the loss. The loop around the step is
train/core/loop.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("finetune_drafter")

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.processes import say
from outrider.draft_models.losses import IGNORE, PLAIN, head_product
from outrider.draft_models.small_lm import model as small_lm
from outrider.draft_models.targets.attention import stock_attention_name
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.model_files import empty_model, layer_stack
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.draft_models.targets.open_target import OpenTarget, pick_dtype, stored_dtype
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.draft_models.targets.unseen_target import open_given
from outrider.inference.drafters.small_lm.drafter import draft_model_of
from outrider.inference.loading.memory_plan import Plan, Storage, planned_device, target_memory
from outrider.inference.loading.models import prepare_models
from outrider.inference.loading.target_setup import end_tokens
from outrider.inference.measure.replay import RecordedSession, replay
from outrider.train.core.driver import training_run
from outrider.train.core.sharding import is_sharded
from outrider.train.core.training import FitResult, Metrics, Student, TrainRows
from outrider.train.parts.drafter import export_model, pick_tokens, require_context, require_vocabulary, write_records
from outrider.train.parts.heldout import Decoding, HeldOutText, packed_hidden, supervised_hidden
from outrider.train.parts.initial_lm import drafter_config, read_finished_vocabulary, start_lm
from outrider.train.parts.memory import fit_memory
from outrider.train.parts.objective import draft_loss, load_taught_rows
from outrider.train.parts.on_policy import OnPolicy
from outrider.train.parts.parallel import ONE_A_PASS, DraftRows, Parallel, unused_token
from outrider.train.parts.recorded_answers import are_greedy, recorded_texts
from outrider.train.settings.drafters import FinetuneConfig


def finetune_drafter(config: FinetuneConfig) -> None:
    """Train a small LM according to `config`. The drafter is `config.out_dir`, a Hugging Face directory.

    It contains the weights with the highest τ of all evaluations, not the last ones. Raises `UserError` for an unusable
    target, drafter, data set or directory, before any weight is read.
    """
    target = open_given(config)
    lm_config = drafter_config(config.drafter, target.config, target.tokenizer)
    with training_run(config, partial(plan_memory, config, target.config, lm_config)) as run:
        require_vocabulary(config.draft_vocabulary, target.config)
        for role, model_config in (("target", target.config), ("drafter", lm_config)):
            require_context(model_config, config.seq_len, config.decode_tokens, role)
        parallel = choose_parallel(config, lm_config, target.tokenizer, target.config.vocab_size)

        rows = load_taught_rows(config, target, "train")
        heldout = load_taught_rows(config, target, "heldout", config.decode_prompts)
        decoding, tau_meaning = load_prompts(config, target, heldout, lm_config)
        target = target.resize(max(rows.largest_id, heldout.largest_id, lm_config.vocab_size - 1))
        lm_config = drafter_config(config.drafter, target.config, target.tokenizer)
        draft_vocabulary = None if config.drafter.path is None else read_finished_vocabulary(config, target.config)
        if draft_vocabulary is None:
            required_ids = [parallel.mask] if config.parallel else []
            token_ids = run.from_main(lambda: pick_tokens(config.draft_vocabulary, target, rows, heldout, required_ids))
            draft_vocabulary = None if token_ids is None else DraftVocabulary(token_ids, target.config.vocab_size)

        teacher = load_target(config, target, run.device) if config.online else None  # online: it teaches in every step
        vocab_size, end_ids = target.config.vocab_size, frozenset(end_tokens(target))
        lm = start_lm(config, lm_config, target.tokenizer, run.device, draft_vocabulary, vocab_size, parallel)
        on_policy = OnPolicy(config.on_policy, config.on_policy_tokens, config.fit.seed, end_ids)
        student = SmallLMStudent(lm, config.objective, teacher, on_policy if config.on_policy > 0 else None, parallel)
        trained_count, frozen_count = student.count_parameters()
        teacher_text = f" teacher={config.teacher} on_policy={config.on_policy}" if config.distils else ""
        say(f"finetune_drafter drafter={config.drafter.path or 'new'} objective={config.objective}{teacher_text} "
            f"trained_parameters={trained_count} parameters={trained_count + frozen_count}")  # fmt: skip

        path, target_identity = config.drafter.path, run.from_main(lambda: target.identity)
        start_id = None if path is None else model_identity(open_tensors(path, config.drafter.revision))
        identity = {**config.decisions(), "target": target_identity, "drafter_model": start_id, "data_key": rows.key}
        identity |= {"tau_of": tau_meaning}
        # The evaluation is made before the fit: DeepSpeed shards every module that is constructed after its start.
        evaluate = make_evaluation(config, target, heldout, decoding, student) if run.is_main else None
        result = run.fit(
            student, rows, config.fit, identity=identity, evaluate=evaluate, saved_dtype=stored_dtype(target.config),
            keeps_best=True, last_file=small_lm.TRAINING_FILE, minutes=config.minutes,
        )  # fmt: skip
        if result is not None:
            save_drafter(config, target, student, identity, result)


def choose_parallel(
    config: FinetuneConfig, lm_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, vocab: int
) -> Parallel:
    """How many tokens the small LM `lm_config` is to draft in one pass, and the id of the mask for all but the first.

    The mask is that of the finished drafter, or a token below `vocab` that no text has. Raises `UserError` if there is
    none.
    """
    if not config.parallel:
        return ONE_A_PASS
    finished_mask, _ = small_lm.pass_tokens_of(lm_config)
    mask_id = unused_token(tokenizer, vocab) if finished_mask is None else finished_mask
    config.require("parallel", mask_id < vocab, f"0, as every token of {config.target or config.tokenizer} may be text")
    return Parallel(config.parallel, mask_id, config.fit.seed, config.position_weights)


def load_prompts(
    config: FinetuneConfig, target: OpenTarget, heldout: TrainRows, lm_config: PreTrainedConfig
) -> tuple[Decoding, str]:
    """The held-out prompts, with recorded answers if no target is to decode them; and the meaning of their τ, printed.

    A target is seen if its weights are here: else only its tokenizer is.
    """
    if target.is_seen:
        decoding = Decoding.of(target, heldout, config.decode_prompts, config.decode_tokens, lm_config)
        return decoding, "that of greedy decoding"
    texts, is_by_target = recorded_texts(config.data, target.tokenizer, config.decode_prompts)
    max_prompt_len = min(map(context_limit, (target.config, lm_config))) - config.decode_tokens
    texts = [heldout_text for heldout_text in texts if len(heldout_text.prompt) <= max_prompt_len]
    config.require("decode_prompts", bool(texts), "held-out answers after prompts that leave room for decode_tokens")
    tau_meaning = "teacher-forced, on text that may differ from the target's greedy answers"
    if is_by_target and are_greedy(config.data):
        tau_meaning = "that of greedy decoding, by replay of the target's recorded answers"
    say(f"finetune_drafter answers={len(texts)} eval_tau is {tau_meaning}")
    return Decoding(texts, config.decode_tokens, end_tokens(target)), tau_meaning


def load_target(config: FinetuneConfig, target: OpenTarget, device: torch.device) -> LayerStack:
    """The whole target: the teacher, or else prepared to decode held-out prompts."""
    dtype, decodes_only = pick_dtype(config.frozen_dtype, target.config, device), not config.online
    # coded: a CPU decodes with quantised weights as they are stored.
    stack = target.stack(dtype=dtype, device=device, coded=decodes_only and device.type == "cpu")
    if decodes_only:
        prepare_models(stack, drafters={})
    return stack


class SmallLMStudent(Student):
    """A float32 small LM `lm`, of which the parameters that require a gradient learn: all of them, or LoRA adapters.

    objective: cross_entropy on the labels, or one of `draft_models.losses.DIVERGENCES` from `teacher`, the whole
    target. Without a teacher a divergence needs the target's cached top-k in the rows. The teacher is not a submodule:
    it is not trained, saved or wrapped. on_policy: in some steps rows are continuations by the small LM itself.
    parallel: drafts of several tokens in one pass. stack: the layers of the small LM, adapters included.
    """

    stack: LayerStack
    teacher: LayerStack | None

    def __init__(
        self,
        lm: PreTrainedModel,
        objective: str,
        teacher: LayerStack | None = None,
        on_policy: OnPolicy | None = None,
        parallel: Parallel = ONE_A_PASS,
    ):
        super().__init__()
        self.lm, self.objective, self.on_policy, self.parallel = lm, objective, on_policy, parallel
        stack = layer_stack(unwrap_lm(lm), rotary_dtype=torch.float32)
        vars(self).update(stack=stack, teacher=teacher)  # as submodules their parameters would be saved

    def begin_step(self, step: int) -> None:
        """Raises `UserError` if parameters are sharded: every forward gathers them from all processes, but sampling
        needs a different number of forwards on each process."""
        if self.on_policy is not None and any(map(is_sharded, self.parameters())):
            raise UserError("on_policy: needs whole parameters; use ddp or zero2, or on_policy=0")
        super().begin_step(step)

    def gradient_checkpointing_enable(self) -> None:
        unwrap_lm(self.lm).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @property
    def saved_part(self) -> "SmallLMStudent":
        """All of it: adapters are merged into frozen weights."""
        return self

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, **top_k: Tensor
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`), labels shifted;
        top_k: top_ids, top_logprobs [B, T, k] and tail [B, T] of `train.parts.top_k_rows`.
        With `parallel` the N positions are the T of the text and the masks of drafts after them, else T."""
        row_weights = None
        if self.training and self.on_policy is not None and self.on_policy.is_due(self.step):
            input_ids, labels, positions, documents, row_weights = self.sample_rows(input_ids, labels, positions)
        rows = self.parallel.add_masks(self, self.stack, input_ids, labels, positions, documents)
        hidden = packed_hidden(self.stack, rows.ids, rows.positions, documents, rows.masks)  # [B, N, d]
        teacher_states = None if self.teacher is None else rows.expand(self.teach(input_ids, positions, documents))
        top_k = {name: rows.expand(values) for name, values in top_k.items()}
        loss_weights = None if row_weights is None else row_weights[:, None].expand_as(rows.labels)  # [B, N]
        return {"loss_sum": self.loss(hidden, rows, teacher_states, top_k, loss_weights) / rows.expected_predictions}

    def loss(
        self,
        hidden: Tensor,
        rows: DraftRows,
        teacher_states: Tensor | None,
        top_k: Mapping[str, Tensor],
        shares: Tensor | None,
    ) -> Tensor:
        """The loss of the student's states `hidden` [B, N, d] on `rows`, summed over supervised positions.

        The loss compares with `teacher_states` [B, N, d'], or with the cached top k of the same positions. shares
        [B, N]: weights of the positions.
        """
        # A rule is a function from products to logits, such as a scale; factors are states and a matrix.
        rule, target_rule, target_factors = self.stack.spec.logits, PLAIN, None
        vocabulary = self.stack.draft_vocabulary
        draft_tokens, vocab_size = (None, 0) if vocabulary is None else (vocabulary.tokens, vocabulary.vocabulary)
        states, matrix = head_product(self.stack.head, hidden)
        if draft_tokens is not None:
            matrix = matrix[: len(draft_tokens)]  # without the row for tokens outside, which is never proposed
        if teacher_states is not None:
            assert self.teacher is not None
            target_factors, target_rule = head_product(self.teacher.head, teacher_states), self.teacher.spec.logits
        return draft_loss(
            self.objective, (states, matrix), rows.labels, draft_tokens, vocab_size, rule=rule, target=target_factors,
            target_rule=target_rule, top_k=top_k, slots=rows.slots, shares=shares,
        )  # fmt: skip

    def sample_rows(self, input_ids: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Continuations of rows [B, T] by the small LM: ids, labels, positions, documents [B, T'] and row weights [B].

        The loss of a continuation is its mean times the number of supervised tokens of its text. So after the loop's
        division by the text's tokens each row has the same weight as in other steps.
        """
        assert self.on_policy is not None
        assert self.teacher is not None
        vocab_size, lm = min(len(self.stack.head.weight), len(self.teacher.head.weight)), unwrap_lm(self.lm)
        sampled_rows = self.on_policy.continue_rows(lm, self.step, input_ids, labels, positions, vocab_size)
        _, sampled_labels, _, _ = sampled_rows
        return *sampled_rows, (labels != IGNORE).sum(1) / (sampled_labels != IGNORE).sum(1)

    @torch.no_grad()
    def teach(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """The teacher's states [B, T, d'] after its last norm."""
        assert self.teacher is not None
        with torch.autocast(input_ids.device.type, enabled=False):
            return packed_hidden(self.teacher, input_ids, positions, documents)

    def merge_adapters(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model to serve: a frozen copy in `dtype`, adapters merged in float32."""
        lm = copy.deepcopy(self.lm)
        if unwrap_lm(lm) is not lm:
            lm = lm.merge_and_unload()  # type: ignore[operator]
        return lm.to(dtype).requires_grad_(False).eval()  # type: ignore[arg-type]


def unwrap_lm(lm: PreTrainedModel) -> PreTrainedModel:
    """The LM itself, without peft's wrapper."""
    return lm.get_base_model() if hasattr(lm, "peft_config") else lm  # type: ignore[operator]


def make_evaluation(
    config: FinetuneConfig, target: OpenTarget, heldout: TrainRows, decoding: Decoding, student: SmallLMStudent
) -> Callable[[int], Metrics]:
    """The evaluation during training, of the model as it would be served.

    top1_target, tau_analytic: of the held-out rows, one at a time (see `HeldOutText`). tau, accept_<i>: of `decoding`,
    by replay of its answers. The whole target, if its weights are here, writes the answers once, before training.
    """
    device = student.stack.device
    target_stack = (student.teacher or load_target(config, target, device)) if target.is_seen else None
    decoding = decoding if target_stack is None else decoding.answer(target_stack)
    heldout_text, dtype = HeldOutText(heldout, 1, target_stack), pick_dtype(config.frozen_dtype, target.config, device)
    new_session = partial(RecordedSession, vocabulary=target.config.vocab_size, device=device)

    def evaluate(step: int) -> Metrics:
        drafter = layer_stack(student.merge_adapters(dtype))
        scores = heldout_text.judge(drafter.logits_after_norm, lambda batch: (supervised_hidden(drafter, batch), None))
        tau_names = () if config.parallel else ("tau_analytic",)  # it is of one pass a token
        metrics = {name: scores[name] for name in ("top1_target", *tau_names) if name in scores}
        return metrics | decoding.measure(partial(replay, session=new_session), draft_model_of(drafter))

    return evaluate


def save_drafter(
    config: FinetuneConfig, target: OpenTarget, student: SmallLMStudent, identity: dict[str, object], result: FitResult
) -> None:
    """Write the drafter, its card and, last, the record of its training, which contains the `identity` of the run."""
    drafter, vocabulary = student.merge_adapters(stored_dtype(target.config)), student.stack.draft_vocabulary
    drafter.set_attn_implementation(stock_attention_name(drafter))  # ours does not exist outside this project
    export_model(drafter, target.tokenizer, Path(config.out_dir))
    card_facts: dict[str, object] = {"objective": config.objective}
    card_facts |= {"tokens a pass": config.parallel} if config.parallel else {}
    if vocabulary is not None:
        card_facts |= {"tokens": f"{len(vocabulary.tokens)} of the target's {vocabulary.vocabulary}"}
    card_facts |= {} if target.is_seen else {"target's weights": "not seen, only its vocabulary"}
    card_facts["τ"] = identity["tau_of"]
    usage = small_lm.describe_use(config.parallel) if vocabulary is None else small_lm.USE_OF_SOME
    write_records(config, usage, card_facts, result, result.metrics, record_parts=(small_lm.TRAINING_FILE, identity))


def plan_memory(config: FinetuneConfig, target_config: PreTrainedConfig, lm_config: PreTrainedConfig) -> Plan:
    """The memory of training a small LM of config `lm_config`, with a target of this config."""
    storage = Storage.of(config.frozen_dtype, target_config, config.seq_len, planned_device())
    memories = target_memory(target_config, storage) if config.target else []  # 0 below: reads no target states
    return Plan([*memories, *fit_memory(config, empty_model(lm_config), 0, target_config.vocab_size)], {})
