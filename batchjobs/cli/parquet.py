"""The parquet form: the flat lines as a table with types. Needs pyarrow, the extra ``batchjobs[parquet]``.

A file is a row of row groups, each of some megabytes: what is in memory at a time is one of them. Values are those of
the JSON lines; only what may be either of two kinds there has a column for each kind here: a token is text, or bytes
where it is no text alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO

from batchjobs.errors import UsageError
from batchjobs.results import FIELDS, Choice, Result

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa

    from batchjobs.store import StoredResult
    from batchjobs.types import TokenText, TopLogprobs

GROUP_BYTES = 8 * 2**20
"""A row group is written when its values take this much memory."""
GROUP_ROWS = 50_000
_CHUNK_VALUES = 20_000
"""Values of lists that are Python objects, which take ten times the memory, before they become Arrow's."""
_CHUNK_ROWS = 1000
_REPEATED = ["status", "finish_reason", "model", "model_version", "worker"]
"""Columns that a dictionary makes smaller; for the others it takes memory and brings nothing."""


def require_pyarrow() -> None:
    """Raises UsageError where the form cannot be written."""
    if find_spec("pyarrow") is None:
        raise UsageError("--format parquet needs pyarrow; install it with: pip install 'batchjobs[parquet]'")


class ParquetWriter:
    """A Parquet file. It can only be read once it was closed: what says where its parts are stands at its end."""

    def __init__(self, out: BinaryIO) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pa.set_memory_pool(pa.system_memory_pool())  # the faster ones keep what they were given: 40 MB more
        self._schema = _schema()
        self._sink = _Sink(out)
        with self._sink:
            self._file = pq.ParquetWriter(self._sink, self._schema, compression="zstd", use_dictionary=_REPEATED)
        self._chunk: list[Result] = []
        self._chunk_values = 0
        self._group: list[pa.RecordBatch] = []
        self._group_bytes = 0
        self._group_rows = 0

    def add(self, stored: StoredResult) -> None:
        result = Result.of(stored)
        self._chunk.append(result)
        self._chunk_values += _values_in(result)
        if len(self._chunk) >= _CHUNK_ROWS or self._chunk_values >= _CHUNK_VALUES:
            self._convert()
        if self._group_bytes >= GROUP_BYTES or self._group_rows >= GROUP_ROWS:
            self._write_group()

    def close(self) -> None:
        self._convert()
        self._write_group()
        with self._sink:
            self._file.close()

    def _convert(self) -> None:
        if not self._chunk:
            return
        batch = _record_batch(self._chunk, self._schema)
        self._chunk.clear()
        self._chunk_values = 0
        self._group.append(batch)
        self._group_bytes += batch.nbytes
        self._group_rows += batch.num_rows

    def _write_group(self) -> None:
        import pyarrow as pa

        if not self._group:
            return
        table = pa.Table.from_batches(self._group, self._schema)
        with self._sink:
            self._file.write_table(table, row_group_size=table.num_rows)
        self._group.clear()
        self._group_bytes = self._group_rows = 0


class _Sink:
    """A stream as pyarrow wants it: one that tells its position, which a pipe does not.

    It only writes inside of a ``with`` block, and nothing after an error: pyarrow would still write the end of a file
    that was given up, and half a file would look like a whole one.
    """

    closed = False

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._position = 0
        self._is_open = False

    def __enter__(self) -> None:
        self._is_open = True

    def __exit__(self, *failure: object) -> None:
        self._is_open = False

    def write(self, data: bytes) -> int:
        if self._is_open:
            try:
                self._out.write(data)
            except BaseException:
                self._is_open = False
                raise
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------------- columns


