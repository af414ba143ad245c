"""Every way to compute an answer on this device, against transformers' own and against the plainest way.

In float32 the greedy tokens must be those of ``generate`` for each prompt alone, whatever runs beside it. In bfloat16
tokens may differ where two are nearly as good; there the logprobs are held against a full recompute in float32, and no
way may be further from it than the plain torch path is. A part that does not hold has ``differs``, with the reason.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from batchjobs.types import SamplingParams
from ops.gpu import kinds, shapes
from ops.gpu.notes import Found, Notes
from ops.gpu.references import Apart, apart, reference_of, solo_greedy
from ops.gpu.setup import Setup
from workers.engine.attention.flash_trial import without_waiting
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.requests import EngineRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from workers.engine.requests import EngineOutput


@dataclass(frozen=True, slots=True)
class Amounts:
    """``lengths`` are those of the prompts: around the borders of pages of 16, 48 and 256 tokens."""

    lengths: tuple[int, ...] = (1, 2, 15, 16, 17, 47, 49, 130, 255, 256, 257, 300, 513, 700)
    tokens: int = 16
    steady_steps: int = 24


TINY = Amounts(lengths=(1, 15, 17, 40), tokens=6, steady_steps=4)

WAYS: dict[str, dict[str, Any]] = {
    "one step at a time": {"use_async_batching": False},
    "two steps on their way": {"use_async_batching": True},
    "prompts in chunks": {"max_batch_tokens": 24},
    "sequences that give way to memory": {"cpu_offload_space": 0.25, "is_short": True},
    "sequences that give way and are computed again": {"cpu_offload_space": 0.0, "is_short": True},
}
"""Settings of the engine; ``is_short``: no more pages than the longest answer needs."""
SHORT_PAGE = 16

SAMPLED = (
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.95, "top_k": 50},
    {"temperature": 0.0, "repetition_penalty": 1.3},
)


def section(notes: Notes, setup: Setup) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    amounts = TINY if setup.tiny else Amounts()
    families = dict(list(shapes.SMALL.items())[:: 3 if setup.tiny else 1])
    _float32(notes, setup, amounts, families)
    notes.run("float32, sampled", lambda: _sampled(setup, amounts), seconds=4)
    _bfloat16(notes, setup, amounts, families)
    notes.leave_out(f"no waiting, {kinds.PLAIN}", "it makes its indices on the host, which waits for their copies")
    for kind in kinds.available(setup.device)[1:]:
        notes.run(f"no waiting, {kind}", partial(_no_waiting, setup, amounts, kind), seconds=4)


def prompts(amounts: Amounts, vocab_size: int) -> list[list[int]]:
    """Drawn ones, and two that begin as others do."""
    rng = random.Random(7)
    drawn = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in amounts.lengths]
    longest = drawn[-1]
    return [*drawn, longest[: len(longest) * 3 // 4], [*longest[: len(longest) // 2], 5, 6]]


# ---------------------------------------------------------------------------------------------------------- float32


def _float32(notes: Notes, setup: Setup, amounts: Amounts, families: Mapping[str, Any]) -> None:
    for number, (family, config) in enumerate(families.items()):
        alone = notes.make(f"float32, {family}, alone", partial(_alone, setup, amounts, config), seconds=5)
        if alone is None:
            continue
        model, each, wanted = alone
        for way, settings in WAYS.items() if number == 0 else list(WAYS.items())[1:2]:
            part = partial(_compare, model, family, each, wanted, settings)
            notes.run(f"float32, {family}, {way}", part, seconds=3)


def _alone(
    setup: Setup, amounts: Amounts, config: Callable[[], Any]
) -> tuple[tuple[PreTrainedModel, list[list[int]], list[list[int]]], Found]:
    """A model, prompts, and what ``generate`` answers to each of them alone."""
    model = shapes.build(config(), setup.device, torch.float32)
    reference, each = reference_of(model), prompts(amounts, model.config.vocab_size)
    wanted = [solo_greedy(reference, prompt, amounts.tokens) for prompt in each]
    kinds_of_tokens = len({token for row in wanted for token in row})
    return (model, each, wanted), {"answers": len(wanted), "different_tokens": kinds_of_tokens}


def _compare(
    model: PreTrainedModel, family: str, each: list[list[int]], wanted: list[list[int]], settings: Mapping[str, Any]
) -> Found:
    tokens = len(wanted[0])
    own = {name: value for name, value in settings.items() if name != "is_short"}
    if settings.get("is_short"):
        own |= _short(max(map(len, each)) + tokens)
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    engine, outputs = answered(model, family, each, sampling, own, is_hopeful="is_short" in settings)
    same = sum(list(output.token_ids) == row for output, row in zip(outputs, wanted, strict=True))
    found: Found = {"same": same, "answers": len(wanted), **_facts(engine)}
    if same < len(wanted):
        first = next(i for i, row in enumerate(wanted) if list(outputs[i].token_ids) != row)
        found["differs"] = f"{len(wanted) - same} answers are not those of generate; the first has prompt {first}"
    return found | _leftovers(engine, settings)


def answered(
    model: PreTrainedModel,
    name: str,
    each: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    settings: Mapping[str, Any],
    *,
    is_hopeful: bool = False,
) -> tuple[Engine, list[EngineOutput]]:
    """An engine of its own, warmed up, and its answers in the order of the prompts. A hopeful one expects no answer to
    be long, and lets in more than there is room for."""
    config = EngineConfig(**{"max_requests_per_batch": 32, "max_model_len": 1024, **settings})
    engine = Engine(shapes.loaded(model, name), config)
    engine.warmup()
    if is_hopeful:
        engine.scheduler.expected_answer_share = 0.0
    return engine, engine.generate(each, sampling)


def _short(longest: int) -> dict[str, Any]:
    """No more pages than one sequence of so many tokens needs, and the null page."""
    return {"page_size": SHORT_PAGE, "num_blocks": 1 + -(-longest // SHORT_PAGE)}


def _facts(engine: Engine) -> Found:
    stats = engine.stats()
    return {
        "attention": ", ".join(dict.fromkeys(backend.name for backend in engine.runner.backends)),
        "steps": stats.steps,
        "gave_way": stats.preemptions,
        "offloaded": stats.offloaded_sequences,
    }


def _leftovers(engine: Engine, settings: Mapping[str, Any]) -> Found:
    """What must not be: pages that are not free at the end, and nobody who gave way where everybody was to."""
    held, stats = engine.pool.capacity - engine.pool.free, engine.stats()
    engine.close()
    engine.runner.release()
    if held:
        return {"differs": f"{held} pages are held by nobody"}
    if settings.get("is_short") and not stats.preemptions:
        return {"differs": "no sequence gave way, so nothing was tried"}
    if settings.get("is_short") and settings.get("cpu_offload_space") and not stats.offloaded_sequences:
        return {"differs": "nothing was offloaded, so nothing was tried"}
    return {}


def _sampled(setup: Setup, amounts: Amounts) -> Found:
    """Seeded draws with filters and penalties: this device's sampler against the host's, on the same weights."""
    here = shapes.build(shapes.small(), setup.device, torch.float32)
    host = copy.deepcopy(here).to("cpu")
    each = [prompt for prompt in prompts(amounts, here.config.vocab_size) if len(prompt) < 60] * 2
    sampling = [
        SamplingParams(max_tokens=amounts.tokens, seed=index, top_logprobs=2, **SAMPLED[index % len(SAMPLED)])  # type: ignore[arg-type]
        for index in range(len(each))
    ]
    engine, mine = answered(here, "llama", each, sampling, {})
    other, theirs = answered(host, "llama", each, sampling, {"native_forward": False})
    same = sum(a.token_ids == b.token_ids for a, b in zip(mine, theirs, strict=True))
    found: Found = {"same": same, "answers": len(each)}
    if same < len(each):
        found["differs"] = f"{len(each) - same} sampled answers are not those of the host's sampler"
    other.close()
    return found | _leftovers(engine, {})


# --------------------------------------------------------------------------------------------------------- bfloat16


def _bfloat16(notes: Notes, setup: Setup, amounts: Amounts, families: Mapping[str, Any]) -> None:
    available = kinds.available(setup.device)
    for number, (family, config) in enumerate(families.items()):
        built = notes.make(f"bfloat16, {family}, built", partial(_built, setup, config), seconds=3)
        if built is None:
            continue
        model, reference = built
        each = prompts(amounts, model.config.vocab_size)
        plain: list[Apart] = []
        for kind, graphs in _variants(available, every=number == 0):
            part = partial(_near, model, reference, family, each, amounts, kind, graphs, plain)
            notes.run(f"bfloat16, {family}, {kind}{', graphs' if graphs else ''}", part, seconds=3)


def _variants(available: Sequence[str], *, every: bool) -> list[tuple[str, bool]]:
    """Kernels, and whether decode steps are recorded: plain torch first, which cannot; then the best one both ways, and
    the others both ways where ``every`` is asked for."""
    plain, *others = available
    recorded = others if every else others[:1]
    return [(plain, False), *((kind, graphs) for kind in others for graphs in (False, True)[: 1 + (kind in recorded)])]


def _built(setup: Setup, config: Callable[[], Any]) -> tuple[tuple[PreTrainedModel, PreTrainedModel], Found]:
    """A model in bfloat16, and the same weights in float32."""
    model = shapes.build(config(), setup.device, torch.bfloat16)
    return (model, reference_of(model)), {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def _near(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    family: str,
    each: list[list[int]],
    amounts: Amounts,
    kind: str,
    graphs: bool,
    plain: list[Apart],
) -> Found:
    """``plain`` holds what the plain torch path gave, which comes first."""
    sampling = SamplingParams(temperature=0, max_tokens=amounts.tokens, ignore_eos=True)
    with kinds.only(str(model.device), kind):
        engine, outputs = answered(model, family, each, sampling, {"use_cuda_graph": graphs})
        chosen = kinds.why(engine)
    answers = [output.token_ids for output in outputs]
    if failed := next((output.error for output in outputs if output.error is not None), None):
        return {"differs": failed.message}
    now = apart(reference, each, answers, [output.logprobs for output in outputs])
    found: Found = {
        "mean_error": now.mean_error,
        "worst_error": now.worst_error,
        "worst_regret": now.worst_regret,
        **_facts(engine),
        "recorded": kinds.is_recorded(engine),
        "why": chosen,
    }
    if not plain:
        plain.append(now)
    if not now.within(plain[0]):
        found["differs"] = f"further from the recompute than plain torch, which has {plain[0]}"
    elif graphs and kinds.can_be_recorded(engine) and not found["recorded"]:
        found["differs"] = "decode steps could not be recorded; the log says why"
    return found | _leftovers(engine, {})


# ---------------------------------------------------------------------------------------------------------- waiting


def _no_waiting(setup: Setup, amounts: Amounts, kind: str) -> Found:
    """Steady decode steps in which nothing but the results' event makes the host wait: torch raises where it does."""
    model = shapes.build(shapes.small(), setup.device, torch.bfloat16)
    with kinds.only(setup.device, kind):
        engine = Engine(shapes.loaded(model, "llama"), EngineConfig(max_model_len=1024))
        engine.warmup()
    sampling = SamplingParams(temperature=0, max_tokens=4 * amounts.steady_steps, ignore_eos=True)
    for index, prompt in enumerate(prompts(amounts, model.config.vocab_size)):
        engine.add(EngineRequest(index, tuple(prompt), sampling))
    for _ in range(amounts.steady_steps):
        engine.step()
    with without_waiting(engine.runner.device):
        for _ in range(amounts.steady_steps):
            engine.step()
    made = engine.stats().generated_tokens
    engine.close()
    engine.runner.release()
    return {"steps": amounts.steady_steps, "tokens": made}
