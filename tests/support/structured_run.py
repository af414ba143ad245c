"""Many answers held to random JSON schemas by a real model: ``python -m tests.support.structured_run --requests 1000``.

Every answer must end by itself, parse and validate; the exit code is 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

import jsonschema

from batchjobs.types import FinishReason
from tests.support.models import smollm2
from tests.support.schemas import Schema, random_schema, response_format
from workers.engine import Engine, EngineConfig, EngineOutput, SamplingParams


def problem(output: EngineOutput, schema: Schema) -> str | None:
    """Why an answer does not count as right; None when it does."""
    if output.error is not None:
        return f"failed: {output.error.code}"
    if output.finish_reason is not FinishReason.STOP:
        return "cut by length"
    try:
        jsonschema.validate(json.loads(output.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {output.text[:80]!r}"
    return None


def generate(requests: int, *, seed: int = 0, max_tokens: int = 300) -> tuple[list[EngineOutput], list[Schema]]:
    """Answers of SmolLM2 to ``requests`` random schemas, sampled at temperature 1, and the schemas."""
    rng = random.Random(seed)
    schemas = [random_schema(rng, depth=1) for _ in range(requests)]
    engine = Engine(str(smollm2()), EngineConfig(device="cpu"))
    prompts = [
        engine.encode_chat([{"role": "user", "content": f"Answer with JSON that fits {json.dumps(s)}"}])
        for s in schemas
    ]
    sampling = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=max_tokens, response_format=response_format(schema))
        for number, schema in enumerate(schemas)
    ]
    return engine.generate(prompts, sampling, progress_bar=sys.stderr.isatty()), schemas


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=300)
    arguments = parser.parse_args()
    started = time.monotonic()
    outputs, schemas = generate(arguments.requests, seed=arguments.seed, max_tokens=arguments.max_tokens)
    seconds = time.monotonic() - started
    problems = [problem(output, schema) for output, schema in zip(outputs, schemas, strict=True)]
    lengths = [len(output.token_ids) for output in outputs]
    print(f"{len(outputs)} answers, {sum(map(_parses, outputs))} parse, {problems.count(None)} validate too")
    print(f"{sum(o.finish_reason is FinishReason.LENGTH for o in outputs)} cut by length")
    print(f"{sum(lengths)} tokens, {statistics.median(lengths):.0f} in the median answer")
    print(f"{seconds:.0f} s with loading and compiling, {sum(lengths) / seconds:.0f} tokens/s")
    wrong = [(number, found) for number, found in enumerate(problems) if found]
    for number, found in wrong[:20]:
        print(f"request {number}: {found}")
    return 1 if wrong else 0


def _parses(output: EngineOutput) -> bool:
    try:
        json.loads(output.text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
