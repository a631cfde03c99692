"""Templates turn conversations into text and token ids. The tokens of an answer become text, also in pieces.

`render_prompt` is for decoding, `render_text` for training. `StreamedText` shows an answer while it is decoded. The
clean-up is transformers': some tokenizers remove the space before a mark (`clean_up_tokenization_spaces`). A run record
is the JSON file that generate-responses writes beside the answers of a target.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from weakref import WeakKeyDictionary

from outrider.base.errors import UserError, reason, require, warn
from outrider.base.files import read_mapping
from outrider.data_prep.text.data_files import RUN_FILE, resolve_paths
from outrider.data_prep.text.messages import TOOLS, UNLEARNED, Message
from outrider.data_prep.text.records import require_encodable
from outrider.data_prep.text.settings import DataConfig, PromptTemplate
from outrider.draft_models.targets.vocabulary import UnusableTextError, clock_of, require_rows

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
PROMPT_TEMPLATES = get_args(PromptTemplate)
TEMPLATE = "data.template"  # the option of most commands that train
_MOST_TEXT, _MOST_TIMES = 2**20, 16  # limits: characters a template adds, and repetitions of each message
_CHARS_A_TOKEN = 16  # characters of a text to tokenise first, per token of the context
_BYTE = re.compile("<0x..>")  # part of a character, decoded together with the bytes beside it
_SPACED = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're k"  # a text that contains every pattern of the clean-up
_CLEANED = " .?!,'ntmsver"  # all characters of these patterns: text can be split at any other character
_LOCAL = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}  # see `_decodes_locally`
# By token what `StreamedText._decode_alone` returns.
_TEXTS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, tuple[str, bool]]] = WeakKeyDictionary()
MARK = "\ue000"  # a private-use character, which templates leave unchanged


def render_prompt(
    turns: Sequence[str | Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str = "auto",
    option: str = "template",
    answer_ids: Sequence[Sequence[int]] = (),
    context: int | None = None,
    where: str = "prompt",
) -> list[int]:
    """Token ids to decode from: the conversation so far and the opening of the assistant's next turn.

    turns: messages, or their texts with user and assistant in turn. The last is the user's.
    template: tokenizer (its chat template) or auto, which is the same here; vicuna; or none (the bare text, for
    completion). option: its name, for errors. BOS is prepended exactly once if the tokenizer adds one; a chat template
    writes its own.
    answer_ids: the recorded ids of the answers in `turns`, in order; empty if unknown. The prompt has these ids as long
    as its text equals the text of the same prompt and answers. context: the context, see `token_ids_up_to`.

    Raises `UserError` if the tokenizer has no chat template although one is needed, and for a lone surrogate, and
    `UnusableTextError`, naming `where`, if the template refuses the turns or a token has no row in the model.
    """
    require(template in PROMPT_TEMPLATES, "template", template, f"one of {', '.join(PROMPT_TEMPLATES)}")
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": turn} if isinstance(turn, str) else turn
        for i, turn in enumerate(turns)
    ]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("a prompt ends with a user turn")
    answer_indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    prefixes: list[list[int]] = []  # ids of each prompt with its recorded answer
    for index, ids in zip(answer_indices, answer_ids, strict=False):
        if ids and index:  # else its ids are unknown, or no prompt is before it
            ids_before = _render_ids(messages[:index], tokenizer, template, option, context, where)
            prefixes.append([*replace_prefix(ids_before, prefixes, tokenizer), *ids])
    prompt_ids = replace_prefix(_render_ids(messages, tokenizer, template, option, context, where), prefixes, tokenizer)
    require_rows(prompt_ids, tokenizer, where)
    return prompt_ids


def _render_ids(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str, option: str = TEMPLATE,
    context_length: int | None = None, where: str = "prompt",
) -> list[int]:  # fmt: skip
    """Token ids of messages, and of the opening of an answer if the last is the user's."""
    ids = token_ids_up_to(render_text(messages, tokenizer, template, where, option), tokenizer, context_length)
    return prepend_bos(ids, tokenizer) if template in ("vicuna", "none") else ids


def render_text(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    where: str = "prompt",
    option: str = TEMPLATE,
) -> str:
    """The text of messages, and of the opening of an answer unless the last is one. where, option: for errors."""
    add_opening = messages[-1]["role"] != "assistant"
    if template in ("auto", "tokenizer"):
        return apply_template(tokenizer, messages, where, option, opening=add_opening)
    if template == "vicuna":
        return _render_vicuna(messages, tokenizer) + "ASSISTANT:" * add_opening
    return "\n".join(message["content"] for message in messages)


