"""The continuous batching engine: requests come and go between steps, each step is one forward over one packed row.

Batching is invisible: in float32 a greedy answer equals ``model.generate`` of that prompt alone, whatever runs beside
it. One request's fault (a bad parameter, a logit that is not finite, a prompt that can never fit) ends that request.
"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from batchjobs.types import SamplingParams
from workers.engine.batch import pack
from workers.engine.config import EngineConfig
from workers.engine.models import choose_device, load_model
from workers.engine.pages import PagePool
from workers.engine.progress import progress
from workers.engine.prompts import PromptEncoder
from workers.engine.requests import EngineOutput, EngineRequest, EngineStats, PromptError
from workers.engine.runner import Runner
from workers.engine.sampler import draw_tokens
from workers.engine.scheduler import Scheduled, Scheduler
from workers.engine.sequence import Sequence
from workers.engine.text import StopMatcher, Vocabulary


class Engine:
    """One model on one device. Not thread-safe: :class:`EngineLoop` drives it from a thread of its own.

    Args:
        model: A folder, a ``.gguf`` file or a hub id.
        config: See :class:`EngineConfig`.

    Raises:
        UsageError: The model or a setting cannot be used; the message says why.
    """

    def __init__(self, model: str, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        loaded = load_model(model, device=choose_device(self.config.device), dtype=self.config.dtype)
        self.model_name = loaded.name
        self.model_version = loaded.version
        self.device = str(loaded.model.device)
        self.dtype = str(loaded.model.dtype).removeprefix("torch.")
        self.max_model_len = min(self.config.max_model_len or loaded.max_model_len, loaded.max_model_len)
        self.vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        self.runner = Runner(loaded, self.config, self.max_model_len)
        self.prompts = PromptEncoder(loaded.tokenizer, self.vocab_size)
        self.vocabulary = Vocabulary(loaded.tokenizer)
        self.pool = PagePool(self.runner.num_pages, self.config.page_size, sharing=self.config.allow_block_sharing)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=self.config.max_batch_tokens,
            max_requests_per_batch=self.config.max_requests_per_batch,
            policy=self.config.scheduler_type,
        )
        self._eos_ids = loaded.eos_ids
        self._refused: list[Sequence] = []
        self._prompt_tokens = self._generated_tokens = self._steps = 0

    def encode_prompt(self, prompt: str | SequenceOf[int]) -> tuple[int, ...]:
        """Token ids of a text prompt; ids are passed on after a check. Raises PromptError."""
        return self.prompts.prompt(prompt)

    def encode_chat(
        self, messages: SequenceOf[Mapping[str, Any]], template_kwargs: Mapping[str, Any] = {}
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template. Raises PromptError."""
        return self.prompts.chat(messages, template_kwargs)

    @property
    def has_work(self) -> bool:
        return bool(self._refused) or self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run comes back from the next step, failed with the reason.

        Raises:
            ValueError: A request with this id is in the engine already.
        """
        if request.request_id in self.scheduler:
            raise ValueError(f"request {request.request_id!r} is in the engine already")
        sequence = self._sequence(request)
        if reason := self._reason_to_refuse(request):
            sequence.fail(reason.code, reason.message)
            self._refused.append(sequence)
        else:
            self.scheduler.add(sequence)

    def cancel(self, request_id: Hashable) -> EngineOutput | None:
        """End a request between two steps: its partial output, or None when it is not here (any more)."""
        sequence = self.scheduler.cancel(request_id)
        return sequence.output(self.vocabulary) if sequence is not None else None

    def step(self) -> list[EngineOutput]:
        """Run one packed step and return the requests that ended with it."""
        ended, self._refused = self._refused, []
        plan = self.scheduler.schedule()
        if plan:
            ended += self._run(plan)
        return [sequence.output(self.vocabulary) for sequence in ended]

    def generate(
        self,
        prompts: Iterable[str | SequenceOf[int]],
        sampling: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        progress_bar: bool = False,
    ) -> list[EngineOutput]:
        """Continue many prompts and return their outputs in the order of the prompts.

        Args:
            prompts: Texts or token ids.
            sampling: One for all, or a list with one for each prompt.
            progress_bar: Show finished requests on stderr.

        Raises:
            PromptError: A prompt cannot be encoded. Nothing was generated.
            ValueError: The numbers of prompts and sampling parameters differ.
        """
        encoded = [self.encode_prompt(p) for p in prompts]
        each = _one_each(sampling, len(encoded))
        for index, (ids, params) in enumerate(zip(encoded, each, strict=True)):
            self.add(EngineRequest(("generate", index), ids, params))
        outputs: dict[Hashable, EngineOutput] = {}
        with progress(len(encoded), shown=progress_bar) as advance:
            while self.has_work:
                for output in self.step():
                    outputs[output.request_id] = output
                    advance()
        return [outputs["generate", index] for index in range(len(encoded))]

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            kv_usage_ratio=self.pool.usage_ratio,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self.scheduler.preemptions,
            steps=self._steps,
        )

    def _run(self, plan: list[Scheduled]) -> list[Sequence]:
        batch = pack(plan, self.pool.page_size)
        logits = self.runner.forward(batch)
        self.scheduler.computed(plan)
        drawing = [part.sequence for part in plan if part.samples]
        self._steps += 1
        self._prompt_tokens += sum(part.prompt_tokens for part in plan)
        if not drawing:
            return []
        draws = draw_tokens(logits, drawing)
        now = time.monotonic()
        self._generated_tokens += len(draws)
        for sequence, draw in zip(drawing, draws, strict=True):
            if draw.logprob != draw.logprob:  # NaN
                step = sequence.generated + 1
                sequence.fail("non_finite_logits", f"the model gave logits that are not finite at token {step}")
            else:
                sequence.accept(draw.token, draw.logprob, draw.top, now)
        ended = [s for s in drawing if s.is_finished]
        for sequence in ended:
            self.scheduler.finish(sequence)
        return ended

    def _sequence(self, request: EngineRequest) -> Sequence:
        sampling = request.sampling
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._eos_ids)
        texts = []
        for stop in sampling.stop:
            special = self.vocabulary.special_id(stop)
            if special is None:
                texts.append(stop)
            else:
                stop_ids.add(special)  # special tokens never show in the text, so the token itself is watched for
        return Sequence(
            request,
            limit=max(1, min(sampling.max_tokens, self.max_model_len - len(request.prompt_ids))),
            seed=random.getrandbits(53) if sampling.seed is None else sampling.seed,
            stop_ids=frozenset(stop_ids),
            stop_matcher=StopMatcher(texts, self.vocabulary, from_token=sampling.min_tokens) if texts else None,
        )

    def _reason_to_refuse(self, request: EngineRequest) -> PromptError | None:
        length = len(request.prompt_ids)
        if length == 0:
            return PromptError("empty_prompt", "the prompt is empty: it gives no token to continue from")
        if length >= self.max_model_len:
            return PromptError(
                "context_length_exceeded",
                f"the prompt has {length} tokens; the model's context of {self.max_model_len} must hold one more",
            )
        ids = [*request.sampling.logit_bias, *request.sampling.stop_token_ids]
        if bad := [i for i in ids if i >= self.vocab_size]:
            return PromptError(
                "invalid_parameter", f"token id {bad[0]} is outside the vocabulary (0 to {self.vocab_size - 1})"
            )
        # The last token of an answer is never fed back, so its keys and values take no room.
        most = min(length + request.sampling.max_tokens, self.max_model_len) - 1
        if self.pool.pages_for(most) > self.pool.capacity:
            room = self.pool.capacity * self.pool.page_size
            return PromptError(
                "kv_cache_too_small",
                f"the prompt of {length} tokens and max_tokens {request.sampling.max_tokens} need room for {most} "
                f"tokens; the KV cache holds {room}",
            )
        return None


def _one_each(sampling: SamplingParams | SequenceOf[SamplingParams] | None, count: int) -> SequenceOf[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise ValueError(f"{count} prompts but {len(sampling)} sampling parameters: give one for all, or one for each")
    return sampling
