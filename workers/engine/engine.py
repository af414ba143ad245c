"""The continuous batching engine: requests come and go between steps, each step is one forward over one packed row.

Batching is invisible: in float32 a greedy answer equals ``model.generate`` of that prompt alone, whatever runs beside
it. One request's fault (a bad parameter, a logit that is not finite, a prompt that can never fit) ends that request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from batchjobs.errors import UsageError
from batchjobs.types import FinishReason, Inflight, Progress, SamplingParams
from workers.engine.batch import pack
from workers.engine.config import EngineConfig
from workers.engine.generation import generate
from workers.engine.inflight import Restart, live_choices
from workers.engine.models import LoadedModel, choose_device, load_model
from workers.engine.observer import EngineObserver
from workers.engine.parallel.leading import SPLIT, lead
from workers.engine.parts import Parts, assemble
from workers.engine.pipeline import Step
from workers.engine.processors import threads_for
from workers.engine.requests import EngineDelta, EngineOutput, EngineRequest, EngineStats, PromptError
from workers.engine.results import StepResult
from workers.engine.sampler import prepare
from workers.engine.sequence import Sequence
from workers.engine.staging import StagedModel, stage
from workers.engine.update import UpdateReport, update

if TYPE_CHECKING:
    from workers.engine.parallel.group import Group


class Engine:
    """One model on one device. Not thread-safe: :class:`EngineLoop` drives it from a thread of its own.

    Args:
        model: A folder, a ``.gguf`` file or a hub id; or a model in memory, whose device and dtype are its own.
        config: See :class:`EngineConfig`.
        revision: A branch, tag or commit of a hub model.
        observer: Told of what happens in each step; can be set later too.

    Raises:
        UsageError: The model or a setting cannot be used; the message says why.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        config: EngineConfig | None = None,
        *,
        revision: str | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        threads = self.config.threads or threads_for(torch.get_num_threads())
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        self._group: Group | None = None
        if isinstance(model, LoadedModel):
            loaded = model
        elif self.config.tensor_parallel_size > 1:
            self._group, loaded = lead(model, self.config, revision)
        else:
            device = choose_device(self.config.device)
            loaded = load_model(model, device=device, dtype=self.config.dtype, revision=revision)
        self.device = str(loaded.model.device)
        prepare(self.device)
        try:
            self._use(assemble(loaded, self.config, group=self._group))
        except BaseException:
            self._leave_group()
            raise
        self.observer = observer or EngineObserver()
        self._in_flight: Step | None = None
        self._requests: dict[Hashable, list[Sequence]] = {}  # every choice of each request, until all have ended
        self._ended: list[EngineOutput] = []  # not told of yet
        self._deltas: list[EngineDelta] = []
        self._prompt_tokens = self._generated_tokens = self._recomputed_tokens = self._cached_tokens = 0

    def _use(self, parts: Parts) -> None:
        """Run these parts from now on."""
        self._parts = parts
        self.model_name, self.model_version = parts.loaded.name, parts.loaded.version
        self.model_details = parts.loaded.details
        self.dtype = str(parts.loaded.model.dtype).removeprefix("torch.")
        self.max_model_len, self.vocab_size = parts.max_model_len, parts.vocab_size
        self.runner, self.pool, self.scheduler, self._pipeline = (
            parts.runner,
            parts.pool,
            parts.scheduler,
            parts.pipeline,
        )
        self.prompts, self.vocabulary = parts.reading.prompts, parts.reading.vocabulary
        self._grammars, self._admission = parts.reading.grammars, parts.reading.admission

    @property
    def observer(self) -> EngineObserver:
        return self._observer

    @observer.setter
    def observer(self, observer: EngineObserver) -> None:
        self._observer = self.scheduler.observer = observer

    def encode_prompt(self, prompt: str | SequenceOf[int]) -> tuple[int, ...]:
        """Token ids of a text prompt; ids are passed on after a check. Raises PromptError."""
        return self.prompts.prompt(prompt)

    def encode_chat(
        self, messages: SequenceOf[Mapping[str, Any]], template_kwargs: Mapping[str, Any] = {}
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template. Raises PromptError."""
        return self.prompts.chat(messages, template_kwargs)

    def compile_format(self, response_format: Mapping[str, Any] | None) -> None:
        """Compile a response format before its request comes, so that no step waits for it. From any thread.

        Raises:
            PromptError: No answer can be held to it.
        """
        if response_format is not None:
            self._grammars.matcher(response_format)

    @property
    def has_work(self) -> bool:
        """Whether an output is still to come without anything being resumed."""
        return bool(self._ended) or self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run comes back from the next step, failed with the reason; so does one
        that was begun elsewhere and lacks nothing, with its outcome.

        Raises:
            ValueError: A request with this id is in the engine already.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is in the engine already")
        try:
            sequences = self._admission.sequences(request)
        except PromptError as reason:
            self._ended.append(self._output(self._admission.refused(request, reason)))
            return
        self._requests[request.request_id] = sequences
        for sequence in sequences:
            for at in range(-sequence.generated, 0):
                self._stream(sequence, at)
            if sequence.is_finished:
                self.observer.left(sequence)
        leader = next((sequence for sequence in sequences if not sequence.is_finished), None)
        if leader is None:
            self._complete(sequences)
            return
        self._schedule(leader)

    def _schedule(self, leader: Sequence, *, again: bool = False) -> None:
        self.scheduler.add(leader, again=again)
        if leader.request.suspended:
            self.scheduler.suspend(live_choices(self._requests[leader.request.request_id]))
        if leader.pending == 0:  # one token to score: nothing precedes it, so there is nothing to compute
            self._end(leader, FinishReason.LENGTH)

    def cancel(self, request_id: Hashable) -> EngineOutput | None:
        """End a request between two steps: what it has so far, or None when it is not here (any more)."""
        for sequence in self._requests.get(request_id, ()):
            if not sequence.is_finished:
                self._end(sequence, FinishReason.CANCELLED)
        output = next((o for o in self._ended if o.request_id == request_id), None)
        if output is not None:
            self._ended.remove(output)
        return output

    def suspend(self, request_ids: Iterable[Hashable]) -> None:
        """No token of these requests is made until they are resumed. They keep their places and their cache while
        nobody else needs them. Ids that are not here are passed over, and so are those that are suspended already."""
        self._collect()
        for request_id in request_ids:
            self.scheduler.suspend(live_choices(self._requests.get(request_id, [])))

    def resume(self, request_ids: Iterable[Hashable]) -> None:
        """Let suspended requests go on: those that had begun come first again."""
        self.scheduler.resume(
            [s for request_id in request_ids for s in live_choices(self._requests.get(request_id, []))]
        )

    def step(self) -> list[EngineOutput]:
        """Run one packed step and return the requests that have ended.

        With async batching the step is launched, and the one before it collected. Raises what the forward raises; the
        engine cannot be used after that.
        """
        step = self._launch()
        self._collect()
        if step is not None:
            self._pipeline.sample(step)
            self._in_flight = step
        if self._pipeline.depth == 1:
            self._collect()
        return self._take_ended()

    def settle(self) -> list[EngineOutput]:
        """Collect the step in flight without launching another: no token is being made any more."""
        self._collect()
        return self._take_ended()

    def progress(self) -> dict[Hashable, tuple[Progress, ...]]:
        """What there is of each unfinished request, without the step in flight: enough for another engine to go on.

        Of each choice that has a token and did not fail, in order; requests without such a choice are left out.
        """
        found = {
            request_id: tuple(part for choice in choices if (part := choice.progress(self.vocabulary)) is not None)
            for request_id, choices in self._requests.items()
        }
        return {request_id: parts for request_id, parts in found.items() if parts}

    def take_deltas(self) -> list[EngineDelta]:
        """The tokens of streamed requests since the last call, in the order in which they were collected."""
        deltas, self._deltas = self._deltas, []
        return deltas

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
        return generate(self, prompts, sampling, progress_bar=progress_bar)

    def warmup(self) -> None:
        """Prepare whatever is prepared on first use. Makes no token and holds no page."""
        self._pipeline.warmup()

    def close(self) -> None:
        """Wait for the device and let go of its thread. The engine is not used after that."""
        self._pipeline.close()
        self._leave_group()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            suspended=self.scheduler.suspended,
            unbegun=self.scheduler.unbegun,
            kv_usage_ratio=self.pool.usage_ratio,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            recomputed_tokens=self._recomputed_tokens,
            preemptions=self.scheduler.preemptions,
            offloaded_sequences=self.scheduler.offloads,
            offloaded_pages=self.scheduler.host.used,
            steps=self._pipeline.launched,
        )

    # Another model

    def stage(self, source: str, revision: str | None = None) -> StagedModel:
        """Load another model to the host, and check it. From any thread; the engine goes on meanwhile.

        Raises:
            UsageError: It is missing, broken, or of a kind that no engine can run; the message says why. Or this one is
                split over several devices.
        """
        if self._group is not None:
            raise UsageError(SPLIT)
        return stage(source, self._parts.loaded, revision=revision)

    def update_model(
        self,
        model: StagedModel | str,
        *,
        revision: str | None = None,
        inflight: Inflight | str = Inflight.RECOMPUTE,
    ) -> UpdateReport:
        """Go on with another model. See :class:`Inflight` for what becomes of unfinished requests; what is finished
        here comes out of the next step. Where the model's shape is another one, the engine must be empty but for what
        is to be finished.

        Raises:
            UpdateRefused: It cannot be done; the old model is as before.
            UsageError: As :meth:`stage`; or there is no such policy.
        """
        return update(self, self.stage(model, revision) if isinstance(model, str) else model, inflight)

    def _begin_again(self, restarts: Iterable[Restart]) -> None:
        """Requests that were taken out of the scheduler begin anew, the first one first."""
        for restart in reversed(list(restarts)):
            request = restart.request
            try:
                sequences = self._admission.sequences(request, seed=restart.seed)
            except PromptError as reason:
                del self._requests[request.request_id]
                self._ended.append(self._output(self._admission.refused(request, reason)))
                continue
            self._requests[request.request_id] = sequences
            self._schedule(sequences[0], again=True)

    # One step

    def _launch(self) -> Step | None:
        started = time.monotonic()
        # Less than before where memory ran out in a step.
        self.scheduler.max_batch_tokens = min(self.scheduler.max_batch_tokens, self.runner.shortage.most_rows)
        plan = self.scheduler.schedule()
        if not plan:
            return None
        batch = pack(plan, self.scheduler.tables, self.pool.page_size)
        self._prompt_tokens += sum(part.prompt_tokens for part in plan if part.first < part.sequence.prompt_len)
        self._recomputed_tokens += sum([part.again for part in plan])
        number = self._pipeline.launched + 1
        self.observer.planned(number, plan, started, time.monotonic())
        return self._pipeline.launch(plan, batch, self.scheduler.take_copies())

    def _collect(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        result = self._pipeline.collect(step)
        self.observer.computed(step.number, result.started, result.ended)
        self._take_scores(step, result)
        now = time.monotonic()
        for row, part in enumerate(step.sampling):
            part.sequence.in_flight -= 1
            if not part.sequence.is_finished:  # else it ended after this step was launched: its row is dropped
                self._take_token(step.number, part.sequence, result, row, now)

    def _take_scores(self, step: Step, result: StepResult) -> None:
        row = 0
        for part in step.plan:
            rows, row = slice(row, row + part.scores), row + part.scores
            sequence = part.sequence
            if sequence.is_finished:
                continue
            if part.scores and not sequence.accept_scores(result.scores[rows], result.score_tops, rows):
                at = len(sequence.prompt_logprobs) + 1
                reason = f"the model gave logits that are not finite at prompt token {at}"
                self._fail(sequence, "non_finite_logits", reason)
            if sequence.ending is not None and sequence.is_scored and not sequence.is_finished:
                self._end(sequence, sequence.ending)

    def _take_token(self, number: int, sequence: Sequence, result: StepResult, row: int, now: float) -> None:
        step = sequence.generated + 1
        if math.isnan(result.logprobs[row]):
            self._fail(sequence, "non_finite_logits", f"the model gave logits that are not finite at token {step}")
        elif not result.allowed[row]:
            self._fail(
                sequence, "no_token_allowed", f"bans and response format leave no token to choose at token {step}"
            )
        else:
            token, wanted = result.tokens[row], sequence.request.sampling.top_logprobs
            top = self.vocabulary.named(result.tops[row][:wanted]) if wanted and result.tops is not None else None
            sequence.accept(token, result.logprobs[row], top, now)
            self._generated_tokens += 1
            self.observer.sampled(number, sequence, token)
            self._stream(sequence)
            if sequence.is_finished:
                self._forget(sequence)

    def _stream(self, sequence: Sequence, at: int = -1) -> None:
        """Tell of one of its tokens, counted from the last one."""
        if sequence.request.stream:
            self._deltas.append(
                EngineDelta(
                    request_id=sequence.request.request_id,
                    choice=sequence.choice,
                    token_id=sequence.tokens[at],
                    logprob=sequence.logprobs[at],
                    token_time=sequence.times[at],
                )
            )

    # Ends

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._forget(sequence)

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        sequence.fail(code, message)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """A choice has ended; with the last one its request has. A prompt that is only scored is scored for all."""
        self.scheduler.finish(sequence)
        choices = self._requests[sequence.request.request_id]
        if sequence.limit == 0:
            for other in choices:
                other.finish_reason, other.error = sequence.finish_reason, sequence.error
        if all(choice.is_finished for choice in choices):
            self._complete(choices)

    def _complete(self, choices: list[Sequence]) -> None:
        del self._requests[choices[0].request.request_id]
        self._cached_tokens += choices[0].cached_tokens
        self._ended.append(self._output(choices))

    def _output(self, choices: list[Sequence]) -> EngineOutput:
        first, *others = (choice.output(self.vocabulary) for choice in choices)
        return replace(first, other_choices=tuple(others)) if others else first

    def _take_ended(self) -> list[EngineOutput]:
        ended, self._ended = self._ended, []
        return ended
