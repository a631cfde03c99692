"""What tests of generated responses share: a talkative tokenizer, prompts, and reading what came of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.batch.directory import list_shards, read_shard
from outrider.inference.engines.cpu.recorded import decide_by_rule
from outrider.inference.engines.packing import lay_out
from tests.tiny import open_stack, save_target

ENDS = [257, *range(182, 198), *range(199, 257)]  # the end token, and others, so that answers end after a while
TEMPLATE = (
    "{% if messages[0].content == 'refused' %}{{ raise_exception('no') }}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


# what a process is that runs alone on the CPU, also where there is a GPU
ALONE = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0, is_main_process=True,
                        wait_for_everyone=lambda: None)  # fmt: skip


def letter_tokenizer():
    """One token per character, so that whatever is generated is a text that has just these tokens."""
    letters = [*map(chr, range(32, 127)), *map(chr, range(0x4E00, 0x4E00 + 161))]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_answering(path: Path, ends: list[int] = ENDS, **changes: object) -> Path:
    """Write a target of 160 positions, whose keys texts of more change, that speaks in letters and ends at `ends`."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 160}
    save_target(path, max_position_embeddings=320, rope_parameters=rope, **changes)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    letter_tokenizer().save_pretrained(path)
    return path


def talk(*turns):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


TALKS = [talk(f"question {i}", "an answer", "more? " + "x" * (7 * i % 40)) for i in range(10)]


def read_responses(folder):
    """Every response in the directory."""
    return [response for shard in list_shards(Path(folder)) for response in read_shard(shard)]


def responses(config):
    """{id: record}; no id is there twice."""
    found = [response.record for response in read_responses(config.out_dir)]
    assert len({record["id"] for record in found}) == len(found)
    return {record["id"]: record for record in found}


def skipped(config):
    files = sorted(Path(config.out_dir).glob("skipped-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def summary(config):
    return json.loads((Path(config.out_dir) / "summary.json").read_text())


def layers_of(path: Path, dtype: torch.dtype = torch.float32) -> LayerStack:
    """The layers of the target in `path`, as answers are decoded by them."""
    stack = open_stack(path, dtype)[1]
    with decide_by_rule():
        lay_out(stack, torch.device("cpu"))
    return stack