def _schema() -> pa.Schema:
    """The keys of a flat line, all of them, and behind ``tokens`` the bytes of those that are no text."""
    import pyarrow as pa

    text, whole, real, instant = pa.string(), pa.int64(), pa.float64(), pa.timestamp("us", tz="UTC")
    top = pa.struct({"token_id": whole, "logprob": real, "token": text, "token_bytes": pa.binary()})
    tops = pa.list_(pa.list_(top))
    span = pa.struct({"version": text, "from_token": whole, "worker": text, "attempt": whole})
    kinds: dict[str, pa.DataType] = {
        **dict.fromkeys(("index", "prompt_tokens", "completion_tokens", "cached_tokens", "attempt", "n"), whole),
        **dict.fromkeys(("choice",), whole),
        **dict.fromkeys(("token_ids", "prompt_token_ids"), pa.list_(whole)),
        **dict.fromkeys(("logprobs", "token_times", "prompt_logprobs"), pa.list_(real)),
        **dict.fromkeys(("top_logprobs", "prompt_top_logprobs"), tops),
        **dict.fromkeys(("created_at", "started_at", "first_token_at", "finished_at"), instant),
        "error": pa.struct({"code": text, "message": text}),
        "tokens": pa.list_(text),
        _BYTES: pa.list_(pa.binary()),
        "version_spans": pa.list_(span),
    }
    choice = pa.struct([(name, kinds.get(name, text)) for name in _names(Choice.__dataclass_fields__)])
    kinds["choices"] = pa.list_(choice)
    return pa.schema([(name, kinds.get(name, text)) for name in _names(FIELDS)])


_BYTES = "token_bytes"


def _names(fields: Iterable[str]) -> list[str]:
    """The fields of a line or of a choice, in their order, as columns."""
    return [column for name in fields for column in ((name, _BYTES) if name == "tokens" else (name,))]


def _values_in(result: Result) -> int:
    """About how many values its lists have."""
    lists = sum(_values_of_a_choice(choice) for choice in result.choices) if result.n > 1 else 0
    return lists + _values_of_a_choice(result) + _values_in_tops(result.prompt_top_logprobs)


def _values_of_a_choice(made: Result | Choice) -> int:
    return 4 * made.completion_tokens + _values_in_tops(made.top_logprobs)


def _values_in_tops(tops: Sequence[TopLogprobs | None] | None) -> int:
    return sum(4 * len(top) for top in tops if top) if tops else 0


def _record_batch(results: Sequence[Result], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = {name: [_cell(name, result) for result in results] for name in schema.names}
    # As in JSON, a logprob that is no number is null: that is what from_pandas means.
    arrays = [pa.array(columns[field.name], field.type, from_pandas=True) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cell(name: str, made: Result | Choice) -> Any:
    """What pyarrow makes a value of the column from."""
    if name == _BYTES:
        return _bytes_of(made.tokens)
    value = getattr(made, name)
    if name == "tokens":
        return [token if isinstance(token, str) else None for token in value]
    if name in ("top_logprobs", "prompt_top_logprobs"):
        return None if value is None else [_top(top) for top in value]
    if name == "version_spans":
        return [
            {"version": s.version, "from_token": s.from_token, "worker": s.worker, "attempt": s.attempt} for s in value
        ]
    if name == "error":
        return None if value is None else value.as_dict()
    if name == "choices":
        return [_choice(choice) for choice in value] if isinstance(made, Result) and made.n > 1 else None
    return value


def _choice(choice: Choice) -> Mapping[str, Any]:
    return {name: _cell(name, choice) for name in _names(Choice.__dataclass_fields__)}


def _top(top: TopLogprobs | None) -> list[tuple[Any, ...]] | None:
    if top is None:
        return None
    return [
        (token_id, logprob, token, None) if isinstance(token, str) else (token_id, logprob, None, bytes(token))
        for token_id, logprob, token in top
    ]


def _bytes_of(tokens: Sequence[TokenText]) -> list[bytes | None] | None:
    """The bytes of those tokens that are no text alone; None, as for most answers, where all are text."""
    if all(isinstance(token, str) for token in tokens):
        return None
    return [None if isinstance(token, str) else bytes(token) for token in tokens]
