"""The systems that ``batchjobs bench`` measures, as peers: their environment holds what a worker needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers
from peer_protocol import Work as Pairs

from workers.bench.baselines import BASELINES, peer_sequences
from workers.bench.system import OurEngine, System
from workers.engine.config import EngineConfig
from workers.workloads import Work


class InProcessPeer:
    """A baseline by its name, or this engine without one."""

    def __init__(self, baseline: str | None, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        model, dtype, together = options["model"], options["dtype"], options["max_requests"]
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self._system: System
        if baseline is not None:
            self._system = BASELINES[baseline](model, dtype, together, "cpu")
            self.settings: dict[str, Any] = {"sequences": peer_sequences(together, "cpu")}
            return
        config = EngineConfig(
            dtype=dtype,
            device="cpu",
            max_requests_per_batch=together,
            allow_block_sharing=options["sharing"],
            threads=options["threads"],
        )
        self._system = ours = OurEngine(model, config)
        self.settings = {
            "sequences": together,
            "forward": ours.forward_kind,
            "attention": ours.engine.runner.backends[0].name,
            "prefix_caching": options["sharing"],
        }

    def run(self, work: Pairs) -> tuple[float, list[int]]:
        done = self._system.run([Work(tuple(ids), tokens) for ids, tokens in work])
        return done.seconds, done.made
