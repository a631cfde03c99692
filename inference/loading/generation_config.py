"""The settings of the target's generation config that affect greedy decoding, applied to every arm.

A model comes with more than weights. Example: Qwen2.5-Instruct has a repetition penalty of 1.05, and
`model.generate(do_sample=False)` obeys it. So do all arms, the ways of decoding that are compared. For the arm
`generate` of transformers, only lengths, end tokens and sampling are replaced in the target's config (`TextSettings`).
Other arms have the logits processors that `generate` itself makes of it (`make_processors`). A config that selects
another way of decoding, such as beams, is refused.
"""

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import LongTensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, PreTrainedConfig, PreTrainedTokenizerBase

from outrider.base.errors import UserError, reason
from outrider.base.settings import construct
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, GENERATION_FILE
from outrider.draft_models.targets.model_files import load_generation_config
from outrider.inference.core.sampling import Sampler
from outrider.inference.settings.sampling import GREEDY, SamplingConfig


@dataclass(frozen=True)
class Inherited:
    """The target's generation config as used by an evaluation."""

    config: GenerationConfig  # the basis of `TextSettings`
    fields: Mapping[str, Any]  # of the config: those that affect greedy decoding, `stop_strings` too
    ignored: Mapping[str, object]  # such fields that were left out by generation_config=none


# The fields that act on the choice of a token, with the value that does nothing, as None does.
_ACTING = {
    "sequence_bias": None, "encoder_repetition_penalty": 1, "repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "min_length": 0, "min_new_tokens": 0,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "remove_invalid_values": False,
    "exponential_decay_length_penalty": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "renormalize_logits": False,
}  # fmt: skip
# Fields that the evaluation's settings replace, and fields that affect speed or output format but not the text.
_REPLACED: dict[str, object] = {
    **dict.fromkeys(
        ("max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff",
         "eta_cutoff", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
         "compile_config", "disable_compile", "continuous_batching_config")
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        False,
    ),
    "use_cache": True,
}  # fmt: skip
# Fields without effect that need no replacing: they concern beams, encoders or assistant models, or are read elsewhere.
_IDLE = {
    "early_stopping", "length_penalty", "diversity_penalty", "decoder_start_token_id", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
    "max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "stop_strings", "transformers_version",
}  # fmt: skip
# Other decoding strategies, off at these values or at None. Fields not listed in this file are off at None.
_OFF = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "guidance_scale": 1, "penalty_alpha": 0,
        "use_mtp": False, "token_healing": False, "is_assistant": False}  # fmt: skip
_LONGEST = 1024  # most tokens of an n-gram of a prompt that is not repeated


def inherit(
    target_source: str,
    revision: str | None,
    sampling: SamplingConfig,
    stop_strings: Sequence[str],
    *,
    eos: Collection[int],
    vocabulary: int,
    ignore: bool,
) -> Inherited:
    """The settings inherited from the target `target_source`, unless `sampling` or `stop_strings` override them.

    eos: the ids that end a text. vocabulary: its size. ignore: inherit nothing. Raises `UserError` naming field and
    value for decoding strategies that no arm supports, and for values that transformers cannot use.
    """
    config = read_generation_config(target_source, revision)
    fields, refused_fields = find_acting_fields(config), find_other_strategies(config)
    if config_stops := config.stop_strings:
        fields["stop_strings"] = [config_stops] if isinstance(config_stops, str) else list(config_stops)
    if ignore:
        values = json.loads(config.to_json_string(use_diff=False))  # turns objects, such as a watermark's, into dicts
        return Inherited(GenerationConfig(), {}, ignored={name: values[name] for name in fields | refused_fields})
    for name, value in refused_fields.items():
        raise _make_error(target_source, name, value, "which is a way of decoding that no arm here has")
    if sampling.repetition_penalty is not None:
        fields.pop("repetition_penalty", None)
    if stop_strings:
        fields.pop("stop_strings", None)
    for name, value in fields.items():
        try:
            _try_field(name, value, eos, vocabulary)
        except Exception as error:  # any error of a processor for an unexpected value
            raise _make_error(target_source, name, value, f"which transformers cannot use ({reason(error)})") from None
    return Inherited(config, fields, ignored={})


def _try_field(field_name: str, value: Any, eos: Collection[int], vocab_size: int) -> None:
    """Process logits by a config with this field only; raises any error for an unusable value."""
    if field_name == "exponential_decay_length_penalty" and not eos:
        raise ValueError("there is no end token that it could favour")
    if field_name == "encoder_no_repeat_ngram_size" and value > _LONGEST:
        raise ValueError(f"expected {_LONGEST} at most: it makes a copy of the prompt for each")
    settings = TextSettings(max_new_tokens=1, eos=eos).for_generate()
    setattr(settings, field_name, value)
    for processor in make_processors(settings, prompt=[0], device=torch.device("cpu")):
        processor(cast(LongTensor, torch.zeros(1, 1, dtype=torch.long)), torch.zeros(1, vocab_size))


