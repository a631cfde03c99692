"""What can be examined of early exits and small LMs, which are read in one way only."""

from functools import partial

from draft_models.early_exit.checkpoint import read_meta
from draft_models.early_exit.model import EarlyExit
from draft_models.small_lm.model import TRAINING_FILE
from draft_models.targets.architectures import read_config
from draft_models.targets.open_target import OpenTarget, load_tokenizer
from draft_models.targets.target import Target, require_layers
from inference.doctor.drafting import draft_by_exit, draft_by_lm
from inference.doctor.patient import Fact, Patient, Way, numbers
from inference.doctor.training_data import made_for, recorded_settings
from inference.drafters.calibrated import Calibrated
from inference.drafters.small_lm import Model, small_lm_of
from inference.settings.kinds import Maker, read_record

DECLARED = "as declared"


def patient_of_exit(
    maker: Maker[Calibrated[EarlyExit]], model: Calibrated[EarlyExit], where: str, target: OpenTarget, stack: Target
) -> Patient:
    """An early exit that is prepared to decode on `stack`."""
    drafter = model.drafter
    meta = read_meta(where)
    return Patient(
        Way(DECLARED, partial(draft_by_exit, drafter, require_layers(stack)), boundaries=(drafter.exit_layer,)),
        known_tokens=maker.known_tokens(where),
        facts=[
            Fact("made for", f"{meta.fingerprint.target}, whose digests are this target's"),
            numbers(meta.dtype, stack.dtype),
        ],
        data=meta.training.get("data"),
    )


def patient_of_lm(maker: Maker[Model], model: Model, where: str, target: OpenTarget, stack: Target) -> Patient:
    """A small LM for `target`."""
    lm = small_lm_of(model)
    record = read_record(where, TRAINING_FILE)
    stored = read_config(where, role="small_lm").dtype  # that of a model that is loaded says what it runs in
    return Patient(
        Way(DECLARED, partial(draft_by_lm, lm)),
        known_tokens=maker.known_tokens(where),
        facts=[made_for(record, target), numbers(stored, lm.dtype)],
        data=recorded_settings(record).get("data"),
        tokenizer=load_tokenizer(where, role="small_lm"),
    )
