"""The toy target: a small Llama, trained from scratch on text. Its layers begin as the identity.

    python train/toy_target.py layers=6

`train_toy_target` is the whole training, `ToyTarget.forward` its step with the loss. The loop around the step is
train/core/loop.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from outrider.commands import run_script

    run_script("toy_target")

import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate.utils import reduce
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.base.errors import UserError
from outrider.base.files import write_json
from outrider.base.processes import join_processes
from outrider.base.progress import Stage, track_progress
from outrider.base.streams import Streams
from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.formats.model_name import write_name
from outrider.draft_models.losses import IGNORE, linear_cross_entropy
from outrider.draft_models.targets.open_target import special_tokens
from outrider.train.core.driver import training_run
from outrider.train.core.optimizers import layer_matrices
from outrider.train.core.training import FitResult, Metrics, Student
from outrider.train.parts.drafter import export_model, llama_config
from outrider.train.settings.toy import TOY_REPORT, ToyTargetConfig

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# A model of minutes repeats itself. A text without 8 tokens twice is no loop (`statistics.looped`), and can be judged.
NO_REPEAT = 8  # tokens


def train_toy_target(config: ToyTargetConfig) -> None:
    """Train a tokenizer and a model, measure held-out bits per byte, write a Hugging Face directory to `out_dir`."""
    start_time = time.perf_counter()
    with training_run(config) as run:
        with Stage("training the tokenizer"):
            tokenizer = train_tokenizer(read_texts(config), config.vocabulary)
        rows = load_rows(config.data, tokenizer, config.seq_len, "train")
        heldout = load_rows(config.data, tokenizer, config.seq_len, "heldout", max_rows=config.eval_rows or None)
        byte_counts, student = token_bytes(tokenizer), ToyTarget(build_lm(config, tokenizer))

        def evaluate(step: int) -> Metrics:
            return {"bits_per_byte": bits_per_byte(student, heldout, byte_counts)}

        identity = config.decisions() | {"data_key": rows.key}
        result = run.fit(
            student, rows, config.fit, identity=identity, evaluate=evaluate, last_file=TOY_REPORT,
            minutes=config.minutes,
        )  # fmt: skip
        if result is not None:
            save_target(config, student.lm, tokenizer, result, time.perf_counter() - start_time)


def read_texts(config: ToyTargetConfig) -> Iterator[str]:
    """The texts of the data; raises `UserError` for conversations."""
    for record in read_records(config.data, "train"):
        if "text" not in record:
            raise UserError("data: the toy target learns from plain text, but these are conversations")
        yield record["text"]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` ids that prepends BOS; a pure function of its arguments."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


class ToyTarget(Student):
    """A causal LM that learns."""

    def __init__(self, lm: LlamaForCausalLM) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T], labels already shifted; documents: the
        number of each token's document, within which attention stays."""
        hidden = self.lm.model(
            input_ids=input_ids, position_ids=positions, attention_mask=packed_mask(documents), use_cache=False
        ).last_hidden_state
        return {"loss_sum": linear_cross_entropy(hidden, self.lm.lm_head.weight, labels)}

    def gradient_checkpointing_enable(self) -> None:
        self.lm.gradient_checkpointing_enable()


def packed_mask(documents: Tensor) -> Tensor:
    """The causal mask within documents [B, T], for a model of transformers: bool [B, 1, T, T], True = attend."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]


def build_lm(config: ToyTargetConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model: a fixed function of the config. Every layer starts as the identity."""
    lm_config = llama_config(config, len(tokenizer), config.max_positions, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(config.fit.seed).number("weights", bits=64))
        lm = LlamaForCausalLM(lm_config)
        with torch.no_grad():
            for layer in lm.model.layers:
                for matrix in layer_matrices(layer):
                    matrix.normal_(0, 0.6 / math.sqrt(matrix.shape[1]))  # a matrix learns at its own scale
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    special_ids = special_tokens(tokenizer)
    lm.generation_config = GenerationConfig(do_sample=False, no_repeat_ngram_size=NO_REPEAT, **special_ids)
    return lm


def bits_per_byte(model: nn.Module, rows: PackedRows, byte_counts: Tensor, batch_rows: int = 8) -> float:
    """Loss on `rows` in bits per byte of the predicted text (the loss on EOS is included); split over processes.

    byte_counts: see `token_bytes`.
    """
    process_state, nats_and_bytes = join_processes(), torch.zeros(2, dtype=torch.float64)
    own_indices = range(process_state.process_index, len(rows), process_state.num_processes)
    for start in track_progress(range(0, len(own_indices), batch_rows), "judging held-out text", "batches"):
        batch = default_collate([rows[index] for index in own_indices[start : start + batch_rows]])
        labels = batch["labels"]
        loss_sum = model(**{key: value.to(process_state.device) for key, value in batch.items()})["loss_sum"]
        nats_and_bytes += torch.stack([loss_sum.cpu().double(), byte_counts[labels[labels != IGNORE]].sum().double()])
    nats, byte_count = reduce(nats_and_bytes.to(process_state.device), "sum").tolist()
    return nats / byte_count / math.log(2)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """int64 [V]: the number of bytes of text per token, 0 for special tokens."""
    byte_counts = torch.zeros(len(tokenizer), dtype=torch.long)
    for token, token_id in tokenizer.get_vocab().items():
        if token_id not in tokenizer.all_special_ids:
            byte_counts[token_id] = len(token)  # byte-level BPE writes each byte as one character
    return byte_counts


def save_target(
    config: ToyTargetConfig, lm: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, result: FitResult, seconds: float
) -> None:
    """Write the model and, last, its report. seconds: of the whole command."""
    parameter_count, out_dir = sum(p.numel() for p in lm.parameters()), Path(config.out_dir)
    report = {"bits_per_byte": result.metrics["bits_per_byte"], "parameters": parameter_count}
    report |= {"steps": result.step, "training_seconds": result.seconds}
    export_model(lm, tokenizer, out_dir)
    write_name(out_dir, f"toy-{parameter_count / 1e6:.0f}M")
    write_json(out_dir / TOY_REPORT, {**report, "seconds": seconds, "settings": config.decisions()})
    print(f"toy target: {result.metrics['bits_per_byte']:.3f} bits per byte held out, "
          f"{parameter_count / 1e6:.1f} M parameters, {result.step} steps, {seconds:.0f} s → {out_dir}")  # fmt: skip
