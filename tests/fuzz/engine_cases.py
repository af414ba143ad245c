"""A case: a model, settings of the engine, and requests that come and go. All of it is drawn from one number.

The same number and the same features give the same case as long as the families of models stay the same. Cases of one
block (``seed // BLOCK``) share four models, so that loading them pays: one can chat, one has a sliding window.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchjobs.types import SamplingParams
from tests.fuzz.request_cases import draw_sampling
from tests.support.models import FAMILIES

BLOCK = 50
CHAT = "chat"
CHAT_VOCAB, PLAIN_VOCAB = 259, 97
POISON = 96
"""In a poisoned model the embedding of this token is NaN: a request that holds it fails, and nothing else may."""
POISONABLE = ("llama", "qwen2", "qwen3", CHAT)  # untied embeddings and no window, so that NaN is never seen the last of
WEIGHTED = {"llama": 4, "gpt2": 3, "mistral": 4, "qwen3": 2}  # the other families count once
STEP_BUDGET = 120  # steps that a case needs without giving way, about
STRANGER = "stranger"
"""The id of a request that was never added."""

FEATURES = (
    "sampling",
    "penalties",
    "stops",
    "logprobs",
    "scoring",
    "choices",
    "structured",
    "cancels",
    "streams",
    "faults",
    "pressure",
    "offload",
    "async",
    "sharing",
    "suspensions",
    "updates",
    "device",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRequest:
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stream: bool


@dataclass(frozen=True, slots=True)
class Event:
    """What happens before step ``step``: ``add``, ``cancel``, ``suspend``, ``resume`` (``index`` is the request),
    ``stray``, ``settle``, or ``update`` (from one model of the family to the other, by ``policy``)."""

    step: int
    action: str
    index: int = -1
    policy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``settings`` are fields of EngineConfig but for the sizes of the two caches.

    ``spare_pages`` come beside those that the largest request needs alone; negative: it does not fit. An ``optimistic``
    scheduler expects short answers, so it admits too many and some have to give way. ``runs`` is 2 where everything
    happens again on the same engine, with a warm prefix cache. ``compiled`` asks for the C++ attention.
    ``rehearsed``: it runs the way of a GPU, with results that arrive late (`tests/support/rehearsal.py`).
    """

    seed: int
    family: str
    weights: int
    poisoned: bool
    settings: dict[str, Any]
    spare_pages: int
    offload_pages: int
    optimistic: bool
    compiled: bool
    runs: int
    requests: tuple[CaseRequest, ...]
    events: tuple[Event, ...]
    rehearsed: bool

    @property
    def is_updated(self) -> bool:
        return any(event.action == "update" for event in self.events)

    @property
    def vocab_size(self) -> int:
        return CHAT_VOCAB if self.family == CHAT else PLAIN_VOCAB


