"""The command ``batchjobs``: the table of commands, and what holds for all of them.

A command's module is loaded when that command runs or is asked for its help, so ``batchjobs --help`` stays quick.
Modules here import nothing heavy at their top, for the same reason.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from batchjobs.cli.guard import OutputClosed, guarded

if TYPE_CHECKING:
    from collections.abc import Sequence

# section of the help -> command -> (module, one line of help)
SECTIONS = {
    "Prompts in, answers out": {
        "run": ("run", "Answer every prompt of a file here and now, and print the results."),
        "submit": ("submit", "Store prompts as a batch and queue it; print the batch's id."),
        "validate": ("validate", "Say what submit would refuse, and what the prompts will take."),
        "results": ("results", "Write the answers of a batch, in input order."),
    },
    "Batches": {
        "status": ("status", "Show how far a batch is."),
        "follow": ("follow", "Show how a batch goes on, until it has ended."),
        "wait": ("status", "Wait until a batch has ended."),
        "list": ("status", "List the newest batches."),
        "show": ("show", "Show one request with its tokens."),
        "cancel": ("cancel", "Cancel a batch or one request."),
        "pause": ("pause", "Make no more tokens for a batch, or by some workers."),
        "resume": ("pause", "Let a paused batch or paused workers go on."),
        "retry": ("retry", "Let the failed requests of a batch run again."),
    },
    "Workers and models": {
        "worker": ("worker", "Load a model and answer what is queued."),
        "workers": ("workers", "List the workers."),
        "drain": ("drain", "Let a worker finish what it has begun, and end."),
        "model": ("model", "Change the model that workers serve, and list versions."),
    },
    "Database and machine": {
        "sql": ("database", "Ask the database a question in SQL."),
        "db": ("database", "Create and check the database's tables."),
        "metrics": ("metrics", "Serve metrics of queue and store for Prometheus."),
        "config": ("config", "Show the settings in force and where each comes from."),
        "doctor": ("doctor", "Say what works on this machine, and what does not."),
        "bench": ("bench", "Measure the engine's throughput."),
        "trace": ("trace", "Draw what the engine does in each step, or write it as a timeline."),
    },
}
COMMANDS = {name: about for section in SECTIONS.values() for name, about in section.items()}


class CommandLine(click.Group):
    """A group whose commands are loaded from the table above when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"batchjobs.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), about) for name, (_, about) in commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # Click would exit with 1 by itself.
            raise OutputClosed from error
        except KeyboardInterrupt as error:
            raise click.Abort from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        arguments = list(sys.argv[1:] if args is None else args)
        run = super().main
        sys.exit(
            guarded(
                lambda: run(arguments, prog_name or "batchjobs", complete_var, standalone_mode=False, **extra),
                debug="--debug" in arguments,
                arguments=arguments,
            )
        )


def _print_version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from batchjobs import __version__

        click.echo(f"batchjobs {__version__}")
        ctx.exit()


@click.group(
    "batchjobs",
    cls=CommandLine,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 ok, 1 error, 2 usage or invalid input, 3 Redis or SQL unreachable, 4 not found, "
    "5 finished with failed requests, 6 cancelled, 124 timeout, 130 Ctrl-C, 141 broken pipe.",
)
@click.option("--home", type=click.Path(path_type=Path), help="Folder of the embedded database and queue.")
@click.option("--redis-url", help="Redis to use; rather set BATCHJOBS_REDIS_URL when it holds a password.")
@click.option("--database-url", help="SQL database to use; rather set BATCHJOBS_DATABASE_URL.")
@click.option("--debug", is_flag=True, help="Show a traceback with every error.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
@click.pass_context
def main(ctx: click.Context, home: Path | None, redis_url: str | None, database_url: str | None, debug: bool) -> None:
    """Offline batch processing of LLM prompts.

    Prompts are kept in a SQL database until each has exactly one answer, by any number of workers. Try:

    \b
      batchjobs run prompts.jsonl -o answers.jsonl
    """
    ctx.obj = {"home": home, "redis_url": redis_url, "database_url": database_url}
