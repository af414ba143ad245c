"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from batchjobs.client import Client
    from batchjobs.sampling_fields import Defaults
    from batchjobs.settings import Settings

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Text(click.ParamType[str]):
    """A text, UTF-8 whatever the locale says."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:  # bytes that the locale could not decode
            try:
                return os.fsencode(value).decode()
            except UnicodeError:
                self.fail("it is not valid UTF-8", param, ctx)
        return value


class OutputFile(click.Path):
    """A file to write; ``-`` is stdout, which commands know as None."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value == "-" else super().convert(value, param, ctx)


class NamedFile(OutputFile):
    """A file of its own: what goes there never mixes with other things on stdout."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(f"{self._what}; name one", param, ctx)
        return super().convert(value, param, ctx)


as_json = click.option("--json", "as_json", is_flag=True, help="JSON on stdout: an object, or one object a line.")

model = click.option("--model", "-m", help="Folder, hub id or .gguf file.")

model_version = click.option(
    "--model-version", type=Text(), help="Only this version of the model, sha256:…, answers lines that name none."
)

_SAMPLING = (
    click.option("--max-tokens", type=int, help="Tokens to generate at most."),
    click.option("--temperature", type=float, help="0 takes the most likely token always."),
    click.option("--top-p", type=float, help="Keep the smallest set of tokens with this probability."),
    click.option("--top-k", type=int, help="Keep this many of the most likely tokens; 0 keeps all."),
    click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    click.option("--n", type=int, help="Choices to generate for each request, 1 to 128."),
    click.option("--seed", type=int, help="Seed of every request that names none."),
    click.option(
        "--stop", type=Text(), multiple=True, help="End the text before this string; may be given several times."
    ),
    click.option("--system", type=Text(), help="System message of chats that have none."),
)

_ENGINE = (
    click.option("--device", help="auto, cpu, cuda, cuda:N; cuda:all: one worker for each."),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), help="Of the weights."),
    click.option("--page-size", type=int, help="Tokens in one page of the KV cache; default: 16, with flash-attn 256."),
    click.option("--num-blocks", type=int, help="Pages of the KV cache; default: what fits."),
    click.option("--max-batch-tokens", type=int, help="Tokens in one step at most; default: 2048, on a GPU what fits."),
    click.option("--max-requests-per-batch", type=int, help="Requests that decode at the same time at most."),
    click.option(
        "--scheduler-type",
        type=click.Choice(["fifo", "prefix", "longest_first"]),
        help="Which prompts come first; prefix: those that begin alike together. Default: fifo.",
    ),
    click.option("--max-memory-percent", type=float, help="Share of the free memory for the KV cache, over 0 to 1."),
    click.option("--safety-margin", type=float, help="Share of the pages that new sequences leave free, 0 to 1."),
    click.option("--cpu-offload-space", type=float, help="GiB of CPU memory for sequences that give way; 0 for none."),
    click.option(
        "--async-batching/--no-async-batching",
        "use_async_batching",
        default=None,
        help="Plan a step while the one before it runs; default: on a GPU.",
    ),
    click.option(
        "--cuda-graph/--no-cuda-graph",
        "use_cuda_graph",
        default=None,
        help="CUDA graphs for decode steps; default: on a GPU where the attention allows it.",
    ),
    click.option(
        "--native-forward/--no-native-forward",
        default=None,
        help="Run known models in C++ on a CPU; default: where that is faster.",
    ),
    click.option("--tensor-parallel-size", type=int, help="Devices that share one model; default: 1."),
)

_OUTPUT = (
    click.option(
        "--format",
        "form",
        type=click.Choice(["jsonl", "openai", "csv", "parquet", "table"]),
        default="jsonl",
        help="jsonl (default): flat lines with everything. openai: lines of the Batch API. csv: no token lists. "
        "parquet: everything, typed. table: for the screen.",
    ),
    click.option("-o", "--output", "target", type=OutputFile(), help="File to write; default: stdout, also -."),
    click.option(
        "--errors",
        type=NamedFile("failures need a file of their own"),
        help="File for the requests that did not complete, in the same form; without it they stand among the answers "
        "(openai: are left out).",
    ),
    click.option("--force", is_flag=True, help="Replace output files that exist, but never the input."),
)


def output_options(command: Decorated) -> Decorated:
    """Where results go, and in which form."""
    return _with(command, _OUTPUT)


def sampling_defaults(command: Decorated) -> Decorated:
    """Options for what lines leave open; collect them with :func:`defaults_from`."""
    return _with(command, _SAMPLING)


def engine_options(command: Decorated) -> Decorated:
    """Options of the engine; they are settings by the same names."""
    return _with(command, _ENGINE)


def _with(command: Decorated, options: tuple[Callable[[Any], Any], ...]) -> Decorated:
    for option in reversed(options):
        command = option(command)
    return command


def defaults_from(options: dict[str, Any]) -> Defaults:
    """Takes the sampling options, and the version if there is one, out of a command's options. Raises UsageError for a
    value out of range."""
    from batchjobs.sampling_fields import Defaults

    system = options.pop("system")
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed")
    fields = {name: value for name in names if (value := options.pop(name)) is not None}
    if stop := list(options.pop("stop")):
        fields["stop"] = stop
    return Defaults(fields, system, options.pop("model_version", None))


def settings_of(ctx: click.Context, **flags: Any) -> Settings:
    """The settings in force for a command, with its own flags on top."""
    from batchjobs.settings import load_settings

    return load_settings(**ctx.find_root().obj, **flags)


def open_client(ctx: click.Context, **flags: Any) -> Client:
    """A client for the command, to be used in a ``with`` block."""
    from batchjobs.client import Client

    return Client(settings_of(ctx, **flags))