def prepend_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a plain text after the BOS token, if the tokenizer puts one there and the text has none."""
    bos = tokenizer.bos_token_id
    return [bos, *ids] if ids[:1] != [bos] and adds_bos(tokenizer) else ids


def question_affixes(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[list[int], str]:
    """The token ids before a user's first turn, and the first line of the text after it.

    template: as for a prompt; auto is none if the tokenizer has no chat template. With none, the ids are the BOS token
    and the line is empty. Raises `UserError` if there is no such token.
    """
    name, remedy = tokenizer_name(tokenizer), "give prompts of your own"
    if template == "none" or (template == "auto" and not tokenizer.chat_template):
        if tokenizer.bos_token_id is None:
            raise UserError(f"{name} has no BOS token, which begins a text: {remedy}")
        return [tokenizer.bos_token_id], ""
    question: list[Message] = [{"role": "user", "content": MARK}]
    text_before, _, text_after = render_text(question, tokenizer, template, "a question", "template").partition(MARK)
    if not text_after.strip():
        raise UserError(f"{name}: its chat template does not end a user's turn: {remedy}")
    ids = token_ids_up_to(text_before.rstrip(" "), tokenizer, None)  # a space belongs to the word after it
    ids = prepend_bos(ids, tokenizer) if template == "vicuna" else ids
    return ids, text_after.strip().partition("\n")[0]


def token_ids_up_to(text: str, tokenizer: PreTrainedTokenizerBase, context: int | None) -> list[int]:
    """The token ids of `text`, or more than `context` ids of its beginning if it has more than `context` tokens.

    So the work for a text that exceeds every context is bounded. The beginning has more than twice `context` tokens:
    only a few ids at its cut may differ from those of the whole text.
    Raises `UserError` for a lone surrogate.
    """
    require_encodable(text, "the prompt or text")
    character_count = len(text) if context is None else _CHARS_A_TOKEN * context
    while True:
        ids: list[int] = list(tokenize(tokenizer, [text[:character_count]])["input_ids"][0])
        if character_count >= len(text) or (context is not None and len(ids) > 2 * context):
            return ids
        character_count *= 4


def replace_prefix(rendered: list[int], prefixes: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """`rendered` with its beginning replaced by the last of the `prefixes`, lists of ids, that have the same text.

    Example: if both [1, 2] and [3] are "ab", replace_prefix([3, 4], [[1, 2]], tokenizer) is [1, 2, 4].
    """

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    for ids in reversed(prefixes):
        if rendered[: len(ids)] == ids:
            break
        prefix_text = text_of(ids)
        end = bisect_left(range(len(rendered)), len(prefix_text), key=lambda end: len(text_of(rendered[:end])))
        if text_of(rendered[:end]) == prefix_text:
            return [*ids, *rendered[end:]]
    return rendered


def answer_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of an answer as the content of a message: without special tokens, and without everything up to the last
    token that the template writes before a content (such as a channel's marker)."""
    try:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        opening = apply_template(tokenizer, turns, "answer").partition(MARK)[0]
    except UserError:
        opening = ""
    marker_ids = [number for number, token in tokenizer.added_tokens_decoder.items() if opening.endswith(token.content)]
    content_start = max((i + 1 for i, token in enumerate(ids) if token in marker_ids), default=0)
    return str(tokenizer.decode([*ids[content_start:]], skip_special_tokens=True, clean_up_tokenization_spaces=False))


def describe_difference(
    written: Sequence[int], messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str
) -> str:
    """The first difference between the tokens of `messages`, rendered, and `written`, in words; "" if there is none."""
    try:
        ids = _render_ids(messages, tokenizer, template)
    except UserError as error:
        return str(error)
    index = next((i for i, pair in enumerate(zip(written, ids, strict=False)) if pair[0] != pair[1]), len(ids))
    names = [tokenizer.convert_ids_to_tokens([*tokens[max(0, index - 2) : index + 4]]) for tokens in (written, ids)]
    difference = f"token {index} of {len(written)}: the target has {names[0]}, the text gives {names[1]}"
    return difference if index < len(written) else ""


