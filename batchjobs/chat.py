"""Chat messages of an input line: text only, one known role each."""

from __future__ import annotations

from typing import Any

from batchjobs.fields import FieldError, listed, quoted, unknown_name, wrong_type
from batchjobs.text import shortened

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""OpenAI's newer name for the system role is kept from models whose templates do not know it."""

# What an API answer carries along when it is put back into a conversation; null says nothing.
_EMPTY_FIELDS = frozenset({"refusal", "tool_calls", "function_call", "audio", "annotations", "tool_call_id"})

TEMPLATE_KWARGS = frozenset(
    {
        "custom_instructions",
        "date_string",
        "enable_thinking",
        "model_identity",
        "preserve_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
    }
)
"""Arguments of chat templates that only change wording. Others could replace the template or what it returns."""


def read_messages(value: Any, system: str | None) -> list[dict[str, str]]:
    """Messages of ``role``, ``content`` and perhaps ``name``, with ``system`` in front when the chat has none."""
    if type(value) is not list:
        raise wrong_type("messages", "a list", value)
    if not value:
        raise FieldError("messages must not be empty", "messages")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(value)]
    if system is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(value: Any, where: str) -> dict[str, str]:
    if type(value) is not dict:
        raise wrong_type(where, "an object with role and content", value)
    role = value.get("role")
    if type(role) is not str:
        raise wrong_type(f"{where}.role", "a string", role)
    if role not in _ROLES:
        raise FieldError(
            f"{where}.role: {quoted(role)} is not supported; accepted: {', '.join(_ROLES)}", f"{where}.role"
        )
    if "content" not in value:
        raise FieldError(f"{where}.content is missing", f"{where}.content")
    message = {"role": _ROLES[role], "content": _content(value.get("content"), f"{where}.content")}
    if len(value) > 2:
        _other_fields(value, where, message)
    return message


def _other_fields(value: dict[str, Any], where: str, message: dict[str, str]) -> None:
    for name, given in value.items():
        if name in ("role", "content") or given is None:
            continue
        if name == "name" and type(given) is str:
            message["name"] = given
        elif name == "name":
            raise wrong_type(f"{where}.name", "a string", given)
        elif name in _EMPTY_FIELDS:
            raise FieldError(f"{where}.{name} is not supported", f"{where}.{name}")
        else:
            raise unknown_name(name, ("role", "content", "name"), f"field in {where}:").below(where)


def _content(value: Any, where: str) -> str:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(where, "a string or a list of text parts", value)
    if not value:
        raise FieldError(f"{where} must not be an empty list", where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    if type(part) is not dict:
        raise wrong_type(where, 'an object such as {"type": "text", "text": "..."}', part)
    kind = part.get("type")
    if kind != "text":
        found = quoted(kind) if type(kind) is str else "none"
        raise FieldError(f"{where}: content parts of type {found} are not supported, only text", f"{where}.type")
    if type(part.get("text")) is not str:
        raise wrong_type(f"{where}.text", "a string", part.get("text"))
    others = [name for name in part if name not in ("type", "text")]
    if others:
        raise FieldError(
            f"{where}: unsupported in a text part: {listed(others, width=32)}", f"{where}.{shortened(others[0], 80)}"
        )
    return str(part["text"])


def read_template_kwargs(value: Any) -> dict[str, Any]:
    """The harmless arguments of a chat template, with plain values."""
    if type(value) is not dict:
        raise wrong_type("chat_template_kwargs", "an object", value)
    for name, given in value.items():
        where = f"chat_template_kwargs.{shortened(name, 80)}"
        if name not in TEMPLATE_KWARGS:
            accepted = ", ".join(sorted(TEMPLATE_KWARGS))
            raise FieldError(f"chat_template_kwargs: {quoted(name)} is not allowed; accepted: {accepted}", where)
        if type(given) in (dict, list):
            raise wrong_type(where, "a string, a number, true or false", given)
    return value
