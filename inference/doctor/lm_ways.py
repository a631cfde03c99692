"""What can be examined of early exits and small LMs, which are read in one way only."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from draft_models.checkpoint import read_meta
from draft_models.early_exit import EarlyExit
from draft_models.small_lm import TRAINING_FILE
from draft_models.target.fingerprint import Fingerprint
from draft_models.target.open_target import OpenTarget, load_tokenizer
from inference.doctor.drafting import draft_by_exit, draft_by_lm
from inference.doctor.patient import Fact, Patient, Way
from outrider.errors import UserError
from outrider.files import read_json
from outrider.settings import construct

DECLARED = "as declared"


def patient_of_exit(drafter: EarlyExit, where: str, stack: Any, known: Any) -> Patient:
    """An early exit that is prepared to decode on `stack`; known: the only tokens that it predicts, None for all."""
    meta = read_meta(where)
    return Patient(
        Way(DECLARED, partial(draft_by_exit, drafter, stack)),
        boundaries=(drafter.exit_layer,),
        known_tokens=known,
        facts=[
            Fact("made for", f"{meta.fingerprint.target}, whose digests are this target's"),
            _numbers(meta.dtype, stack.dtype),
        ],
        data=meta.training.get("data"),
    )


def patient_of_lm(lm: Any, where: str, target: OpenTarget, known: Any) -> Patient:
    """A small LM for `target`; known as above."""
    file = Path(where) / TRAINING_FILE
    report = read_json(file, "record of a training", "remove it, or restore it") if file.is_file() else {}
    report = report if isinstance(report, dict) else {}
    recorded = report.get("settings")
    settings: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    stored = getattr(lm.config, "dtype", None) or "a type not said"
    return Patient(
        Way(DECLARED, partial(draft_by_lm, lm)),
        known_tokens=known,
        facts=[*_made_for(report, settings, target), _numbers(str(stored), lm.dtype)],
        data=settings.get("data"),
        tokenizer=load_tokenizer(where, role="small_lm"),
    )


def _numbers(stored: str, run: Any) -> Fact:
    said, here = stored.removeprefix("torch."), str(run).removeprefix("torch.")
    narrow = here == "float16" and said != here
    return Fact("numbers", f"stored in {said}, run in {here}" + ", whose range is smaller" * narrow, narrow)


def _made_for(report: Mapping[str, Any], settings: Mapping[str, Any], target: OpenTarget) -> list[Fact]:
    """Whether the target is the one that a training had, as far as that was recorded."""
    if not report:
        return [Fact("made for", "not known: no record of its training")]
    name = report.get("target", "a target not said")
    try:
        differs = construct(Fingerprint, settings.get("target")).differences(target.fingerprint)
    except UserError:
        return [Fact("made for", f"{name}, whose weights were not recorded")]
    if not differs:
        return [Fact("made for", f"{name}, whose digests are this target's")]
    return [Fact("made for", f"{name}, not this target ({'; '.join(differs)})", True)]