def templates_of_run(run_record: Mapping[str, object], tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The templates in the record of a generate-responses run, by their names in `data.template`.

    "another": that of another tokenizer; "absent": the tokenizer had none. Empty without a record.
    """
    templates = run_record.get("template")
    label_of = {str(tokenizer.chat_template): "tokenizer", "vicuna": "vicuna", "none": "none", "None": "absent"}
    return {label_of.get(str(template), "another") for template in templates} if isinstance(templates, list) else set()


def is_greedy_run(record: Mapping[str, object]) -> bool:
    """Whether all answers of a generate-responses run are greedy, according to its record."""
    # greedy_tokens: how many tokens of an answer are greedy before the others are drawn
    greedy, limit = record.get("greedy_tokens", 0), record.get("max_new_tokens", 0)
    return record.get("temperature", 0) == 0 or (isinstance(greedy, int) and isinstance(limit, int) and greedy >= limit)


def records_of_runs(data: DataConfig) -> dict[Path, dict[str, object]]:
    """The records of the runs that made the files of `data`, by directory, as far as they are there."""
    paths = resolve_paths(data.path if data.source == "local" else ())
    records = {folder: read_run_record(folder / RUN_FILE) for folder in sorted({path.parent for path in paths})}
    return {folder: record for folder, record in records.items() if record is not None}


def read_run_record(data_file: Path) -> dict[str, object] | None:
    """The record of the run that made a file, if it is there."""
    record_path = data_file.with_name(RUN_FILE)
    return read_mapping(record_path, "record of a run", "remove it") if record_path.is_file() else None


def warn_of_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if a part of `data` has another template than the run that made its answers. Where no run has recorded one,
    warn of another template than the tokenizer's own."""
    for mix_name, _, config in [*data.parts()] or [("", 0.0, data)]:  # _: its weight
        templates = set[str]().union(*(templates_of_run(run, tokenizer) for run in records_of_runs(config).values()))
        templates -= {"absent"}  # below: where another tokenizer's was used, this tokenizer's own is expected
        expected = {"tokenizer" if template == "another" else template for template in templates}
        if not templates and tokenizer.chat_template:
            expected = {"tokenizer"}
        if expected and config.template not in expected:
            own_reason = f"{tokenizer_name(tokenizer)} has one of its own"
            why = "its answers were asked for with another" if templates else own_reason
            option = f"data.mix.{mix_name}" if mix_name else "data"
            warn(f"{option}.template={config.template}: {why}; give {option}.template={' or '.join(sorted(expected))}")


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its BOS token before plain text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: bool) -> BatchEncoding:
    """The ids of each text as "input_ids", without special tokens. Raises `UserError` for a lone surrogate."""
    for text in texts:
        require_encodable(text, "text")
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    where: str,
    option: str = TEMPLATE,
    opening: bool = False,
) -> str:
    """The text of messages by the tokenizer's chat template; with `opening`, the opening of an answer too.

    Raises `UserError` if there is no template, and `UnusableTextError`, naming `where`, if it refuses the messages.
    """
    name = tokenizer_name(tokenizer)
    if not tokenizer.chat_template:
        raise UserError(
            f"{name} has no chat template, which conversations need; use {option}=vicuna, Vicuna's own format, "
            f"{option}=none for a base model, which continues bare text, or the tokenizer of a chat model"
        )
    subject = f"{where}: the chat template of {name}"
    try:
        tools = messages[0].get(TOOLS) if messages else None
        # clock_of: a definition by which a template that shows the time shows the time of this run
        template = clock_of(tokenizer) + tokenizer.get_chat_template(tools=tools)
        history = [{key: message[key] for key in message if key not in (TOOLS, UNLEARNED)} for message in messages]
        rendered = tokenizer.apply_chat_template(
            history, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=opening
        )
    except Exception as error:  # a template is code and may raise any error
        remedy = "leave it out; what its system message says may begin the user's first turn"
        raise UnusableTextError(f"{subject} refuses this conversation ({reason(error)}); {remedy}") from error
    n_chars = sum(len(str(value)) for message in messages for key, value in message.items() if key != "role")
    if len(rendered) > _MOST_TEXT + _MOST_TIMES * n_chars:
        raise UnusableTextError(f"{subject} makes {len(rendered)} characters of {n_chars}; {template_remedy(option)}")
    return str(rendered)


def template_remedy(option: str = TEMPLATE) -> str:
    return f"use {option}=vicuna or {option}=none, or a tokenizer whose chat template reproduces the history"


