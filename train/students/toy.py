"""The toy target before its training: a tokenizer, and a Llama whose layers begin as the identity."""

import math
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.base.streams import Streams
from outrider.draft_models.targets.open_target import special_tokens
from outrider.train.core.optimizers import layer_matrices
from outrider.train.parts.drafter import llama_config
from outrider.train.settings.toy import ToyTargetConfig

BOS, EOS, PAD = "<s>", "</s>", "<pad>"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocabulary` ids that prepends BOS; a pure function of its arguments."""
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
    lm.generation_config = GenerationConfig(do_sample=False, **special_tokens(tokenizer))
    return lm


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """int64 [V]: the number of bytes of text per token, 0 for special tokens."""
    sizes = torch.zeros(len(tokenizer), dtype=torch.long)
    for token, index in tokenizer.get_vocab().items():
        if index not in tokenizer.all_special_ids:
            sizes[index] = len(token)  # byte-level BPE writes each byte as one character
    return sizes
