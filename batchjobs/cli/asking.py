"""Questions before something is done that cannot be undone. Only where somebody is there to answer."""

from __future__ import annotations

import sys

import click

from batchjobs.text import visible

yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def confirm(question: str, yes: bool) -> None:
    """Asks on a terminal, unless ``yes`` was given; goes on elsewhere. Raises Abort on a no."""
    if not yes and is_asked():
        click.confirm(visible(question), abort=True, err=True)


def is_asked() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