def _render_vicuna(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Vicuna v1.1 and later: a space after system and user turns, the EOS token after answers."""
    has_system = messages[0]["role"] == "system"
    text = (messages[0]["content"] if has_system else VICUNA_SYSTEM) + " "
    for message in messages[has_system:]:
        is_user, content = message["role"] == "user", message["content"]
        text += f"USER: {content} " if is_user else f"ASSISTANT: {content}{tokenizer.eos_token or '</s>'}"
    return text


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer {tokenizer.name_or_path!r}" if tokenizer.name_or_path else "the tokenizer"


class StreamedText:
    """A text in pieces. All pieces and `flush`, joined, are `tokenizer.decode(tokens, skip_special_tokens=True)` of all
    tokens that were added, without a last one in `ends` (an end token need not be special).

    A piece is text that no later token changes. Three things are held back: an incomplete character, bytes that may be
    part of a character (byte fallback), and, if the tokenizer cleans up spaces, the text after the last character that
    is in none of the clean-up's patterns. Example: the tokens "Gr", "<0xC3>", "<0xBC>", "n" give the pieces "Gr", "",
    "", "ün".

    A piece is decoded with the piece before it, since a decoder may treat the first token of a text differently. If the
    decoder is not `_decodes_locally`, a piece is decoded with all tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()) -> None:
        self._tokenizer, self._ends, self.tokens = tokenizer, ends, list[int]()
        self._local, self._token_texts = _decodes_locally(tokenizer), _TEXTS.setdefault(tokenizer, {})
        ids = tokenizer(_SPACED, add_special_tokens=False)["input_ids"]
        raw_text, clean_text = self._decode(ids), tokenizer.decode(ids, skip_special_tokens=True)
        is_unsure = tokenizer.clean_up_tokenization_spaces and tokenizer.clean_up_tokenization(raw_text) == raw_text
        self._cleans = clean_text != raw_text or is_unsure  # is_unsure: no tokens give the text `_SPACED`
        self._before, self._end = 0, 0  # tokens[before:end] are the last piece whose end no later token changes
        self._closed = 0  # number of tokens up to the last one whose text no later token changes
        self._seen, self._waiting = 0, ""  # characters since `before` that were processed; the held-back ones

    def add(self, tokens: Iterable[int]) -> str:
        """The piece that becomes certain with these tokens; it may be empty."""
        for token in tokens:  # _decode_alone(…)[1]: it may be a part of a character, or is not shown
            self.tokens.append(token)
            self._closed = self._closed if token in self._ends or self._decode_alone(token)[1] else len(self.tokens)
        if (end := self._closed) > self._end:
            text = self._decode(self.tokens[self._before : end])
            self._append_new(text.rstrip("\ufffd"))  # U+FFFD stands for an incomplete character
            if self._local and not text.endswith("\ufffd") and (piece := self._decode(self.tokens[self._end : end])):
                self._before, self._end, self._seen = self._end, end, len(piece)
        return self._take_text(len(self._waiting.rstrip(_CLEANED) if self._cleans else self._waiting))

    def flush(self) -> str:
        """The text that was held back."""
        end = len(self.tokens) - (self.tokens[-1:] != [] and self.tokens[-1] in self._ends)
        self._append_new(self._decode(self.tokens[self._before : end]))
        return self._take_text(len(self._waiting))

    def _append_new(self, text: str) -> None:
        self._waiting += text[self._seen :]
        self._seen = max(self._seen, len(text))

    def _take_text(self, n_chars: int) -> str:
        """The next `n_chars` characters, cleaned up."""
        piece, self._waiting = self._waiting[:n_chars], self._waiting[n_chars:]
        return self._tokenizer.clean_up_tokenization(piece) if self._cleans else piece

    def _decode_alone(self, token: int) -> tuple[str, bool]:
        """The token's own text, and whether it may be a part of an incomplete character, or is not shown."""
        if token not in self._token_texts:
            text, name = self._decode([token]), str(self._tokenizer.convert_ids_to_tokens(token))
            self._token_texts[token] = text, not text or bool(_BYTE.fullmatch(name))
        return self._token_texts[token]

    def _decode(self, tokens: list[int]) -> str:
        if len(tokens) == 1 and tokens[0] in self._token_texts:
            return self._token_texts[tokens[0]][0]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _decodes_locally(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether tokens after a piece of text give the same text after that piece alone as after the whole text.

    A piece ends with a whole character. These decoders look back to the start of a character at most, and treat only
    the first token of a text differently.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    cls = type(tokenizer)
    if not isinstance(tokenizer, Fast) or (cls.decode, cls._decode) != (Fast.decode, Fast._decode):
        return False
    try:
        state = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    except Exception:  # no decoder, or one in Python
        return False
    steps = state.get("decoders", [state])
    replaced_texts = [step["pattern"].get("String", "") for step in steps if step["type"] == "Replace"]
    return all(step["type"] in _LOCAL for step in steps) and all(len(text) == 1 for text in replaced_texts)
