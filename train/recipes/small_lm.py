"""Recipe for small LMs as drafters: trained on text, or distilled from the target.

The training step is `SmallLMStudent` (train/parts/small_lm.py).
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from accelerate import PartialState

from data_prep.text.rehearsal import rehearsable
from data_prep.text.rows import load_rows
from draft_models.card import write_card
from draft_models.small_lm.model import TRAINING_FILE, USE, USE_OF_SOME
from draft_models.targets.attention import stock_name
from draft_models.targets.empty_models import empty_model, layer_stack
from draft_models.targets.fingerprint import model_identity
from draft_models.targets.narrowed import DraftVocabulary
from draft_models.targets.open_target import OpenTarget, open_target, pick_dtype, stored_dtype
from draft_models.targets.stack import LayerStack
from draft_models.targets.tensor_files import open_tensors
from inference.drafters.small_lm import SmallLMSource
from inference.loading.memory_plan import Held, Place, explained, planned_device, target_memory
from outrider.processes import from_main, say
from train.core.driver import run_training
from train.core.training import Metrics, Trained, Training, TrainRows
from train.parts.drafter import (
    export,
    fit_memory,
    parameters_of,
    pick_tokens,
    require_context,
    require_vocabulary,
    write_record,
)
from train.parts.heldout import Decoding, HeldOutText, evaluation, judged
from train.parts.small_lm import OnPolicy, SmallLMStudent, drafter_config, start_lm, tokens_of_finished
from train.parts.top_k_rows import load_taught_rows
from train.settings.drafters import FinetuneConfig


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


def prepare(config: FinetuneConfig, state: PartialState) -> Training[SmallLMStudent]:
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
        best_of=identity,
        saved_whole=student,  # adapters are merged into frozen weights
        on_step=student.begin_step,
        minutes=config.minutes,
    )


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
    out_dir, metrics = Path(config.out_dir), trained.metrics
    drafter = student.merged(stored_dtype(target.config))
    drafter.set_attn_implementation(stock_name(drafter))  # ours does not exist outside this project
    export(drafter, target.tokenizer, out_dir)
    facts: dict[str, object] = {"objective": config.objective, "data": config.data.source}
    facts |= {} if own is None else {"tokens": f"{len(own.tokens)} of the target's {own.vocabulary}"}
    facts |= {"steps": trained.result.steps, "chosen step": trained.step}
    facts |= {name: round(value, 3) for name, value in metrics.items()}
    write_card(out_dir, USE if own is None else USE_OF_SOME, config.target, facts)
    write_record(out_dir / TRAINING_FILE, config.target, identity, config.fit, trained)
    shown = " ".join(f"{name}={value:.4f}" for name, value in metrics.items())
    say(f"saved drafter={out_dir} step={trained.step} {shown}")
