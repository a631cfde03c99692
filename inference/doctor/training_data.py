"""Facts from a drafter's training record: its target, its data, and the share of the data that was supervised."""

from collections.abc import Iterator, Mapping
from itertools import islice

from transformers import PreTrainedTokenizerBase

from data_prep.text.chat import encode
from data_prep.text.records import Counts
from data_prep.text.settings import DataConfig
from data_prep.text.sources import read_records
from draft_models.targets.fingerprint import Fingerprint
from draft_models.targets.open_target import OpenTarget
from inference.doctor.examinee import Fact
from inference.loading.templates import templates_of
from outrider.errors import UserError
from outrider.settings import construct

RECORDS = 32  # number of training records that are read
NOT_KNOWN = Fact("learned from", "not known: no record of its data")
UNSEEN = Fact(
    "not to be seen", "a loss mask that was not shifted with the labels, and too little or foreign training text"
)


def recorded_settings(record: Mapping[str, object]) -> Mapping[str, object]:
    """The settings in a training record; empty if it has none."""
    settings = record.get("settings")
    return settings if isinstance(settings, dict) else {}


def made_for(record: Mapping[str, object], target: OpenTarget) -> Fact:
    """Whether the target is the one of the training, as far as its `record` tells."""
    if not record:
        return Fact("made for", "not known: no record of its training")
    name = record.get("target", "a target not said")
    try:
        differs = construct(Fingerprint, recorded_settings(record).get("target")).differences(target.fingerprint)
    except UserError:
        return Fact("made for", f"{name}, whose weights were not recorded")
    if not differs:
        return Fact("made for", f"{name}, whose digests are this target's")
    return Fact("made for", f"{name}, not this target ({'; '.join(differs)})", True)


def training_facts(data: object, tokenizer: PreTrainedTokenizerBase, template: str | None) -> Iterator[Fact]:
    """Facts about `data`, the recorded settings of the training data (None: not recorded).

    template: the one that renders this evaluation's conversations; None: it has no conversations.
    """
    try:
        config: DataConfig = construct(DataConfig, data)
    except UserError:
        yield NOT_KNOWN
        return
    learned = templates_of(config.deciding(), tokenizer)
    if template is not None and learned:
        here = "tokenizer" if template == "auto" else template
        said = f"trained with {' and '.join(sorted(learned))}, prompts are rendered by {here}"
        yield Fact("template", said, here not in learned)
    yield learned_from(config, tokenizer)


def learned_from(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Fact:
    """The share of supervised tokens in the first records of the training data. Nothing is downloaded."""
    sources = {config.source} if config.source != "mix" else {part.source for _, _, part in config.parts()}
    if "hub" in sources:
        return Fact("learned from", "not looked at: its data lies on the Hub")
    try:
        records = list(islice(read_records(config, "train"), RECORDS))
        documents = encode(records, tokenizer, config.template, Counts())
    except UserError as error:
        return Fact("learned from", f"not known: its data cannot be read any more ({error})")
    tokens = sum(len(one.ids) for one in documents)
    share = sum(int(one.supervised.sum()) for one in documents) / max(1, tokens)
    said = f"{share:.1%} of the {tokens} tokens of its first {len(records)} records"
    return Fact("learned from", said, suspect=share == 0)
