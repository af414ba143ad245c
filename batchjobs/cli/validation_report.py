"""What ``batchjobs validate`` found: one object for programs, and a short report for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchjobs.cli.console import print_fields
from batchjobs.text import plural, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchjobs.submission import Loader
    from batchjobs.validation import Inspection
    from workers.speed import Speed
    from workers.token_count import TokenCount

_SHOWN_NAMES = 5
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


# ------------------------------------------------------------------------------------------------- for programs


def lines_report(found: Inspection, files: Sequence[str | None]) -> dict[str, Any]:
    """What can be told without a model."""
    asked = found.asked
    return {
        "files": [name for name in files if name],
        "lines": found.lines,
        "invalid_lines": len(found.errors),
        "requests": {
            "total": asked.requests,
            "chat": asked.chats,
            "completion": asked.completions,
            "choices": asked.choices,
            "response_format": asked.formatted,
            "echo": asked.echoing,
            "seed": asked.seeded,
        },
        "models": dict(asked.models.most_common() + found.other_models.most_common()),
        "model_versions": dict(asked.model_versions.most_common()),
        "duplicates": {**asdict(found.duplicates), "repeated": found.duplicates.repeated},
        "max_tokens": asked.max_tokens,
        "errors": [asdict(error) for error in found.errors],
    }


def tokens_report(counted: TokenCount, loader: Loader) -> dict[str, Any]:
    """What the model's tokenizer and configuration add to it."""
    outline, lengths = counted.outline, counted.lengths
    number = lengths.number
    report: dict[str, Any] = {
        "model": {
            "name": outline.name,
            "architecture": outline.architecture,
            "context_tokens": outline.max_model_len,
        },
        "prompt_tokens": {
            "total": lengths.total,
            "mean": lengths.total / number if number else 0.0,
            "median": lengths.quantile(0.5),
            "p95": lengths.quantile(0.95),
            "longest": counted.longest[0],
            "longest_at": _place(loader, counted.longest[1]) if number else None,
        },
        "answer_tokens_at_most": counted.answer_tokens,
        "shareable": {
            "tokens": counted.share.saved_tokens,
            "share": counted.share.saved_tokens / lengths.total if lengths.total else 0.0,
            "page_size": counted.share.page_size,
            "is_exact": counted.share.is_exact,
        },
        "kv_cache": _kv_report(counted, loader),
        "cut_answers": {
            "count": counted.cut,
            "at": [
                {
                    **_place(loader, cut.index),
                    "custom_id": cut.custom_id,
                    "prompt_tokens": cut.prompt_tokens,
                    "max_tokens": cut.wanted,
                    "room": cut.room,
                }
                for cut in counted.cuts
            ],
        },
        "refused_requests": counted.refused,
    }
    return report


def _kv_report(counted: TokenCount, loader: Loader) -> dict[str, Any] | None:
    sizes, kv = counted.sizes, counted.kv
    if sizes is None or not kv.sequences:
        return None
    together = min(counted.together, kv.sequences)
    return {
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "device": counted.outline.device,
        "bytes_per_token": sizes.token_bytes,
        "bytes_per_page": sizes.page_bytes,
        "sliding_windows": sizes.windows,
        "largest_request_bytes": kv.of_request * sizes.page_bytes,
        "largest_request_at": _place(loader, kv.index),
        "together": together,
        "average_bytes": round(kv.pages / kv.sequences * together * sizes.page_bytes),
        "worst_bytes": sum(kv.largest) * sizes.page_bytes,
    }


def stated_time(tokens: int, tokens_per_second: float) -> dict[str, Any]:
    """At a speed that the user states, for so many tokens to be generated at most."""
    seconds = tokens / tokens_per_second
    return {
        "speed": "stated",
        "tokens_per_second": tokens_per_second,
        "at_most_seconds": seconds,
        "half_seconds": seconds / 2,
    }


def measured_time(counted: TokenCount, speed: Speed) -> dict[str, Any]:
    """At the speed of a sample that was answered here."""
    prompts = counted.lengths.total / speed.prompt_tokens_per_second
    answers = counted.answer_tokens / speed.answer_tokens_per_second
    report = {"speed": "measured", **asdict(speed)}
    report |= {"at_most_seconds": prompts + answers, "half_seconds": prompts + answers / 2}
    if speed.answer_tokens is not None:
        expected = min(speed.answer_tokens * counted.choices, counted.answer_tokens)
        report["expected_seconds"] = prompts + expected / speed.answer_tokens_per_second
    return report


def _place(loader: Loader, index: int) -> dict[str, Any]:
    source, line = loader.place_of(index)
    return {"line": line, "source": source}


# --------------------------------------------------------------------------------------------------- for people


def print_report(report: Mapping[str, Any]) -> None:
    """The report on stdout, a line for each thing that is there to be said."""
    print_fields(
        {
            "lines": _lines(report),
            "requests": _requests(report["requests"]),
            "asking for": _special(report["requests"]),
            "named models": _names(report["models"]),
            "versions": _names(report["model_versions"]),
            "repeated": _repeated(report["duplicates"]),
            "model": _model(report.get("model")),
            "prompt tokens": _prompts(report.get("prompt_tokens")),
            "answer tokens": _answers(report),
            "shareable": _share(report.get("shareable")),
            "KV cache": _kv(report.get("kv_cache")),
            "KV need": _kv_need(report.get("kv_cache")),
            "time": _time(report.get("time")),
            "assumed": _assumed(report.get("time")),
        }
    )


