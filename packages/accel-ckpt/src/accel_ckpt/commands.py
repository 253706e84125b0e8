"""`accel ckpt list | inspect | verify | convert | prune` and `accel merge-weights`. Imports torch only when run."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `ckpt`. A command's exit status is what its `func` returns."""
    parser = subparsers.add_parser("ckpt", help="list, inspect, verify, convert and prune checkpoints")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, function, text in (
        ("list", _list, "the committed checkpoints in a directory, oldest first"),
        ("inspect", _inspect, "what one checkpoint holds"),
        ("verify", _verify, "check every file's size and checksum"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("directory", type=Path)
        action.set_defaults(func=function)
    _add_prune(actions)
    _add_convert(actions)


def _add_prune(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "remove the checkpoints of a run that no rule keeps; the newest always stays"
    action = actions.add_parser("prune", help=text, description=text)
    action.add_argument("directory", type=Path)
    action.add_argument("--latest", type=int, metavar="N", help="keep the N newest")
    action.add_argument("--best", action="append", default=[], metavar="METRIC", help="keep the one with the smallest")
    action.add_argument("--best-max", action="append", default=[], metavar="METRIC", help="... with the largest")
    action.add_argument("--every", type=int, metavar="K", help="keep those whose step is a multiple of K")
    action.add_argument("--prefix", default="step-", help="of the directories' names (step-; accel's own: checkpoint_)")
    action.add_argument("--dry-run", action="store_true", help="only say what would go")
    action.set_defaults(func=_prune)


def _add_convert(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "write a checkpoint in another library's layout"
    action = actions.add_parser("convert", help=text, description=text)
    action.add_argument("directory", type=Path)
    action.add_argument("target", type=Path, help="a new directory")
    action.add_argument("--to", required=True, choices=["accelerate", "dcp"], help="whose layout")
    action.set_defaults(func=_convert)


def _list(arguments: argparse.Namespace) -> int:
    from accel_state.errors import CheckpointError, CheckpointNotFoundError

    from .manifest import manifest_path, read_manifest

    directory: Path = arguments.directory
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"there is no directory {directory}")
    lines, damaged = [], []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or (found := manifest_path(path)) is None:
            continue
        try:
            manifest = read_manifest(found)
        except CheckpointError as error:
            damaged.append(f"{path.name}: {error}")
            continue
        size_bytes = sum(entry.size_bytes for entry in manifest.files.values())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_unix_s))
        metrics = " ".join(f"{name}={value:g}" for name, value in manifest.metrics.items())
        step = -1 if manifest.step is None else manifest.step
        lines.append((step, f"{path.name:24} {when}  {_size(size_bytes):>11}  {metrics}".rstrip()))
    print("\n".join([line for _, line in sorted(lines)] + damaged) or f"no checkpoint in {directory}")
    return 1 if damaged else 0


def _inspect(arguments: argparse.Namespace) -> int:
    from .commit import real_directory
    from .loading import require_checkpoint
    from .manifest import read_manifest

    manifest = read_manifest(require_checkpoint(real_directory(arguments.directory)))
    _print(step=manifest.step, seed=manifest.seed, ranks=manifest.world_size, **manifest.metrics, **manifest.versions)
    if manifest.metadata is not None:
        print(f"metadata: {json.dumps(manifest.metadata)}")
    for name, entry in manifest.objects.items():
        print(f"{name}: {entry.kind} {entry.type}, {len(entry.tensors)} tensors")
        for key, tensor in entry.tensors.items():
            pieces = f", {len(tensor.pieces)} pieces" if len(tensor.pieces) > 1 else ""
            print(f"  {key}: {tensor.dtype} {list(tensor.shape)} in {tensor.file}{pieces}")
        for alias, first in entry.aliases.items():
            print(f"  {alias}: tied to {first}")
    for name, file in manifest.files.items():
        print(f"{name}: {_size(file.size_bytes)}, xxh3_128 {file.xxh3_128}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from accel_state.errors import CheckpointError

    from .loading import verify_checkpoint

    try:
        manifest = verify_checkpoint(arguments.directory)
    except CheckpointError as error:
        print(error)
        return 1
    print(f"{arguments.directory}: {len(manifest.files)} files are whole")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    from accel_state.errors import CheckpointError, CheckpointNotFoundError

    from .checkpointer import Checkpointer
    from .commit import remove_checkpoint
    from .retention import best, every, latest

    rules = [best(metric) for metric in arguments.best]
    rules += [best(metric, mode="max") for metric in arguments.best_max]
    rules += [latest(arguments.latest)] if arguments.latest is not None else []
    rules += [every(arguments.every)] if arguments.every is not None else []
    if not rules:
        raise CheckpointError("prune needs a rule: --latest N, --best METRIC, --best-max METRIC, --every K, or several")
    keep = rules[0]
    for rule in rules[1:]:
        keep |= rule
    ckpt = Checkpointer(arguments.directory, keep, prefix=arguments.prefix)
    infos = ckpt.all()
    if not infos:
        raise CheckpointNotFoundError(
            f"there is no committed checkpoint {arguments.prefix}<number> in {ckpt.directory}; "
            "--prefix tells another name"
        )
    if unknown := sorted(metric for metric in keep.metrics if not any(metric in info.metrics for info in infos)):
        known = ", ".join(sorted({metric for info in infos for metric in info.metrics})) or "none"
        raise CheckpointError(f"no checkpoint in {ckpt.directory} has the metric {', '.join(unknown)}; known: {known}")
    for path in ckpt.superseded():
        if not arguments.dry_run:
            remove_checkpoint(path)
        print(f"{'would remove' if arguments.dry_run else 'removed'} {path.name}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from .convert import convert_to_accelerate
    from .dcp import convert_to_dcp

    convert = convert_to_accelerate if arguments.to == "accelerate" else convert_to_dcp
    for text in convert(arguments.directory, arguments.target):
        print(f"left out, {arguments.to} has no place for it: {text}")
    return 0


def _print(**values: Any) -> None:
    print(", ".join(f"{name}: {value}" for name, value in values.items()))


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


# ---------------------------------------------------------------- merge-weights


def register_merge(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `merge-weights`."""
    merge_command_parser(subparsers)


def merge_command_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser] | None = None,
) -> argparse.ArgumentParser:
    """The parser of `merge-weights`, for `accel` or alone."""
    text = "make one weights file per model of a checkpoint whose weights lie in shards"
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser("accel merge-weights", description=text)
        if subparsers is None
        else subparsers.add_parser("merge-weights", help=text, description=text)
    )
    parser.add_argument("checkpoint_directory", help="a checkpoint of accel, or of torch.distributed.checkpoint")
    parser.add_argument("output_path", help="the directory to write to")
    parser.add_argument(
        "--unsafe_serialization", "--unsafe-serialization", action="store_true", help="write .bin, not .safetensors"
    )
    parser.add_argument(
        "--remove_checkpoint_dir", "--remove-checkpoint-dir", action="store_true", help="remove the checkpoint after"
    )
    parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: argparse.Namespace) -> int:
    """What `accel merge-weights` runs."""
    from .merging import merge_fsdp_weights

    target = merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )
    print(f"wrote the weights to {target}")
    return 0
