"""The Trace Event Format, as far as it is used, as a strict check."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

FIELDS = {
    "X": {"ph": str, "name": str, "pid": int, "tid": int, "ts": int, "dur": int, "args": dict},
    "C": {"ph": str, "name": str, "pid": int, "tid": int, "ts": int, "args": dict},
    "M": {"ph": str, "name": str, "pid": int, "tid": int, "ts": int, "args": dict},
}
METADATA = {"process_name": {"name": str}, "thread_name": {"name": str}, "thread_sort_index": {"sort_index": int}}


def check_format(trace_events: list[dict[str, Any]]) -> None:
    """What the Trace Event Format asks of complete, counter and metadata events, and order within each track."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in trace_events if e["name"] == "thread_name"}
    for event in trace_events:
        wanted = FIELDS[event["ph"]]
        assert {name: type(value) for name, value in event.items()} == wanted, event
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert {name: type(value) for name, value in event["args"].items()} == METADATA[event["name"]]
        elif event["ph"] == "C":
            assert event["args"]
            assert all(type(value) is int and value >= 0 for value in event["args"].values())
        else:
            assert event["dur"] >= 0
            assert event["name"]
            tracks[event["pid"], event["tid"]].append(event)
    assert set(tracks) <= named
    for spans in tracks.values():
        enclosing: list[int] = []  # ends of the spans around the next one
        for one, two in pairwise(spans):
            assert one["ts"] <= two["ts"]
        for span in spans:
            start, end = span["ts"], span["ts"] + span["dur"]
            while enclosing and enclosing[-1] <= start:
                enclosing.pop()
            assert not enclosing or end <= enclosing[-1], "spans of a track overlap"
            enclosing.append(end)
