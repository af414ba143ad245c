"""vLLM as a peer of ``compare.py``: ``LLM.generate`` over all requests at once, the logprob of each token kept.

On a CPU. vLLM by itself keeps a core free for its scheduler, which on two cores leaves one for the model; here its
threads are bound to as many cores as the others have, unless ``vllm_bind`` says otherwise. No prefix is shared between
rounds. Start-up compiles, and is reported apart.
"""

from __future__ import annotations

import os
import time
from typing import Any

from peer_protocol import Work, serve


class VllmPeer:
    def __init__(self, options: dict[str, Any]) -> None:
        threads = options["threads"]
        bind = options.get("vllm_bind") or f"0-{threads - 1}"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bind)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import torch
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(
            options["model"],
            dtype=options["dtype"],
            max_num_seqs=options["max_requests"],
            max_model_len=options["max_model_len"],
            enable_prefix_caching=options["sharing"],
            disable_log_stats=True,
        )
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.settings = {"max_num_seqs": options["max_requests"], "bind": bind, "prefix_caching": options["sharing"]}
        self._shares = options["sharing"]

    def run(self, work: Work) -> tuple[float, list[int]]:
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=ids) for ids, _ in work]
        sampling = [
            self._vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
            for _, tokens in work
        ]
        if self._shares:
            self._llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        for output in outputs:
            if len(output.outputs[0].logprobs or ()) != len(output.outputs[0].token_ids):
                raise RuntimeError("vLLM did not give the logprob of each token")
        return seconds, [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(VllmPeer)
