"""`kvkeep l2-key`: makes and lists the keys of encrypted L2. No key is ever shown."""

from typing import Annotated, Any

import typer

from kvkeep.cli.settings import Json, print_json

l2_key = typer.Typer(help="Keys of encrypted L2.", rich_markup_mode=None, no_args_is_help=True)
KeyFile = Annotated[str, typer.Argument(metavar="FILE", help="The file of l2.key_file.")]


@l2_key.command("new")
def new(
    file: KeyFile,
    name: Annotated[str, typer.Option(help="Name of the key; default: a random one.")] = "",
    as_json: Json = False,
) -> None:
    """Add a random key, which is then the active one; makes the file if it is not there."""
    from kvkeep.backends.keyring import new_key

    keyring = new_key(file, name)
    if as_json:
        print_json(_report(file, [key.id for key in keyring.keys]))
    else:
        others = len(keyring.keys) - 1
        print(f"{file}: {keyring.active.id} encrypts from the next start on, {others} more decrypt")


@l2_key.command("list")
def list_keys(file: KeyFile, as_json: Json = False) -> None:
    """The names of the keys, the active one first."""
    from kvkeep.backends.keyring import load_keys

    names = [key.id for key in load_keys(file, "the key file").keys]
    if as_json:
        print_json(_report(file, names))
    else:
        for number, name in enumerate(names):
            print(f"{name}  {'decrypts' if number else 'encrypts, decrypts'}")


def _report(file: str, names: list[str]) -> dict[str, Any]:
    return {"file": file, "active": names[0], "keys": names}
