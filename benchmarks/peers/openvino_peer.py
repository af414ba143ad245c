"""OpenVINO GenAI's continuous batching as a peer of ``compare.py``, on a model in OpenVINO's own format.

Weights are stored as the folder has them. The arithmetic is that of the asked dtype, and so are keys and values unless
``openvino_kv`` names another type: by itself OpenVINO stores them as u8 on a CPU, which is another trade of accuracy
for speed. A processor without instructions for bfloat16 computes in float32 whatever is asked for, and keys and values
follow; the settings in the report say so. The logprob of each token is kept.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peer_protocol import Work, serve

HINTS = {"float32": "f32", "bfloat16": "bf16"}


class OpenvinoPeer:
    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = options["max_requests"]
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = 2
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = options["sharing"]
        can = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        hint = HINTS[options["dtype"]] if options["dtype"] != "bfloat16" or "BF16" in can else "f32"
        kv = options.get("openvino_kv") or hint
        properties = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": options["threads"]}
        if kv != "default":
            properties["KV_CACHE_PRECISION"] = kv
        folder = options["openvino_model"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self.versions = {"openvino": openvino.__version__, "openvino_genai": openvino_genai.__version__}
        self.settings = {**properties, "max_num_seqs": options["max_requests"], "prefix_caching": options["sharing"]}
        self.settings["model"] = Path(folder).name
        self.settings.setdefault("KV_CACHE_PRECISION", "its default")
        self._shares, self._runs = options["sharing"], 0

    def run(self, work: Work) -> tuple[float, list[int]]:
        # Its prefix cache cannot be emptied: other ids of the same pattern find nothing of the run before.
        self._runs += self._shares
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64) + self._runs) for ids, _ in work]  # [1, T] each
        settings = [
            openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False, logprobs=1)
            for _, tokens in work
        ]
        begin = time.perf_counter()
        results = self._pipeline.generate(prompts, settings)
        seconds = time.perf_counter() - begin
        return seconds, [len(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    serve(OpenvinoPeer)
