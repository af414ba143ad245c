"""``batchjobs config``."""

from __future__ import annotations

import click

from batchjobs.cli.console import out_json, print_table, say
from batchjobs.cli.options import as_json, settings_of


@click.group("config")
def config_command() -> None:
    """Show the settings in force and where each comes from."""


@config_command.command("show", short_help="Print every setting, and where it comes from.")
@as_json
@click.pass_context
def show_command(ctx: click.Context, as_json: bool) -> None:
    """Print every setting, its value without passwords, and where it comes from.

    Flags win over BATCHJOBS_* variables, then ./batchjobs.toml, then the user's config, then the defaults.
    """
    from batchjobs.settings import Settings, config_files, unknown_variables

    settings = settings_of(ctx)
    for sentence in unknown_variables():
        say(f"warning: {sentence}")
    if as_json:
        for name in Settings.model_fields:
            value = settings.shown(name) if getattr(settings, name) is not None else None
            out_json({"name": name, "value": value, "source": settings.sources[name]})
        return
    rows = (
        (name, settings.shown(name), settings.sources[name], field.description)
        for name, field in Settings.model_fields.items()
    )
    print_table(("setting", "value", "from", "meaning"), rows)
    for path in config_files():
        say(f"{'read' if path.exists() else 'not there'}: {path}")
