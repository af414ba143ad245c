"""What an engine is made of for one model; all of it anew when another model takes its place."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.engine.admission import Admission
from workers.engine.offload import HostPool
from workers.engine.pages import PagePool
from workers.engine.parallel.leading import make_runner
from workers.engine.pipeline import Pipeline
from workers.engine.prompts import PromptEncoder
from workers.engine.runner import Runner
from workers.engine.scheduler import Scheduler
from workers.engine.structured import GrammarCompiler
from workers.engine.text import Vocabulary

if TYPE_CHECKING:
    from workers.engine.config import EngineConfig
    from workers.engine.device_path import DevicePath
    from workers.engine.models import LoadedModel
    from workers.engine.parallel.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What comes of a model's tokenizer and of its end tokens: it can change while the weights' places stay."""

    prompts: PromptEncoder
    vocabulary: Vocabulary
    grammars: GrammarCompiler
    admission: Admission


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """``max_model_len`` is in tokens, prompt and answer together."""

    loaded: LoadedModel
    max_model_len: int
    vocab_size: int
    runner: Runner
    pool: PagePool
    scheduler: Scheduler
    pipeline: Pipeline
    reading: Reading


def assemble(
    loaded: LoadedModel, config: EngineConfig, *, seeds: random.Random | None = None, group: Group | None = None
) -> Parts:
    """Takes memory for the pages.

    ``seeds`` goes on drawing seeds where another model's parts stopped; ``group`` is that of a model that is split.

    Raises:
        UsageError: The engine cannot run this model, or there is no room for its pages.
    """
    max_model_len = min(config.max_model_len or loaded.max_model_len, loaded.max_model_len)
    vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
    runner = make_runner(loaded, config, max_model_len, group)
    pool = PagePool(
        runner.num_pages,
        runner.page_size,
        windows=[group.window for group in runner.groups],
        sharing=config.allow_block_sharing,
    )
    rows = runner.shortage.most_rows
    scheduler = Scheduler(
        pool,
        max_batch_tokens=rows,
        max_requests_per_batch=config.max_requests_per_batch,
        policy=config.scheduler_type,
        host=HostPool(runner.host_pages),
        safety_margin=config.safety_margin,
    )
    return Parts(
        loaded=loaded,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        runner=runner,
        pool=pool,
        scheduler=scheduler,
        pipeline=Pipeline(runner, depth=_depth(config, runner.path), vocab_size=vocab_size),
        reading=read(loaded, rows, pool, max_model_len, vocab_size, seeds=seeds or random.Random(config.seed)),
    )


def read(
    loaded: LoadedModel,
    max_chunk: int,
    pool: PagePool,
    max_model_len: int,
    vocab_size: int,
    *,
    seeds: random.Random,
    grammars: GrammarCompiler | None = None,
) -> Reading:
    """``max_chunk`` is the most rows that a sequence has in a step. ``grammars`` are those of a model with the same
    vocabulary and end tokens: what was compiled stays so."""
    vocabulary = Vocabulary(loaded.tokenizer)
    grammars = grammars or GrammarCompiler(loaded.tokenizer, vocab_size, loaded.eos_ids)
    return Reading(
        prompts=PromptEncoder(loaded.tokenizer, vocab_size),
        vocabulary=vocabulary,
        grammars=grammars,
        admission=Admission(
            pool=pool,
            max_chunk=max_chunk,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_ids=loaded.eos_ids,
            vocabulary=vocabulary,
            grammars=grammars,
            version=loaded.version,
            seeds=seeds,
        ),
    )


def carry_over(old: Parts, new: Parts) -> None:
    """Counters go on where they were, and whoever looks goes on looking."""
    new.pipeline.launched = old.pipeline.launched
    new.scheduler.observer = old.scheduler.observer
    new.scheduler.preemptions, new.scheduler.offloads = old.scheduler.preemptions, old.scheduler.offloads


def _depth(config: EngineConfig, path: DevicePath) -> int:
    wanted = config.use_async_batching
    return 2 if (path.works_beside if wanted is None else wanted) else 1
