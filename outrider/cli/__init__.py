"""The `outrider` command: one file a subcommand, loaded when it is asked for.

Expected errors are one clear line on stderr and exit code 1; wrong usage is exit code 2;
Ctrl-C is exit code 130.
"""

import importlib
import sys
from typing import Any

import click

from outrider import __version__
from outrider.errors import OutriderError

# 128 and the number of SIGINT, as shells have it.
INTERRUPTED = 130
# name: (module, what it does). The module has an attribute `command`.
COMMANDS = {
    "up": ("outrider.cli.up", "Start the whole system on this machine."),
    "demo": ("outrider.cli.demo", "Show the same text with and without speculation."),
    "generate": ("outrider.cli.generate", "Complete a prompt."),
    "chat": ("outrider.cli.chat", "Talk to the model."),
    "status": ("outrider.cli.status", "Show workers, sessions and figures."),
    "drain": ("outrider.cli.drain", "Have a worker give up its sessions before it is stopped."),
    "policy": ("outrider.cli.policy", "Show or set what requests get that leave it open."),
    "token": ("outrider.cli.token", "Make tokens for clients."),
    "redis-acl": ("outrider.cli.redis_acl", "Print the Redis users of each part."),
    "verify-exactness": (
        "outrider.cli.verify_exactness",
        "Compare a whole system with its target model.",
    ),
    "plan": ("outrider.cli.plan", "Tell what a model takes on each of N GPUs."),
    "train": ("outrider.cli.train", "Train a draft model on what the target says."),
    "fetch-model": ("outrider.cli.fetch_model", "Fetch the embedded model into the cache."),
    "coordinator": ("outrider.cli.services", "Run a coordinator."),
    "verify-worker": ("outrider.cli.services", "Run a verify worker."),
    "draft-worker": ("outrider.cli.services", "Run a draft worker."),
}


class LazyGroup(click.Group):
    """Knows every subcommand by name and loads a module only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every subcommand, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a subcommand; for the group's own help its name and one line are enough."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        if cmd_name in getattr(module, "SERVICES", {}):
            found: click.Command = module.service_command(cmd_name)
            return found
        loaded: click.Command = module.command
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; an expected error is one line and exit code 1, Ctrl-C is 130."""
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            click.echo(f"outrider: {error.message}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("\ninterrupted", err=True)
            sys.exit(INTERRUPTED)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, name="outrider"
)
@click.version_option(__version__, prog_name="outrider")
def main() -> None:
    """Distributed speculative decoding for large language models."""
