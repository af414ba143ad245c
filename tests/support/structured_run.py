"""Many answers held to random JSON schemas by a real model: ``python -m tests.support.structured_run --requests 1000``.

Every answer that ends by itself must parse and validate; the exit code is 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import random
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
    arguments = parser.parse_args()
    started = time.monotonic()
    outputs, schemas = generate(arguments.requests, seed=arguments.seed)
    seconds = time.monotonic() - started
    problems = [found for o, s in zip(outputs, schemas, strict=True) if (found := problem(o, s))]
    tokens = sum(len(o.token_ids) for o in outputs)
    print(
        f"{len(outputs)} answers, {len(outputs) - len(problems)} parse and validate, {tokens} tokens in {seconds:.0f} s"
    )
    for found in problems[:20]:
        print(found)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
