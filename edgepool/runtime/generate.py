"""The generation loop: prompt in, text out as it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, List, Optional, Sequence

from ..errors import BadInput
from ..progress import Report
from .attended import attended_fraction
from .detokenize import TextStream
from .sampling import Sampler, Sampling
from .session import Session
from .stop import StopStrings
from .tokenizer import Tokenizer

GREEDY = Sampling()


@dataclass
class Completion:
    """What a generation gave.

    text           the completion, without special tokens and stop strings
    token_ids      every token the model chose, a closing end-of-text token included
    finish_reason  `stop` (end of text or stop string), `length` (max_new_tokens), `context` (full)
    attended_fraction  tokens attended / tokens of context, over all layers and the queries that
                   chose these tokens
    """

    prompt_tokens: int
    text: str = ""
    token_ids: List[int] = field(default_factory=list)
    finish_reason: str = "length"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    attended_fraction: float = 1.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_s(self) -> Optional[float]:
        """Tokens per second after the first, which prefill gives; None if there is no other."""
        decoded = len(self.token_ids) - 1
        return decoded / self.decode_seconds if decoded else None


def generate(
    session: Session,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    sampling: Sampling = GREEDY,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    on_text: Optional[Callable[[str], None]] = None,
    report: Optional[Report] = None,
) -> Completion:
    """Feed the prompt to a session of one sequence and choose tokens until something ends it.

    on_text gets the text piece by piece as soon as it is certain: whole characters, and nothing
    that may belong to a stop string. report(step, done, total) is told how far prefill is.
    Raises BadInput for a prompt that is empty or too long, GateFailed for non-finite logits.
    """
    if max_new_tokens < 1:
        raise BadInput("max_new_tokens: %d is not a positive number" % max_new_tokens)
    before = int(session.lengths[0])
    check_prompt(prompt_ids, session.capacity - before)
    eos = session.config.eos_token_ids
    run = Completion(len(prompt_ids))
    sampler = Sampler(sampling, session.config.vocab_size)
    sampler.see(prompt_ids)
    stream, stops = TextStream(tokenizer), StopStrings(stop)
    pieces: List[str] = []

    def emit(text: str) -> None:
        if text:
            pieces.append(text)
            if on_text is not None:
                on_text(text)

    started = time.perf_counter()
    for first in range(0, len(prompt_ids), session.chunk):
        logits = session.feed([prompt_ids[first : first + session.chunk]])
        if report is not None:
            report("reading the prompt", int(session.lengths[0]) - before, len(prompt_ids))
    prefilled = time.perf_counter()
    while True:
        token = sampler.draw(logits[0, 0])
        run.token_ids.append(token)
        if token in eos:
            run.finish_reason = "stop"
            break
        emit(stops.push(stream.push(token)))
        if stops.found:
            run.finish_reason = "stop"
            break
        if len(run.token_ids) == max_new_tokens:
            break
        if session.lengths[0] == session.capacity:
            run.finish_reason = "context"
            break
        logits = session.feed([[token]])
    emit(stops.push(stream.finish()) + stops.finish())
    run.decode_seconds = time.perf_counter() - prefilled
    run.prefill_seconds = prefilled - started
    run.text = "".join(pieces)
    query = before + len(prompt_ids) - 1
    run.attended_fraction = attended_fraction(session.config, query, query + len(run.token_ids) - 1)
    return run


def check_prompt(prompt_ids: Sequence[int], room: int) -> None:
    """Raises BadInput for a prompt that is empty, or longer than the `room` of the context."""
    if not prompt_ids:
        raise BadInput("the prompt has no tokens: give it some text")
    if len(prompt_ids) > room:
        raise BadInput(
            "the prompt has %d tokens, but the context has room for %d: shorten the prompt"
            % (len(prompt_ids), room)
        )
