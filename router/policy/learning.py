"""What the default placement learns from requests while they run: the engines' pace, lengths of answers, size of tokens."""

import math

from protocol.usage import Usage
from router.policy.estimates import Line, Mean, OutputLengths
from router.policy.targets import TOKENS_PER_SEQUENCE, PredictedTicket

# Assumed until the first answers tell: one H200 with a 12 B-active model, and English text.
PREFILL_TOKENS_PER_S = 8000.0
STEP_S = 0.02
STEP_PER_SEQUENCE_S = 1e-4
BYTES_PER_TOKEN = 4.0
OUTPUT_TOKENS = 256.0
# Tokens whose prefill takes longer than the rest of a step.
LONG_PREFILL_TOKENS = 512.0
# Below this a prompt is mostly what the chat template adds.
TEMPLATE_BYTES = 256
# Bytes of JSON in one token, at least and at most, and how many samples the guess counts for.
RATIO_MIN, RATIO_MAX, RATIO_DOUBT = 0.5, 16.0, 10
# Answers from which the time of a single step cannot be told.
SHORT_ANSWER_TOKENS = 8
# At most this share of its time an answer is taken to have stood still for prompts of others.
STOOD_MAX = 0.8
# Seconds between two answers that are learned from; more are not worth their cost.
LEARNS_EVERY_S = 0.001
# One replica's durations against all replicas': at most this many times more or less.
PACE_MAX = 4.0
# Tokens of two blocks and a tenth: by so much a prediction of cached tokens may be off without being wrong.
SLACK_TOKENS, SLACK_SHARE = 32, 0.1
# How far the trust in a replica's capacity falls with a prefix that was gone, and rises with one that was there.
TRUST_FALLS, TRUST_RISES, TRUST_MIN = 0.97, 1.003, 0.2


class Learned:
    """Shared by all replicas; a replica's own pace and trust are kept with its target."""

    def __init__(self) -> None:
        # Seconds to a first token, by tokens ahead.
        self.prefill = Line(STEP_S, 1.0 / PREFILL_TOKENS_PER_S, typical_x=4000.0, rises_from=LONG_PREFILL_TOKENS)
        self.step = Line(STEP_S, STEP_PER_SEQUENCE_S, typical_x=64.0)  # seconds of a decode step, by Target.load
        self.lengths = OutputLengths(OUTPUT_TOKENS)
        self.session_word = Mean(0.5)  # share of a prompt that was cached where only the session's id promised it
        self.samples = 0  # of the prefill line
        self._learns_at = -math.inf
        self._bytes_per_token: dict[str, Mean] = {}

    def bytes_per_token(self, model: str) -> float:
        mean = self._bytes_per_token.get(model)
        return BYTES_PER_TOKEN if mean is None else mean.value

    @property
    def bytes_per_token_max(self) -> float:
        """Of any model."""
        return max((mean.value for mean in self._bytes_per_token.values()), default=BYTES_PER_TOKEN)

    def first_token(self, ticket: PredictedTicket, took_s: float) -> None:
        """`took_s`: from placement to the first token."""
        target = ticket.target
        if ticket.placed_at < target.learned_at:
            return  # first tokens that come together measure one and the same time
        target.learned_at = ticket.placed_at + took_s
        step_s = self.step.at(ticket.load_then)
        self.prefill.add(ticket.ahead, max(0.0, took_s / target.pace_now - step_s))
        expected_s = self.prefill.at(ticket.ahead) + step_s
        target.pace.add(min(PACE_MAX, max(1.0 / PACE_MAX, took_s / expected_s)))
        self.samples += 1

    def ended(self, ticket: PredictedTicket, usage: Usage, now: float) -> None:
        """After the ticket's release. Of very many answers at once a part says as much as all."""
        if now < self._learns_at:
            return
        self._learns_at = now + LEARNS_EVERY_S
        request, target = ticket.request, ticket.target
        if not request.generates:
            return
        if usage.prompt > 0 and request.prompt.size > TEMPLATE_BYTES and request.is_whole and not request.media:
            mean = self._bytes_per_token.get(request.model)
            if mean is None:
                mean = self._bytes_per_token[request.model] = Mean(BYTES_PER_TOKEN, doubt=RATIO_DOUBT)
            mean.add(min(RATIO_MAX, max(RATIO_MIN, request.prompt.size / usage.prompt)))
        if usage.completion > 0:
            self.lengths.add(request.model, ticket.kind, usage.completion)
        steps = usage.completion - 1
        load = 0.5 * (ticket.load_then + target.load + 1.0 + ticket.context / TOKENS_PER_SEQUENCE)
        if not request.streams:
            took_s = now - ticket.placed_at
            decode_s = steps * self.step.at(load) * target.pace_now
            if usage.completion <= SHORT_ANSWER_TOKENS:
                self.first_token(ticket, max(0.0, took_s - decode_s))
            else:
                # Only the sum of both parts is known: each is taken to be as far off as the other.
                first_s = took_s * ticket.predicted_s / (ticket.predicted_s + decode_s)
                self.first_token(ticket, first_s)
                self._step(ticket, load, steps, took_s - first_s)
        elif ticket.began_at is not None and usage.completion > SHORT_ANSWER_TOKENS:
            self._step(ticket, load, steps, now - ticket.began_at)
        if usage.cached is not None and ticket.cached_tokens > 0:
            self._judge(ticket, usage.cached)

    def _step(self, ticket: PredictedTicket, load: float, steps: int, decoded_s: float) -> None:
        """From a whole answer. While prompts of others were computed between its tokens, it stood still."""
        target = ticket.target
        stood_s = min((target.computed - ticket.computed_then) * target.token_s, STOOD_MAX * decoded_s)
        self.step.add(load, (decoded_s - stood_s) / steps / target.pace_now)

    def _judge(self, ticket: PredictedTicket, cached: int) -> None:
        """What was cached against what was believed to be."""
        target = ticket.target
        if ticket.hit_chunks == 0 and ticket.request.affinity is not None:  # believed for the session's id alone
            prompt_tokens = ticket.cached_tokens + ticket.uncached
            self.session_word.add(min(1.0, cached / max(1.0, prompt_tokens)))
        elif cached >= (1.0 - SLACK_SHARE) * ticket.cached_tokens - SLACK_TOKENS:
            target.trust = min(1.0, target.trust * TRUST_RISES)
        else:
            target.trust = max(TRUST_MIN, target.trust * TRUST_FALLS)
