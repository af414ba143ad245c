"""``batchjobs doctor``: what works here, what does not, and what to do about it."""

from __future__ import annotations

import click

from batchjobs.cli.console import complain, out_json, rich_console
from batchjobs.cli.options import as_json, settings_of
from batchjobs.text import plural, visible

_STYLES = {"pass": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@as_json
@click.pass_context
def doctor_command(ctx: click.Context, as_json: bool) -> int:
    """Check Python, packages, device, Redis, database, home, model and compiler.

    pass: works. warn: something optional is missing. fail: needed, and the exit code is 1.
    """
    from rich.text import Text

    from batchjobs.checkup import examine

    failed = 0
    console = rich_console()
    for finding in examine(settings_of(ctx)):
        failed += finding.verdict == "fail"
        if as_json:
            out_json({"check": finding.check, "verdict": finding.verdict, "message": finding.message})
        else:
            line = Text(finding.verdict, style=_STYLES[finding.verdict])
            console.print(
                line.append(f"  {finding.check}: {visible(finding.message)}", style="default"), soft_wrap=True
            )
    if failed:
        complain(f"{plural(failed, 'check')} failed")
    return 1 if failed else 0
