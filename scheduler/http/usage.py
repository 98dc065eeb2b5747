"""What a request took, as OpenAI states it."""

from collections import defaultdict
from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from scheduler.http.answering import End, Piece, Prompt
from scheduler.http.sampling_fields import SamplingFields
from scheduler.protocol import Usage


class PromptTokensDetails(Struct, frozen=True):
    """`cached_tokens` of the prompt were not computed, because their KV was there."""

    cached_tokens: int


class UsageReply(Struct, frozen=True):
    """Tokens, over all prompts and answers of a request; a prompt counts once, however many answers it has. The details
    are null while an answer runs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


def usage_reply(usage: Usage) -> UsageReply:
    """The engine's figures."""
    total = usage.prompt_tokens + usage.new_tokens
    return UsageReply(usage.prompt_tokens, usage.new_tokens, total, PromptTokensDetails(usage.cached_tokens))


class StreamUsage:
    """What the events of one stream say of the usage, as the request asks."""

    def __init__(self, fields: SamplingFields, prompts: Sequence[Prompt]) -> None:
        """`prompts` all have the same n. ApiError if what is asked makes no sense."""
        self.in_last = fields.includes_usage
        self._so_far = fields.tells_usage_so_far
        self._prompts = [len(prompt.token_ids) for prompt in prompts for _ in range(prompt.sampling.n)]
        self._new: defaultdict[int, int] = defaultdict(int)

    def begin(self, choice: int) -> UsageReply | UnsetType | None:
        """Of an event before the first token."""
        if not self._so_far:
            return None if self.in_last else UNSET
        prompt, new = self._prompts[choice], self._new[choice]
        return UsageReply(prompt, new, prompt + new, None)

    def after(self, one: Piece | End) -> UsageReply | UnsetType | None:
        """Of the event or events that are made of `one`; ask once for each."""
        if isinstance(one, Piece):
            self._new[one.choice] += len(one.token_ids)
        return self.begin(one.choice)
