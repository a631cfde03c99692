"""Tiny random models for rehearsing a command, created without a network: a target, and drafters of every kind.

A `Reading` has the sizes and conventions by which the files of a draft head are read. Its taps are the boundaries of
the target's layers whose hidden states the head reads.
"""

import copy
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from outrider.base.errors import UserError, reason
from outrider.base.files import write_json
from outrider.draft_models.calibration import drafter_digest, save_calibration
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.dflash.checkpoint import save_drafter
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.dflash.reading import BlockReading
from outrider.draft_models.eagle3.checkpoint import head_shapes, save_head
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import Reading
from outrider.draft_models.early_exit.checkpoint import read_meta, save_pretrained
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS
from outrider.draft_models.heads.files import DRAFT_TOKENS, module_shapes
from outrider.draft_models.heads.sizes import Shapes
from outrider.draft_models.mtp.model import MtpHead
from outrider.draft_models.mtp.reading import read_shapes
from outrider.draft_models.mtp.spellings import qwen_name
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.settings import DFLASH, EAGLE3, EARLY_EXIT, HEAD_FOLDER, MTP, SMALL_LM, TABLE, TARGET
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.draft_models.targets.vocabulary import vocabulary_digest

WINDOW = 48  # of sliding attention: shorter than the texts of a rehearsal
VOCABULARY = 260  # 256 bytes, then <s>, </s>, <pad> and one spare
_SIZES = {  # of a config, where it has them
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "ffn_dim": 96, "word_embed_proj_dim": 64,
    "sliding_window": WINDOW, "max_window_layers": 2, "moe_intermediate_size": 96, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip
LLAMA = LlamaConfig(pad_token_id=0)  # not None, so that `shrink_config` sets the id


def save_tiny_models(folder: Path, base: PreTrainedConfig | None = None) -> str:
    """Write random models, always the same, to `folder`: `TARGET` and its drafters. Returns their architecture.

    base: the config whose architecture is used if it can be made tiny and run layer by layer; else Llama's is used.

    `TARGET` and `SMALL_LM` are ordinary Hugging Face directories with the same tokenizer. `EARLY_EXIT` holds an early
    exit, `EAGLE3` an EAGLE-3 head, `MTP` an MTP head if the target has a rope, `DFLASH` a DSpark drafter, `TABLE` an
    n-gram table. The small LM, the early exit and the EAGLE-3 head have calibration heads, which predict acceptance.
    """
    transformers_logging.disable_progress_bar()
    if base is not None:
        try:
            return _save_tiny_models(folder, shrink_config(base))
        except Exception as error:  # any error of an architecture for sizes that its authors did not expect
            print(f"debug architecture={base.model_type} cannot be made tiny: {reason(error)}", flush=True)
    return _save_tiny_models(folder, shrink_config(LLAMA))


def shrink_config(config: PreTrainedConfig, context_length: int = 256) -> PreTrainedConfig:
    """A copy of `config` with tiny sizes and this context length; its other fields are unchanged."""
    tiny_config = copy.deepcopy(config)
    for name, value in {**_SIZES, "max_position_embeddings": context_length}.items():
        if getattr(tiny_config, name, None) is not None:
            setattr(tiny_config, name, value)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:  # by layer: each kind once
            distinct = list(dict.fromkeys(value))
            setattr(tiny_config, name, (distinct * tiny_config.num_hidden_layers)[: tiny_config.num_hidden_layers])
    tiny_config.dtype = torch.float32
    if hasattr(tiny_config, "quantization_config"):
        del tiny_config.quantization_config
    return tiny_config


def _save_tiny_models(folder: Path, config: PreTrainedConfig) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    for seed, name in enumerate((TARGET, SMALL_LM)):
        save_tiny_model(folder / name, config, seed)
    target = open_target(str(folder / TARGET))
    config, tokenizer = target.config, target.tokenizer
    drafter = EarlyExit(target.layers(exit_layers(config, 1), dtype=torch.float32), exit_layer=1, own_head=True)
    save_pretrained(folder / EARLY_EXIT, drafter, target.fingerprint, training={}, dtype=torch.float32)
    calibration_head = CalibrationHead(config.hidden_size, config.hidden_size)
    identity = {"target": model_identity(target.files)}
    save_calibration(folder / EARLY_EXIT, calibration_head, read_meta(folder / EARLY_EXIT).weights_sha256, identity)
    save_head(folder / EAGLE3, tiny_head(config), dialect="specforge", target=config, target_name=TARGET)
    save_drafter(folder / DFLASH, tiny_block_drafter(config), config)
    for name in (SMALL_LM, EAGLE3):
        (folder / name / HEAD_FOLDER).mkdir()
        digest = drafter_digest(open_tensors(str(folder / name)))
        save_calibration(folder / name / HEAD_FOLDER, calibration_head, digest, identity)
    with suppress(UserError):  # of a target without rope
        save_tiny_mtp(folder / MTP, config)
    token_ids = tokenizer("to be or not to be, that is the question, or not ")["input_ids"]
    digest = vocabulary_digest(tokenizer.get_vocab())
    TrigramTable.from_documents([token_ids], (2, 3, 4), VOCABULARY, digest).save(folder / TABLE)  # orders 2 to 4
    return str(config.model_type)


def save_tiny_model(folder: Path, config: PreTrainedConfig, seed: int = 0, template: str | None = None) -> None:
    """Write a causal LM of a tiny `config` with random weights, and a byte-level tokenizer with the chat template
    `template`, as a Hugging Face directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    save_parts(folder, model, tokenizer)


def tiny_head(target: PreTrainedConfig) -> Eagle3:
    """A random EAGLE-3 head of one layer that shares the target's embedding and has logits for the bytes only."""
    hidden_size = target.hidden_size
    reading = Reading(
        taps=(1, 2, 3), target_hidden=hidden_size, hidden=hidden_size, intermediate=96, layers=1, heads=4, key_heads=2,
        head_dim=hidden_size // 4, epsilon=1e-5, activation="silu", vocabulary=target.vocab_size, draft_vocabulary=256,
        rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=256, windows=(None,),
    )  # fmt: skip
    return Eagle3.of(reading, {**random_weights(head_shapes(reading)), DRAFT_TOKENS: torch.arange(256)})


def tiny_block_drafter(target: PreTrainedConfig) -> DFlash:
    """A random DSpark drafter of one layer and four tokens that shares the target's embedding and head."""
    hidden_size = target.hidden_size
    reading = BlockReading(
        taps=(1, 2, 3), target_hidden=hidden_size, hidden=hidden_size, intermediate=96, layers=1, heads=4, key_heads=2,
        head_dim=hidden_size // 4, epsilon=1e-5, activation="silu", vocabulary=target.vocab_size,
        draft_vocabulary=target.vocab_size, rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=256,
        windows=(None,), head_norms=True, own_head=False, block=4, mask_token=target.vocab_size - 1,
        sample_from_anchor=True, causal=False, markov_rank=8, confidence="markov",
    )  # fmt: skip
    return DFlash(reading, all_tokens=True).with_weights(random_weights(module_shapes(DFlash, reading)))


def random_weights(shapes: Shapes) -> dict[str, Tensor]:
    """Small random matrices, norms of one and biases of zero, always the same."""
    generator, weights = torch.Generator().manual_seed(2), dict[str, Tensor]()
    for name, shape in shapes.items():
        constant = torch.full(shape, float("norm" in name))
        weights[name] = torch.randn(shape, generator=generator) * 0.1 if len(shape) == 2 else constant
    return weights


def save_tiny_mtp(folder: Path, target: PreTrainedConfig) -> None:
    """Write a random MTP head of `target`, as Qwen3-Next has it. Raises `UserError` for a target without rope."""
    shapes = head_shapes(read_shapes({"fc.weight": (target.hidden_size,)}, target, spelling="qwen"), MtpHead)
    weights = {qwen_name(name): weight for name, weight in random_weights(shapes).items()}
    folder.mkdir()
    save_file(weights, folder / SAFETENSORS.single)
    write_json(folder / CONFIG_FILE, {"architectures": ["MTP"]})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, no merges, and <s>, </s> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
