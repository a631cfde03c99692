"""The model of `import outrider`: a decoder that is also measured as by the command evaluate-checkpoint."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

from outrider.api.arguments import TextArgument, require_known_options
from outrider.api.decoder import Decoder
from outrider.base.files import read_mapping
from outrider.base.settings import Named, construct
from outrider.data_prep.text.prompt_records import Prompt
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import preset

__all__ = ["Model", "load", "preset"]

# `construct` checks an argument against such a type; `Named` has the words with which its error describes the type.
_Turns = Annotated[list[TextArgument], Named("a list of the user's turns")]
_Prompts = Annotated[list[TextArgument | _Turns], Named("a list of texts to continue, or of lists of a user's turns")]


class Model(Decoder):
    """A target and its drafter, ready to decode and to be measured."""

    def report(
        self, prompts: Sequence[str | Sequence[str]], *, out_dir: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Measure this method on `prompts` as evaluate-checkpoint does: the content of report.json.

        prompts: texts to continue, or user turns of conversations. out_dir: the directory for the report and its plots;
        None: they are deleted. options: of evaluate-checkpoint, such as max_new_tokens and compare_transformers. The
        target is loaded a second time, by transformers, as the reference.
        """
        require_known_options("report", options, [field.name for field in fields(EvaluateConfig)])
        construct(_Prompts, prompts, "prompts")
        prompt_records = list[Prompt]()
        for number, prompt in enumerate(prompts, start=1):
            turns, chat = ((prompt,), False) if isinstance(prompt, str) else (tuple(prompt), True)
            prompt_records.append(Prompt(str(number), category="chat" if chat else "text", turns=turns, chat=chat))
        # The report's modules are loaded only for a report.
        from outrider.inference.evaluate.evaluation import evaluate_checkpoint

        with nullcontext(out_dir) if out_dir is not None else tempfile.TemporaryDirectory() as report_dir:
            with suppress(SystemExit):  # the command exits if a text is not the target's: the report says so too
                evaluate_checkpoint(replace(self.config, out_dir=report_dir, **options), prompt_records)
            return read_mapping(Path(report_dir) / "report.json", "report", "measure again")


load = Model.load
