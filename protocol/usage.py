"""How many tokens an answer took, as each surface words it."""

import msgspec

TOKENS_END = 2**31  # no answer takes so many: a count outside 0 <= n < TOKENS_END is none


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer; None where the engine does not say."""

    prompt: int
    completion: int
    cached: int | None = None  # of the prompt's, read from the engine's prefix cache


class UsageField(msgspec.Struct, frozen=True):
    """`usage` of chat and text completions (`prompt_tokens`...), of responses and of Anthropic messages (`input_tokens`...)."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: int | None = None

    def read(self) -> Usage:
        """A count that no answer can have is as good as not told."""
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = self.cache_read_input_tokens if details is None else details.cached_tokens
        prompt = self.input_tokens if self.prompt_tokens is None else self.prompt_tokens
        completion = self.output_tokens if self.completion_tokens is None else self.completion_tokens
        return Usage(_credible(prompt) or 0, _credible(completion) or 0, _credible(cached))


def _credible(tokens: int | None) -> int | None:
    return tokens if tokens is not None and 0 <= tokens < TOKENS_END else None
