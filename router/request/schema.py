"""The fields of a request body that the router reads, per surface, and why it refuses some of them.

The decoder refuses by the declared type: a field typed None must be absent, which costs a request without it nothing.
null counts as absent everywhere. Raw fields are looked at only when they are there.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from protocol.openai import Surface

CHOICES_MAX = 128
BAD_WORDS_MAX = 128


class TemplateKwargs(msgspec.Struct, gc=False):
    chat_template: None = None


class StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Choices = Annotated[int, Meta(le=CHOICES_MAX)]
ABSENT = Raw(b"null")


class Message(msgspec.Struct, gc=False):
    """Of a message only its content, which may be long: it is stepped over, not built."""

    content: Raw = ABSENT


class CommonFields(msgspec.Struct, gc=False):
    """What is read on every surface: the model, and what only operators may set."""

    model: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    allowed_token_ids: None = None
    cache_salt: None = None
    chat_template: None = None
    ec_transfer_params: None = None
    kv_transfer_params: None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None
    priority: None = None
    prompt_embeds: None = None
    request_id: UnsetType | None = UNSET
    vllm_xargs: None = None


class EmbeddingsFields(CommonFields, gc=False):
    input: Raw = ABSENT
    messages: Raw = ABSENT  # one conversation or a list of them


class TokenizeFields(CommonFields, gc=False):
    messages: list[Message] | None = None


class GeneratingFields(CommonFields, gc=False):
    """What is read wherever text is generated."""

    stream: bool | None = None
    prompt_cache_key: str | None = None
    # The engine checks it; here it only tells how long an answer may become.
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    tools: Raw = ABSENT
    structured_outputs: Raw = ABSENT
    guided_choice: None = None
    guided_decoding_backend: None = None
    guided_grammar: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_whitespace_pattern: None = None


class ResponsesFields(GeneratingFields, gc=False):
    input: Raw = ABSENT
    text: Raw = ABSENT  # holds the schema
    conversation: None = None
    previous_response_id: str | None = None


class MessagesFields(GeneratingFields, gc=False):
    messages: list[Message] | None = None
    system: Raw = ABSENT
    output_config: Raw = ABSENT  # holds the schema


class OpenAIFields(GeneratingFields, gc=False):
    """What chat and completions have in common."""

    stream_options: StreamOptions | UnsetType | None = UNSET
    n: Choices | None = None
    best_of: Choices | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Raw = ABSENT
    prompt_logprobs: int | None = None
    logprob_token_ids: Raw = ABSENT
    response_format: Raw = ABSENT
    bad_words: Annotated[list[str], Meta(max_length=BAD_WORDS_MAX)] | None = None
    min_tokens: int | None = None
    echo: bool | None = None
    repetition_detection: Raw = ABSENT
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    modalities: tuple[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None


class ChatFields(OpenAIFields, gc=False):
    messages: list[Message] | None = None
    logprobs: bool | None = None
    store: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None


class CompletionFields(OpenAIFields, gc=False):
    logprobs: int | None = None
    prompt: Raw = ABSENT
    suffix: str | None = None
    return_token_ids: bool | None = None


_CHAT = msgspec.json.Decoder(ChatFields)
_MESSAGES = msgspec.json.Decoder(MessagesFields)
DECODERS: dict[Surface, msgspec.json.Decoder[Any]] = {
    Surface.CHAT: _CHAT,
    Surface.COMPLETIONS: msgspec.json.Decoder(CompletionFields),
    Surface.RESPONSES: msgspec.json.Decoder(ResponsesFields),
    Surface.EMBEDDINGS: msgspec.json.Decoder(EmbeddingsFields),
    Surface.MESSAGES: _MESSAGES,
    Surface.COUNT_TOKENS: _MESSAGES,
    Surface.TOKENIZE: msgspec.json.Decoder(TokenizeFields),
    Surface.DETOKENIZE: msgspec.json.Decoder(CommonFields),
}

_OPERATORS_ONLY = "Only the operator of this service may set it; leave it out."
_STRUCTURED_OUTPUT = "It would have no effect; use 'response_format' or 'structured_outputs' instead."
_TEXT_ONLY = "This service generates text only; leave it out."
# Why a field is refused and what to do instead. Each is a field that has no allowed value, or one, above.
REFUSED = {
    **dict.fromkeys(
        [
            *("allowed_token_ids", "cache_salt", "chat_template", "chat_template_kwargs", "ec_transfer_params"),
            *("kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "priority", "prompt_embeds", "request_id"),
            "vllm_xargs",
        ],
        _OPERATORS_ONLY,
    ),
    **dict.fromkeys(
        ["guided_choice", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern"], _STRUCTURED_OUTPUT
    ),
    "chat_template_kwargs": "Only the operator of this service may set a 'chat_template' in it; leave that out.",
    "guided_decoding_backend": "The operator of this service chooses it; leave it out.",
    "audio": _TEXT_ONLY,
    "modalities": 'This service generates text only; the only supported value is ["text"].',
    "functions": "It is deprecated; use 'tools' instead.",
    "function_call": "It is deprecated; use 'tool_choice' instead.",
    "web_search_options": "This service does not search the web; leave it out.",
    "verbosity": "The only supported value is 'medium'; leave it out and ask for the length in the prompt.",
    "conversation": "This service keeps no conversations; send the earlier items in 'input'.",
    "store": "This service keeps no completions; leave it out or set it to false.",
}
