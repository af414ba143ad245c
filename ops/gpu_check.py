"""Is this tree right and fast on this GPU? One command, a few minutes, nothing is downloaded.

    python ops/gpu_check.py --output report.json [--minutes 8] [--section speed] [--skip workloads]

It needs torch, transformers and the few packages that they bring; nothing of the queue or the database. Models have
random weights, in the shapes of Llama-3.1-8B and Qwen3-0.6B, and small ones where answers are compared token by token.
What is found is printed as it comes and kept after every section, so a run that is cut keeps what it had. The exit code
is 1 where something failed or differs, and 2 where nothing could be tried.

`--device cpu --tiny` runs all of it on a CPU in seconds, to try the check itself; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from batchjobs.errors import UsageError  # noqa: E402 - the tree need not be installed
from ops.gpu import needs, report, sections  # noqa: E402
from ops.gpu.notes import Found, Notes, write_json  # noqa: E402

NO_DEVICE = "no device"
DEFAULT_MINUTES = 8.0
RESERVE_SECONDS = 15.0  # to end in time, whatever the last section does


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    if absent := needs.missing():
        print(f"{Path(__file__).name}: {needs.complaint(absent)}", file=sys.stderr)
        return 2
    if asked.as_child:
        return _child(asked)
    for name, consequence in needs.OPTIONAL.items():
        if needs.missing([name]):
            print(f"{name} is not installed: {consequence}", flush=True)
    try:
        wanted = sections.chosen(asked.section, asked.skip)
    except ValueError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2
    return _all(asked, wanted)


def _all(asked: argparse.Namespace, wanted: list[sections.Section]) -> int:
    begin, made_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    told = {"device": asked.device, "tiny": asked.tiny, "minutes": asked.minutes}
    options = ["--device", asked.device, *(["--tiny"] if asked.tiny else [])]
    command = sections.this_command(Path(__file__), options)

    def keep(found: dict[str, sections.Parts]) -> Found:
        made = report.report(found, asked=told, seconds=time.monotonic() - begin, made_at=made_at)
        if asked.output is not None:
            asked.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(asked.output, made)
        return made

    def run(section: sections.Section, seconds: float, before: dict[str, sections.Parts]) -> sections.Parts:
        if asked.in_process:
            parts = _run_here(section.name, seconds, None, before, asked)
        else:
            parts = sections.run_apart(command, section, seconds, before)
        keep({**before, section.name: parts})
        if NO_DEVICE in parts:
            sys.exit(2)
        return parts

    made = keep(sections.run_all(wanted, asked.minutes * 60 - RESERVE_SECONDS, run))
    print(f"\n{report.table(made)}", end="", flush=True)
    return 1 if made["failed"] else 0


def _child(asked: argparse.Namespace) -> int:
    name, seconds, file, known = asked.as_child
    _run_here(name, float(seconds), Path(file), json.loads(Path(known).read_text()), asked)
    return 0


def _run_here(
    name: str, seconds: float, file: Path | None, before: dict[str, sections.Parts], asked: argparse.Namespace
) -> sections.Parts:
    from ops.gpu.setup import Setup
    from workers.engine.models import choose_device

    notes = Notes(name, seconds, file)
    try:
        choose_device(asked.device)
    except UsageError as error:
        notes.failed(NO_DEVICE, error)
        return notes.parts
    try:
        sections.section_work(name)(notes, Setup(asked.device, asked.tiny, before))
    except Exception as error:  # noqa: BLE001 - the other sections run all the same
        notes.failed("end", error)
    return notes.parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="for all of it (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="the report, as JSON")
    parser.add_argument(
        "--section", action="append", default=[], help=f"only this one; again for more: {', '.join(sections.NAMES)}"
    )
    parser.add_argument("--skip", action="append", default=[], help="all but this one; again for more")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few tokens, to try the check itself")
    parser.add_argument("--in-process", action="store_true", help="all sections in this process")
    parser.add_argument("--as-child", nargs=4, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
