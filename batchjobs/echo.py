"""What ``echo`` puts in front of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchjobs.types import TokenText


def prompt_text(prompt: str | Sequence[int], tokens: Iterable[TokenText]) -> str:
    """The prompt as it is repeated: a text as it was given, token ids as the text that their ``tokens`` make together.

    What is not UTF-8 even then shows as U+FFFD.
    """
    if isinstance(prompt, str):
        return prompt
    return b"".join(t.encode() if isinstance(t, str) else bytes(t) for t in tokens).decode(errors="replace")


def following(prompt: str, text: str, tokens: Sequence[TokenText]) -> str:
    """The answer ``text``, made of ``tokens``, right behind its prompt.

    Some decoders drop the blank in front of the first word, which belongs between prompt and answer.
    """
    first = tokens[0] if tokens else ""
    if not text or not isinstance(first, str) or not first.startswith(" ") or _begin_alike(text, first):
        return prompt + text
    return f"{prompt} {text}" if _begin_alike(text, first[1:]) else prompt + text


def _begin_alike(text: str, other: str) -> bool:
    return text.startswith(other[: len(text)])