def _lines(report: Mapping[str, Any]) -> str:
    bad = report["invalid_lines"]
    return f"{report['lines']:,}" + (f", {bad:,} of them invalid" if bad else ", all valid")


def _requests(requests: Mapping[str, int]) -> str:
    kinds = [plural(requests[kind], kind) for kind in ("chat", "completion") if requests[kind]]
    choices = f"; {plural(requests['choices'], 'choice')}" if requests["choices"] != requests["total"] else ""
    return f"{requests['total']:,}" + (f": {', '.join(kinds)}" if kinds else "") + choices


def _special(requests: Mapping[str, int]) -> str | None:
    names = [f"{name} {requests[name]:,}" for name in ("response_format", "echo", "seed") if requests[name]]
    return ", ".join(names) or None


def _names(counts: Mapping[str, int]) -> str | None:
    shown = [f"{shortened(name, 60)} ({count:,})" for name, count in list(counts.items())[:_SHOWN_NAMES]]
    more = f" and {len(counts) - _SHOWN_NAMES:,} more" if len(counts) > _SHOWN_NAMES else ""
    return ", ".join(shown) + more if counts else None


def _repeated(duplicates: Mapping[str, int]) -> str | None:
    if not duplicates["repeated"]:
        return None
    return f"{plural(duplicates['repeated'], 'request')} with the prompt and the sampling of an earlier one"


def _model(model: Mapping[str, Any] | None) -> str | None:
    if model is None:
        return None
    return f"{model['name']} ({model['architecture']}), context of {plural(model['context_tokens'], 'token')}"


def _prompts(tokens: Mapping[str, Any] | None) -> str | None:
    if tokens is None or not tokens["total"]:
        return None
    return (
        f"{tokens['total']:,}: mean {tokens['mean']:,.1f}, median {tokens['median']:,}, 95 % up to {tokens['p95']:,}, "
        f"longest {tokens['longest']:,} ({_where(tokens['longest_at'])})"
    )


def _answers(report: Mapping[str, Any]) -> str:
    if (most := report.get("answer_tokens_at_most")) is None:
        return f"at most {report['max_tokens']:,}"
    cut = report["cut_answers"]["count"]
    return f"at most {most:,}" + (f"; {plural(cut, 'answer')} shorter than asked for, see below" if cut else "")


def _share(share: Mapping[str, Any] | None) -> str | None:
    if share is None:
        return None
    about = "" if share["is_exact"] else "about "
    return (
        f"{about}{share['share']:.1%} of the prompt tokens at most ({about}{share['tokens']:,}), "
        f"in pages of {share['page_size']}"
    )


def _kv(kv: Mapping[str, Any] | None) -> str | None:
    if kv is None:
        return None
    windows = ", ".join(f"{window:,}" for window in kv["sliding_windows"])
    sliding = f"; layers with a window of {windows} tokens keep only these" if windows else ""
    return f"{_bytes(kv['bytes_per_token'])} a token in {kv['dtype']}, as on {kv['device']}{sliding}"


def _kv_need(kv: Mapping[str, Any] | None) -> str | None:
    if kv is None:
        return None
    return (
        f"{_bytes(kv['largest_request_bytes'])} for the largest request ({_where(kv['largest_request_at'])}); "
        f"{kv['together']} at a time: {_bytes(kv['average_bytes'])} on average, {_bytes(kv['worst_bytes'])} at worst"
    )


def _time(times: Mapping[str, Any] | None) -> str | None:
    if times is None:
        return None
    text = (
        f"at most {duration(times['at_most_seconds'])}; {duration(times['half_seconds'])} if answers are half as long"
    )
    if "expected_seconds" in times:
        mean = times["answer_tokens"]
        text += f"; {duration(times['expected_seconds'])} if they are as long as those measured ({mean:,.0f} tokens)"
    return text


def _assumed(times: Mapping[str, Any] | None) -> str | None:
    if times is None:
        return None
    if times["speed"] == "stated":
        return f"{times['tokens_per_second']:,.0f} generated tokens a second all the time, prompts included, as stated"
    return (
        f"one worker like this machine: {times['prompt_tokens_per_second']:,.0f} prompt tokens and "
        f"{times['answer_tokens_per_second']:,.0f} generated tokens a second, measured on "
        f"{plural(times['requests'], 'request')} of this input in {times['seconds']:.0f} s; no prompt shared"
    )


def cut_line(cut: Mapping[str, Any]) -> str:
    """One answer that the context would cut."""
    return (
        f"{_where(cut)}: the prompt has {plural(cut['prompt_tokens'], 'token')}, so the context has room for "
        f"{cut['room']:,} of the {cut['max_tokens']:,} that the answer may have"
    )


def _where(place: Mapping[str, Any]) -> str:
    return (f"{place['source']}, " if place["source"] else "") + f"line {place['line']:,}"


def _bytes(size: float) -> str:
    for unit, each in _UNITS:
        if size >= each:
            return f"{size / each:.1f} {unit}"
    return plural(round(size), "byte")


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, below, least in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // least} {below}"
    return f"{whole} s"
