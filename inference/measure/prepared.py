"""What is decided before prompts are measured: their tokens, the length of texts, and the choices of all arms."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.base.errors import UserError
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompt_records import Prompt
from outrider.draft_models.targets.attention import KernelChoice
from outrider.draft_models.targets.model_spec import context_limit
from outrider.inference.doctor.scores import Findings
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.settings.method import MethodConfig
from outrider.inference.sizing.policy import TUNED_TOKENS, Tuning


@dataclass(frozen=True)
class Prepared:
    """Measurements made once, by one process before the first prompt; valid for all prompts, in resumed runs too.

    methods: ready to run, by name. tunings: by name of a method, the measured costs by which its "auto" sizes are
    chosen. kernels: the attention kernels on a GPU. products: the CPU kernels of matrix products, by what they
    multiply; kernels round differently. doctor: by kind of drafter, the findings on how its files should be read.
    """

    methods: dict[str, MethodConfig]
    tunings: dict[str, Tuning]
    kernels: tuple[KernelChoice, ...] = ()
    doctor: dict[str, Findings] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)

    def chosen(self) -> dict[str, str]:
        """The names of all chosen kernels, by what they compute, for the report."""
        attention_kernels = {
            f"attention of {k.heads}/{k.key_heads} heads of {k.head_dim}, {k.width} rows over {k.keys}": k.kernel
            for k in self.kernels
        }
        return {**self.products, **attention_kernels}


def render(setup: TargetSetup, prompt: Prompt, texts: Sequence[str], ids: Sequence[Sequence[int]] = ()) -> list[int]:
    """The token ids of `texts`, alternating user turns and answers, as `prompt` requires. ids: those of the answers."""
    template, max_tokens = setup.chat_template if prompt.chat else "none", context_limit(setup.config)
    messages, where = prompt.messages(texts), f"prompt {prompt.id}"
    return render_prompt(messages, setup.tokenizer, template, answer_ids=ids, context=max_tokens, where=where)


def longest_text(turn_ids: Sequence[Sequence[Sequence[int]]], max_new_tokens: int, context: int) -> int:
    """The expected length in tokens of the run's longest text, so that buffers are allocated once. turn_ids: for every
    prompt the ids of its turns, each rendered alone with its template. A conversation may still be longer, as an answer
    may have more tokens when it is tokenised again."""
    longest = max(sum(len(ids) + max_new_tokens for ids in prompt_turns) for prompt_turns in turn_ids)
    return min(context, longest + max(0, TUNED_TOKENS - max_new_tokens))  # `tune` may generate more than max_new_tokens


def require_fits(prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raise `UserError` naming the first prompt that is empty or longer than `max_tokens` tokens."""
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if not 1 <= len(ids) <= max_tokens:
            raise UserError(
                f"prompt {prompt.id}: {len(ids)} tokens, expected 1 to {max_tokens} (the models' context less "
                "max_new_tokens); drop or shorten it"
            )
