"""`accel estimate-memory`: what a model needs, before anybody has loaded it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from accel_launch import CommandParser

DTYPES = ("float32", "float16", "int8", "int4")
DESCRIPTION = """What a model's weights take, and what training it with AdamW takes beside activations. MODEL is a
safetensors file or a folder of them, a folder or file with a config.json that transformers knows, a function that
builds the model as MODULE:FUNCTION, or a name on the Hugging Face Hub, of which only the weights' headers are read."""


def register(subparsers: Any) -> None:
    """Add `estimate-memory` to the `accel` command."""
    estimate_command_parser(subparsers)


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accel estimate-memory`, alone or as a subcommand of `subparsers`."""
    parser = CommandParser.as_command(
        subparsers, "estimate-memory", "what a model needs, before it is loaded", description=DESCRIPTION
    )
    parser.add_argument("model_name", metavar="MODEL", help="a path, MODULE:FUNCTION, or a name on the Hub")
    parser.add_argument(
        "--library_name",
        "--library-name",
        default=None,
        choices=["timm", "transformers"],
        help="of a name on the Hub: timm's models may be named without `timm/`",
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="all by default")
    parser.add_argument(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        default=False,
        help="run the code that a local config.json names; weights and names on the Hub need none",
    )
    parser.add_argument(
        "--parallelism", default=None, metavar="AXIS=N,...", help="the share of a rank: dp_shard_size=8,tp_size=2"
    )
    parser.add_argument("--json", action="store_true", help="in bytes, for programs")
    parser.set_defaults(func=estimate_command)
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        SettingError: there is no such model here or on the Hub, it may not be read, or the axes are not understood.
        MissingExtraError: a library is needed that is not installed.
    """
    from accel.memory import estimate, find_weights, parse_axes, table

    weights = find_weights(args.model_name, args.library_name, trust_remote_code=args.trust_remote_code)
    axes = parse_axes(args.parallelism)
    rows = [estimate(weights, dtype, axes) for dtype in args.dtypes]
    if args.json:
        print(json.dumps({"model": args.model_name, "estimates": [row._asdict() for row in rows]}, indent=2))
        return
    print(table(args.model_name, weights, rows, axes))


def main() -> None:
    """The command on its own, for those who start it by its module."""
    estimate_command(estimate_command_parser().parse_args())


if __name__ == "__main__":
    main()
