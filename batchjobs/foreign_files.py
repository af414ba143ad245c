"""Files that are no JSON Lines at all, told by their first two lines: one sentence in place of an error a line."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAGIC = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip archive or spreadsheet",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"7z\xbc\xaf": "a 7z archive",
    b"%PDF-": "a PDF document",
    b"SQLite format 3\0": "an SQLite database",
    b"\xff\xfe\0\0": "UTF-32 text",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"{\0\0": "UTF-32 text",
    b"{\0": "UTF-16 text",
    b"\0{": "UTF-16 text",
    b"\x1e": "a JSON text sequence, with a record separator before each line",
}
_TEXTS = (
    (rb"(?i)<(!doctype html|html|head|body)\b", "an HTML page, perhaps one that tells an error"),
    (rb"<[?!a-zA-Z]", "XML"),
    (rb"version https://git-lfs", "a Git LFS pointer (`git lfs pull` fetches the file itself)"),
    (rb"(data|event): ", "a stream of server-sent events"),
    (rb"\[{1,2}[A-Za-z_][\w.-]*\]{1,2}$", "TOML"),
    (rb"(---|%YAML .*)$|- [\w-]+:(\s|$)", "YAML"),
)
_YAML_KEY = re.compile(rb"\s*(- )?[a-z_-]+:(\s|$)|---$")
_SEPARATORS = ((b"\t", "tab-separated values"), (b",", "CSV"), (b";", "CSV"))
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
_LOOKED_AT_BYTES = 4096
_BROKEN = object()
_WANTED = 'one JSON object per line is wanted, such as {"prompt": "..."}'


def recognised_format(head: Sequence[bytes]) -> str | None:
    """One sentence when the first two lines show that the whole file is something else than JSON Lines."""
    if not head:
        return None
    first = head[0].strip()
    if (kind := _binary(head[0])) is not None:
        return f"this is {kind}; {_WANTED}, in UTF-8 (gzip is read as it is)"
    value = _loads(first)
    if isinstance(value, list) and (len(head) == 1 or any(isinstance(item, dict) for item in value)):
        return _array(value)
    if value is not _BROKEN:
        return None
    if isinstance(_loads(first.partition(b"\r")[0]), dict):
        return f"the lines end with CR alone, as on old Macs; {_WANTED} (`tr '\\r' '\\n' < FILE` rewrites it)"
    if first.endswith(b",") and isinstance(_loads(first[:-1]), dict):
        return f"there are commas between the lines; {_WANTED}, without a comma after it"
    if (kind := _text(first)) is not None:
        return f"this looks like {kind}; {_WANTED}"
    if first.startswith(b"["):
        return _array([])
    second_is_json = len(head) > 1 and isinstance(_loads(head[1]), dict)
    if second_is_json or (first.startswith(b"{") and head[-1].lstrip().startswith(b"{") and first != b"{"):
        return None  # one bad line among good ones
    if first.startswith(b"{") and _ends_within_a_text(first):
        return None  # a line feed in a text, which JSON writes as \\n
    if first.startswith(b"{"):
        return f"the JSON is pretty-printed over several lines; {_WANTED} (`jq -c . FILE` rewrites it)"
    return _table_or_text([line.strip()[:_LOOKED_AT_BYTES] for line in head])


def _ends_within_a_text(line: bytes) -> bool:
    return re.sub(rb"\\.", b"", line).count(b'"') % 2 == 1


def _binary(start: bytes) -> str | None:
    kind = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
    if kind is None and start[257:262] == b"ustar":
        return "a tar archive"
    if kind is None and not start.lstrip().startswith((b"{", b"[")) and _CONTROL.search(start, 0, _LOOKED_AT_BYTES):
        return "binary data"
    return kind


def _array(value: Sequence[Any]) -> str:
    rewrite = ".[] | {prompt: .}" if value and all(isinstance(item, str) for item in value) else ".[]"
    return f"the file is one JSON array; {_WANTED} (`jq -c '{rewrite}' FILE` rewrites it)"


def _text(first: bytes) -> str | None:
    return next((kind for pattern, kind in _TEXTS if re.match(pattern, first[:_LOOKED_AT_BYTES])), None)


def _table_or_text(head: Sequence[bytes]) -> str:
    if len(head) > 1 and all(map(_YAML_KEY.match, head)):
        return f"this looks like YAML; {_WANTED}"
    for separator, kind in _SEPARATORS:
        counts = {line.count(separator) for line in head}
        if 0 not in counts and (len(counts) == 1 or b'"' in b"".join(head)):
            return f"this looks like {kind}; {_WANTED}"
    if not _is_utf8(head[0]):
        return f"this is neither JSON nor UTF-8 text; {_WANTED}"
    return f"this looks like plain text; {_WANTED} (`jq -Rc '{{prompt: .}}' FILE` makes one of each line)"


def _is_utf8(start: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()  # the last character may have been cut
    try:
        decoder.decode(start)
    except UnicodeDecodeError:
        return False
    return True


def _loads(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _BROKEN
