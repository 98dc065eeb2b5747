"""What a request took, as OpenAI states it."""

from msgspec import Struct

from scheduler.protocol import Usage


class PromptTokensDetails(Struct, frozen=True):
    """`cached_tokens` of the prompt were not computed, because their KV was there."""

    cached_tokens: int


class UsageReply(Struct, frozen=True):
    """Tokens, over all prompts and answers of a request; a prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_reply(usage: Usage) -> UsageReply:
    """The engine's figures."""
    total = usage.prompt_tokens + usage.new_tokens
    return UsageReply(usage.prompt_tokens, usage.new_tokens, total, PromptTokensDetails(usage.cached_tokens))