def _make_error(source: str, field_name: str, value: object, why: str) -> UserError:
    return UserError(
        f"target={source}: its generation config has {field_name}={value!r}, {why}; mend generation_config.json, or "
        "leave all of it out by generation_config=none, as the report will say"
    )


def read_generation_config(source: str, revision: str | None) -> GenerationConfig:
    """The generation config that transformers would load with the target. Raises `UserError`."""
    config, file_name = load_generation_config(source, revision), GENERATION_FILE
    if config is None:  # older models have such fields in config.json
        file_name = CONFIG_FILE
        try:
            config = GenerationConfig.from_pretrained(
                source, file_name, revision=revision or "main", trust_remote_code=False, _from_model_config=True
            )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"target={source}: no usable generation config in {file_name} ({reason(error)})") from None
    for name, value_type in ("eos_token_id", int | list[int] | None), ("stop_strings", str | list[str] | None):
        construct(value_type, getattr(config, name, None), f"target={source}: {file_name}: {name}")
    return config


def find_acting_fields(config: GenerationConfig) -> dict[str, Any]:
    """The fields that have a say in which token comes next when decoding greedily."""
    fields = {name: getattr(config, name, None) for name in _ACTING}
    if fields["min_new_tokens"] is not None:
        fields["min_length"] = None  # transformers reads min_new_tokens instead
    return {name: value for name, value in fields.items() if value is not None and value != _ACTING[name]}


def find_other_strategies(config: GenerationConfig) -> dict[str, object]:
    """The fields that select another decoding strategy in `generate`, or one unknown here. Fields that transformers
    does not define have no effect in `generate`."""
    defaults = vars(GenerationConfig())
    handled = _ACTING.keys() | _REPLACED.keys() | _IDLE
    unknown = {name: value for name, value in vars(config).items()
               if name in defaults and name not in handled and not name.startswith("_")}  # fmt: skip
    strategies = {name: value for name, value in unknown.items() if value not in (None, defaults[name], _OFF.get(name))}
    if config.cache_implementation == "quantized":
        strategies["cache_implementation"] = config.cache_implementation
    return strategies


@dataclass(frozen=True)
class TextSettings:
    """How the tokens of a text are chosen and where it ends, in every arm."""

    max_new_tokens: int
    eos: Collection[int] = ()  # the ids that end it
    sampling: SamplingConfig = GREEDY
    generation: GenerationConfig | None = None  # the target's, for its other logits processors
    stops: Sequence[str] = ()  # stop strings, which need the tokenizer
    tokenizer: PreTrainedTokenizerBase | None = None

    def for_generate(self) -> GenerationConfig:
        """The config for transformers' `generate`: the target's own one, in which these settings replace its own."""
        settings = copy.deepcopy(self.generation) if self.generation is not None else GenerationConfig()
        eos_ids = sorted(self.eos)
        new_fields = {
            **_REPLACED,
            **generate_options(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "eos_token_id": eos_ids or None,
            "pad_token_id": eos_ids[0] if eos_ids else 0,
            "stop_strings": list(self.stops) or None,
        }
        for name, value in new_fields.items():
            setattr(settings, name, value)
        return settings

    def sampler(self, prompt: Sequence[int], device: torch.device) -> Sampler | None:
        """The sampler of one text after `prompt`. None: greedy decoding of unprocessed logits."""
        processors = make_processors(self.for_generate(), prompt, device)
        if not processors and not self.sampling.temperature:
            return None
        return Sampler(replace(self.sampling, repetition_penalty=None), processors)


def generate_options(sampling: SamplingConfig) -> dict[str, object]:
    """`sampling` as fields of transformers' GenerationConfig; without a repetition penalty if the target's applies."""
    factor = sampling.repetition_penalty
    penalty_option = {} if factor is None else {"repetition_penalty": float(factor)}
    if not sampling.temperature:
        return {"do_sample": False, **penalty_option}
    warper_options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return {"do_sample": True, **warper_options, "min_p": sampling.min_p or None, **penalty_option}


class _Model(GenerationMixin):
    """A model without weights: all that transformers reads when it makes processors."""

    config = PreTrainedConfig()


def make_processors(settings: GenerationConfig, prompt: Sequence[int], device: torch.device) -> list[LogitsProcessor]:
    """The logits processors that `generate` builds from `settings` after `prompt`, without warpers (top-k, …)."""
    config, ids = copy.copy(settings), torch.tensor([prompt], device=device)
    config.do_sample = False
    config.max_length = len(prompt) + settings.max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = None  # `min_new_tokens` replaces it
    eos_ids = settings.eos_token_id or None
    config._eos_token_tensor = None if eos_ids is None else torch.tensor(eos_ids, device=device)
    model: Any = _Model()
    return list(model._get_logits_processor(config, len(prompt), ids, device=device))
