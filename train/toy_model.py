"""The toy target: a byte-level BPE tokenizer and a small Llama, both trained from scratch."""

import functools
import importlib.util
import math
import os
import shutil
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from data_prep.text.rows import Rows, load_rows
from data_prep.text.sources import read_records
from draft_models.losses import IGNORE, linear_cross_entropy
from draft_models.targets.attention import packed_mask
from outrider.errors import UserError
from outrider.files import require_writable, write_json
from outrider.processes import join_processes, only_run_of
from outrider.progress import Stage, counted
from outrider.streams import Streams
from train.export import export, special_tokens
from train.fit import fit
from train.optimizers import layer_matrices
from train.settings import TOY_REPORT, ToyTargetConfig

BOS, EOS, PAD = "<s>", "</s>", "<pad>"


class ToyTarget(nn.Module):
    """A causal LM with the forward contract of `fit`."""

    def __init__(self, lm: LlamaForCausalLM) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor) -> dict[str, Tensor]:
        """All [B, T]; labels pre-shifted, attention within a document only. Returns the summed loss."""
        hidden = self.lm.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=packed_mask(documents),
            use_cache=False,
        ).last_hidden_state
        return {"loss_sum": linear_cross_entropy(hidden, self.lm.lm_head.weight, labels)}

    def gradient_checkpointing_enable(self) -> None:
        self.lm.gradient_checkpointing_enable()


def train_toy_target(config: ToyTargetConfig) -> None:
    """Tokenizer, training, held-out bits per byte; leaves a Hugging Face directory in `out_dir`."""
    transformers_logging.disable_progress_bar()
    process, out_dir = join_processes(), require_writable(config.out_dir)
    with only_run_of(process, out_dir, "a training"):
        _train(config, out_dir, process)


def _train(config: ToyTargetConfig, out_dir: Path, process: PartialState) -> None:
    began = time.perf_counter()
    with Stage("training the tokenizer"):
        tokenizer = train_tokenizer(_texts(config), config.vocabulary)
    rows = load_rows(config.data, tokenizer, config.seq_len, "train")
    heldout = load_rows(config.data, tokenizer, config.seq_len, "heldout", max_rows=config.eval_rows or None)
    sizes = token_bytes(tokenizer)
    model = ToyTarget(build_lm(config, tokenizer))
    if can_compile(process.device) if config.compile is None else config.compile:
        compile_layers(model.lm)
    result = fit(
        model,
        rows,
        config.fit,
        out_dir,
        resume=config.resume,
        identity=config.deciding() | {"data_key": rows.key},
        settings=config,
        evaluate=lambda fitted, _: {"bits_per_byte": bits_per_byte(fitted, heldout, sizes)},
        minutes=config.minutes,
    )
    report = {
        "bits_per_byte": result.metrics["bits_per_byte"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": result.steps,
        "training_seconds": result.seconds,
        "seconds": time.perf_counter() - began,
        "sample": greedy_sample(model.lm, tokenizer, heldout, config.sample_tokens),
        "settings": config.deciding(),
    }
    if process.is_main_process:
        export(model.lm, tokenizer, out_dir)
        write_json(out_dir / TOY_REPORT, report)
        print(describe(report, out_dir))


def _texts(config: ToyTargetConfig) -> Iterator[str]:
    for record in read_records(config.data, "train"):
        if "text" not in record:
            raise UserError("data: the toy target learns from plain text, but these are conversations")
        yield record["text"]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocabulary` ids that puts BOS in front; a function of its arguments."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
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


def build_lm(config: ToyTargetConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model: a fixed function of the config. Every layer starts as the identity."""
    special = special_tokens(tokenizer)
    lm_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tied,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(config.fit.seed).number("weights", bits=64))
        lm = LlamaForCausalLM(lm_config)
        with torch.no_grad():
            for layer in lm.model.layers:
                for matrix in layer_matrices(layer):
                    matrix.normal_(0, 0.6 / math.sqrt(matrix.shape[1]))  # a matrix learns at its own scale
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    lm.generation_config = GenerationConfig(do_sample=False, **special)
    return lm


def can_compile(device: torch.device) -> bool:
    """Whether `torch.compile` pays and works here: on a GPU, with Triton, a C compiler and Python's headers at hand."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()  # often a package of its own
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None and compiler is not None and headers


def compile_layers(lm: LlamaForCausalLM, backend: str = "inductor") -> None:
    """Compile the transformer layers in place, one compilation for all; parameters keep their names."""
    for layer in lm.model.layers:
        layer.compile(backend=backend, dynamic=False)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """int64 [V]: how many bytes of text each token stands for, 0 for special ones."""
    sizes = torch.zeros(len(tokenizer), dtype=torch.long)
    for token, index in tokenizer.get_vocab().items():
        if index not in tokenizer.all_special_ids:
            sizes[index] = len(token)  # byte-level BPE writes each byte as one character
    return sizes


@torch.compiler.set_stance("force_eager")  # other shapes than in training: each would be compiled again
def bits_per_byte(model: nn.Module, rows: Rows, sizes: Tensor, batch_rows: int = 8) -> float:
    """Loss of `rows` in bits per byte of the text predicted (EOS costs bits too); split over processes."""
    process = join_processes()
    sums = torch.zeros(2, dtype=torch.float64)
    mine = range(process.process_index, len(rows), process.num_processes)
    for start in counted(range(0, len(mine), batch_rows), "judging held-out text", "batches"):
        batch = default_collate([rows[index] for index in mine[start : start + batch_rows]])
        labels = batch["labels"]
        loss = model(**{key: value.to(process.device) for key, value in batch.items()})["loss_sum"]
        sums += torch.stack([loss.cpu().double(), sizes[labels[labels != IGNORE]].sum().double()])
    nats, size = reduce(sums.to(process.device), "sum").tolist()
    return nats / size / math.log(2)


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def greedy_sample(
    lm: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Rows,
    new_tokens: int,
    prompt_tokens: int = 48,
) -> str:
    """A held-out beginning, `⟫`, and the model's greedy continuation; empty for no tokens."""
    if not new_tokens:
        return ""
    prompt = rows[len(rows) // 2]["input_ids"][:prompt_tokens][None].to(lm.device)
    mask = torch.ones_like(prompt)
    text = lm.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens)[0]  # type: ignore[misc]
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    return f"{decode(text[: prompt.shape[1]])}⟫{decode(text[prompt.shape[1] :])}"


def describe(report: dict[str, Any], out_dir: Path) -> str:
    """The report for the screen."""
    sample = f"greedy text after ⟫:\n{report['sample']}\n" if report["sample"] else ""
    return (
        f"{sample}toy target: {report['bits_per_byte']:.3f} bits per byte held out, "
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['steps']} steps, "
        f"{report['seconds']:.0f} s → {out_dir}"
    )
