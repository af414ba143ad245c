"""Random JSON schemas that always have a short instance, so that an answer held to one ends after a bounded text."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("red", "green", "blue", "north", "south", "yes", "no", "small", "large")
_NAMES = ("name", "age", "city", "tags", "kind", "size", "score", "ok", "at")


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """An object schema at the top, as programs ask for."""
    schema = _object(rng, depth)
    if rng.random() < 0.2:  # by reference
        shared = _leaf(rng)
        name = rng.choice(_NAMES)
        schema["properties"][name] = {"$ref": "#/$defs/shared"}
        schema["required"] = sorted({*schema["required"], name})
        schema["$defs"] = {"shared": shared}
    return schema


def response_format(schema: Schema) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def _any(rng: random.Random, depth: int) -> Schema:
    if depth == 0 or rng.random() < 0.6:
        return _leaf(rng)
    return rng.choice((_object, _array, _any_of))(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.8]
    properties = {name: _any(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 1)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_leaf(rng), _any(rng, depth)]}


def _leaf(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
            {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9), "multipleOf": 0.5},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample(_WORDS, 3)},
            {"const": rng.choice(_WORDS)},
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
            {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9},
        )
    )
