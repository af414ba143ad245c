"""``response_format`` as the OpenAI API has it: its shape is checked here, before anything is stored.

Whether a grammar can be made of the schema only a worker can tell. Where it cannot, the request fails: an answer that
was not held to its format is never given out as one that was.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from batchjobs.fields import FieldError, is_shallow, quoted, unknown_name, wrong_type
from batchjobs.types import RESPONSE_FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SCHEMA_BYTES = 128 * 2**10
MAX_SCHEMA_DEPTH = 64
"""Objects and lists inside each other."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def response_format(name: str, value: Any) -> dict[str, Any] | None:
    """The format as it is stored; None for ``{"type": "text"}``, which asks for nothing. Raises FieldError."""
    if type(value) is not dict:
        raise wrong_type(name, 'an object such as {"type": "json_object"}', value)
    kind = value.get("type")
    if type(kind) is not str:
        raise wrong_type(f"{name}.type", "a string", kind)
    if kind not in RESPONSE_FORMATS:
        accepted = ", ".join(RESPONSE_FORMATS)
        raise FieldError(f"{name}.type: {quoted(kind)} is not supported; accepted: {accepted}", f"{name}.type")
    _only(value, ("type", "json_schema") if kind == "json_schema" else ("type",), name)
    if kind == "json_schema":
        _check_schema(value.get("json_schema"), f"{name}.json_schema")
    return None if kind == "text" else value


def _check_schema(value: Any, where: str) -> None:
    if type(value) is not dict:
        raise wrong_type(where, "an object with name and schema", value)
    _only(value, ("name", "description", "schema", "strict"), where)
    title = value.get("name")
    if title is not None and (type(title) is not str or not _NAME.fullmatch(title)):
        raise FieldError(f"{where}.name must be 1 to 64 letters, digits, _ and -", f"{where}.name")
    for field, kind, wanted in (("description", str, "a string"), ("strict", bool, "true or false")):
        if value.get(field) is not None and type(value[field]) is not kind:
            raise wrong_type(f"{where}.{field}", wanted, value[field])
    schema = value.get("schema")
    if type(schema) is not dict:
        raise wrong_type(f"{where}.schema", "an object", schema)
    if not is_shallow(schema, MAX_SCHEMA_DEPTH):
        raise FieldError(f"{where}.schema is nested more than {MAX_SCHEMA_DEPTH} deep", f"{where}.schema")
    if len(orjson.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise FieldError(f"{where}.schema is longer than {MAX_SCHEMA_BYTES // 2**10} KiB", f"{where}.schema")


def _only(value: Mapping[str, Any], accepted: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in accepted:
            raise unknown_name(name, accepted).below(where)