def draw_case(seed: int, features: Sequence[str] = FEATURES) -> Case:
    """The case of this number, with none of the features that are not named."""
    rng = random.Random(seed)
    family = rng.choice(_families(seed // BLOCK))
    poisoned = "faults" in features and family in POISONABLE and rng.random() < 0.2
    requests = _draw_requests(rng, family, features, poisoned=poisoned)
    settings, spare = _draw_settings(rng, features, requests)
    return Case(
        seed=seed,
        family=family,
        weights=rng.randrange(2) if family in WEIGHTED else 0,
        poisoned=poisoned,
        settings=settings,
        spare_pages=spare,
        offload_pages=rng.choice((0, rng.randint(1, 8), 400, 400)) if "offload" in features else 0,
        optimistic="pressure" in features and rng.random() < 0.7,
        compiled=rng.random() < (0.5 if poisoned else 0.8),
        runs=rng.choice((1, 1, 2)),
        requests=tuple(requests),
        events=_draw_events(rng, features, requests),
        rehearsed="device" in features and rng.random() < 0.4,
    )


def _families(block: int) -> list[str]:
    rng, names = random.Random(f"families of block {block}"), sorted(FAMILIES)
    windowed = [name for name in names if getattr(FAMILIES[name], "sliding_window", None)]
    others = rng.choices(names, [WEIGHTED.get(name, 1) for name in names], k=2)
    return [CHAT, rng.choice(windowed), *others]


def _draw_requests(rng: random.Random, family: str, features: Sequence[str], *, poisoned: bool) -> list[CaseRequest]:
    top = POISON if poisoned else (CHAT_VOCAB if family == CHAT else PLAIN_VOCAB)
    groups = [[rng.randrange(3, top) for _ in range(rng.randint(1, 70))] for _ in range(rng.randint(1, 3))]
    requests: list[CaseRequest] = []
    crowded = "pressure" in features and rng.random() < 0.3  # many start together, and all of them grow
    for number in range(rng.randint(4, 10) if crowded else min(rng.randint(1, 12), rng.randint(1, 12))):
        prompt = _draw_prompt(rng, groups, top)[: 12 if crowded else None]
        if poisoned and rng.random() < 0.25:
            prompt[rng.randrange(len(prompt))] = POISON
        if "faults" in features and rng.random() < 0.02:
            prompt = []
        sampling = draw_sampling(rng, features, chat=family == CHAT, least_tokens=12 if crowded else 1)
        stream = "streams" in features and rng.random() < 0.3
        reused = "cancels" in features and number > 0 and rng.random() < 0.08
        name = requests[-1].request_id if reused else f"r{number}"
        requests.append(CaseRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, stream=stream))
    return requests


def _draw_prompt(rng: random.Random, groups: list[list[int]], top: int) -> list[int]:
    """A whole or cut beginning of its group, and an ending of its own (which may be empty).

    Sometimes one of the first tokens differs, so that the same tokens follow another beginning; or a pattern repeats.
    """
    group = rng.choice(groups)
    beginning = group if rng.random() < 0.6 else group[: rng.randint(0, len(group))]
    ending = [rng.randrange(3, top) for _ in range(rng.choice((0, rng.randint(0, 4), rng.randint(0, 40))))]
    prompt = (beginning + ending or [rng.randrange(3, top)])[:90]
    if rng.random() < 0.2:
        prompt[rng.randrange(min(8, len(prompt)))] = rng.randrange(3, top)
    if rng.random() < 0.1:
        period = rng.randint(1, 6)
        prompt = [prompt[at % min(period, len(prompt))] for at in range(rng.randint(1, 90))]
    return prompt


def _draw_settings(
    rng: random.Random, features: Sequence[str], requests: list[CaseRequest]
) -> tuple[dict[str, Any], int]:
    page_size = rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 32))
    rows = sum((len(r.prompt) if i == 0 else 4) + r.sampling.max_tokens for r in requests for i in range(r.sampling.n))
    longest = max(len(r.prompt) + r.sampling.max_tokens for r in requests)
    shortest_context = max(len(r.prompt) for r in requests) + 1
    contexts = [None, None, None, None, rng.randint(max(2, shortest_context), shortest_context + 40)]
    if "faults" in features:
        contexts += [rng.randint(max(2, longest // 2), longest + 2)]
    settings = {
        "page_size": page_size,
        "max_batch_tokens": max(rng.choice((1, 2, 3, 5, 8, 16, 33, 64)), -(-rows // STEP_BUDGET)),
        "max_requests_per_batch": rng.randint(1, 8),
        "scheduler_type": rng.choice(("fifo", "prefix", "longest_first")),
        "allow_block_sharing": "sharing" in features and rng.random() < 0.75,
        "use_async_batching": "async" in features and rng.random() < 0.6,
        "max_model_len": rng.choice(contexts),
    }
    spare = rng.choice((0, 0, rng.randint(0, 3), rng.randint(1, 8), 40)) if "pressure" in features else 1000
    if "faults" in features and rng.random() < 0.05:
        spare = -rng.randint(1, 3)
    return settings, spare


def _draw_events(rng: random.Random, features: Sequence[str], requests: list[CaseRequest]) -> tuple[Event, ...]:
    """In order. A request that has the id of the one before it comes right after that one was cancelled."""
    spread = rng.choice((0, 0, 5, 40))
    keyed: list[tuple[float, Event]] = []
    cancelled: dict[str, float] = {}
    for index, request in enumerate(requests):
        again = request.request_id in cancelled
        at = cancelled[request.request_id] if again else float(rng.randint(0, spread))
        keyed.append((at, Event(int(at), "add", index)))
        successor = index + 1 < len(requests) and requests[index + 1].request_id == request.request_id
        if successor or ("cancels" in features and rng.random() < 0.15):
            step = int(at) + rng.choice((0, rng.randint(0, 8), rng.randint(0, 60)))
            cancelled[request.request_id] = at = max(at + 0.001, step)
            keyed.append((at, Event(step, "cancel", index)))
            cancelled[request.request_id] = at + 0.001
    if "cancels" in features:
        keyed += [(s, Event(s, "stray")) for s in _some_steps(rng, 0.2)]
    if "async" in features:
        keyed += [(s, Event(s, "settle")) for s in _some_steps(rng, 0.3)]
    if "suspensions" in features and rng.random() < 0.4:
        keyed += _draw_suspensions(rng, len(requests))
    if "updates" in features and rng.random() < 0.3:
        keyed += _draw_updates(rng)
    keyed.sort(key=lambda pair: pair[0])
    return tuple(event for _, event in keyed)


def _draw_suspensions(rng: random.Random, requests: int) -> list[tuple[float, Event]]:
    """Each of them is resumed, some twice, some before they are there."""
    found: list[tuple[float, Event]] = []
    for _ in range(rng.randint(1, 2 * requests)):
        index, at = rng.randrange(requests), rng.choice((rng.randint(0, 8), rng.randint(0, 60)))
        found.append((at + 0.5, Event(at, "suspend", index)))
    last = {event.index: event.step for _, event in sorted(found, key=lambda pair: pair[0])}
    resumed = [(index, step + rng.randint(0, 30)) for index, step in last.items()]
    return found + [(at + 0.6, Event(at, "resume", index)) for index, at in resumed]


def _draw_updates(rng: random.Random) -> list[tuple[float, Event]]:
    """What ``keep`` gives belongs to neither model, so no reference could judge it."""
    policies = ("recompute", "recompute", "finish", "restart")
    steps = [rng.choice((rng.randint(1, 12), rng.randint(1, 60))) for _ in range(rng.choice((1, 1, 2)))]
    return [(step + 0.7, Event(step, "update", policy=rng.choice(policies))) for step in steps]


def _some_steps(rng: random.Random, chance: float) -> list[int]:
    return [rng.randint(0, 60) for _ in range(rng.randint(1, 4))] if rng.random() < chance else []
