"""Prompts in two files, for training and for evaluation: a target's own (Magpie, arXiv 2406.08464), or those of a file.

train.jsonl    prompts to answer (generate-responses), {"id", "category", "turns" or "prompt"}
heldout.jsonl  prompts for evaluation, in the same layout
prompts.json   what they were made of, their counts, and the SHA-256 of each file; written last
written/       the texts that the target has written (see `directory`)
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from accelerate import PartialState

from outrider.base.files import as_json_lines, require_writable, write_atomically, write_json
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.run_dirs import is_finished
from outrider.data_prep.settings import PromptsConfig
from outrider.data_prep.text.chat import question_affixes
from outrider.data_prep.text.prompt_records import Prompt, as_record
from outrider.data_prep.text.prompts import read_prompts, split_prompts
from outrider.data_prep.text.settings import ChatTemplate, DataConfig, prompt_file
from outrider.data_prep.text.sources import Split
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from outrider.draft_models.targets.vocabulary import bind_arguments
from outrider.inference.batch.directory import answered_ids, list_shards, read_shard
from outrider.inference.batch.generate import generate
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import WRITTEN_ONLY, Task, Todo

_LONGEST, _MIN_CHARS = 128, 16  # tokens that the target writes for a prompt, at most; characters of a prompt, at least


def write_prompts(config: PromptsConfig) -> None:
    """Write both files to `config.out_dir`: of `config.file`, else of what `config.target` writes. Raises `UserError`,
    also for a target that writes too few prompts."""
    state, folder = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, folder, "prompts", config.resume):
        file, identity = None if config.file is None else prompt_file(config.file, "file"), config.decisions()
        if file is not None:
            identity["file"] = hashlib.sha256(file.read_bytes()).hexdigest()
        else:
            target = open_target(str(config.target), config.revision, by_layers=False)
            identity["model"] = model_identity(target.files)
        is_complete = file is not None or len(answered_ids(folder / "written")) >= config.count  # fewer: time was up
        if is_finished(folder / "prompts.json", identity, config.resume) and is_complete:
            print(f"{folder}: finished already")
            return
        if file is None:
            _write_texts(config, target, folder / "written", state)

        def save() -> None:
            prompts = read_prompts(str(file)) if file else _extract_prompts(config, target, folder / "written")
            splits = split_prompts(prompts, config.heldout_fraction, config.file or target.source, by_hash=file is None)
            _save_split(splits, folder, identity)

        from_main(state, save)


def _write_texts(config: PromptsConfig, target: OpenTarget, folder: Path, state: PartialState) -> None:
    """Let the target write `config.count` texts after the tokens with which its template begins a question. Each text
    depends on the seed and its number, which is also its id, in hex as all ids of prompts."""
    prefix_ids, _ = question_affixes(bind_arguments(target.tokenizer, config.chat_template_kwargs), config.template)

    def tasks(_: object, __: object, context: int, selects: Callable[[Task], bool]) -> Todo:
        texts = (Task(f"{number:032x}", f"text {number}", WRITTEN_ONLY, prefix_ids) for number in range(config.count))
        return Todo(context, [*filter(selects, texts)])

    options = {name: getattr(config, name) for name in ("revision", "dtype", "minutes", "batch_size", "seed", "resume")}
    options |= {"temperature": 0.9, "greedy_tokens": 0, "max_new_tokens": _LONGEST, "shard_size": 4 * config.batch_size}
    options["smallest_batch"] = 30  # texts, of which some are no prompts
    template: ChatTemplate = "tokenizer" if config.template == "auto" else config.template
    data = DataConfig(template=template, chat_template_kwargs=config.chat_template_kwargs)
    settings = GenerateConfig(target=target.source, data=data, out_dir=str(folder), **options)
    generate(settings, require_writable(folder), state, tasks)


def _extract_prompts(config: PromptsConfig, target: OpenTarget, folder: Path) -> list[Prompt]:
    """The prompts in the texts, by number. A user's turn must have its end; the beginning of a document needs none."""
    prompts, tokenizer = list[Prompt](), bind_arguments(target.tokenizer, config.chat_template_kwargs)
    prefix_ids, end_text = question_affixes(tokenizer, config.template)
    special_texts = [token.content for token in target.tokenizer.added_tokens_decoder.values() if token.special]
    records = [response.record for shard in list_shards(folder) for response in read_shard(shard)]
    for record in sorted(records, key=lambda record: str(record["id"])):
        ids, has_end = record["written"]["documents"][0]["ids"][len(prefix_ids) :], record["finish"] == "end"
        turn_text = str(target.tokenizer.decode(ids[: len(ids) - has_end], clean_up_tokenization_spaces=False))
        text = (turn_text.partition(end_text)[0] if end_text else turn_text.rstrip("\ufffd")).strip()
        is_complete = has_end or not end_text or end_text in turn_text
        if len(text) >= _MIN_CHARS and is_complete and not any(mark in text for mark in special_texts):
            prompt_hash = hashlib.sha256(json.dumps([text]).encode()).hexdigest()[:16]
            prompts.append(Prompt(prompt_hash, category="own", turns=(text,), chat=bool(end_text)))
    return prompts


def _save_split(splits: Mapping[Split, list[Prompt]], folder: Path, identity: Mapping[str, object]) -> None:
    split_facts: dict[str, object] = {}
    (folder / "prompts.json").unlink(missing_ok=True)  # which says that both halves are of one run
    for split, prompts in splits.items():
        jsonl_bytes = as_json_lines(as_record(prompt) for prompt in prompts)
        write_atomically(folder / f"{split}.jsonl", jsonl_bytes)
        by_category, digest = Counter(prompt.category for prompt in prompts), hashlib.sha256(jsonl_bytes).hexdigest()
        split_facts[split] = {"prompts": len(prompts), "categories": by_category, "sha256": digest}
    write_json(folder / "prompts.json", {"made_of": identity, **split_facts})
    print(f"write_prompts out_dir={folder} train={len(splits['train'])} heldout={len(splits['heldout'])}", flush=True)
