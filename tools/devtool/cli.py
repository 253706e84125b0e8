"""The command line of ``tools/dev``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from devtool import environment
from devtool.paths import BIN, PYTHON, ROOT, DevError, become, packages
from devtool.tiers import TIERS

DESCRIPTION = """\
Works from a fresh clone: each command first sets up what is missing in .venv (torch, uv, the pinned packages, the
workspace's own) and is quick when nothing is."""

EPILOG = """\
which torch (remembered until given anew; --torch goes before the command, or to setup):
  --torch auto        a torch 2.9 or newer of the Python that runs this, else the tested release by pip (the default)
  --torch existing    the one of the Python that runs this, or an error
  --torch cpu | cuda  the tested release as a CPU or CUDA build
  --torch SPEC        any requirement, such as 'torch==2.12.1'

examples:
  tools/dev demo                                  handwritten digits on two processes, with checkpoints
  tools/dev demo --resume                         go on where the last run stopped
  tools/dev test accel-data -- -k resume -x       one package's tests, further arguments to pytest
  tools/dev test --faults                         the core tier and the fault tests
  tools/dev isolated accel-ckpt                   its built wheel alone, with its declared dependencies
  tools/dev --torch cpu setup                     set up, with a CPU build of torch
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code, or does not return where the command replaces this process."""
    arguments, extra = _split(list(arguments))
    options = _parser().parse_args(arguments)
    try:
        if options.command == "version" and options.version is None:
            from devtool import version

            print(version.read())
            return 0
        environment.ensure(options.torch)
        return _COMMANDS[options.command](options, extra)
    except DevError as error:
        print(f"tools/dev: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tools/dev: interrupted; the next call goes on from here", file=sys.stderr)
        return 130


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Take apart our own arguments and those that are passed through (after ``--``; all that follow ``demo``)."""
    for index, argument in enumerate(arguments):
        if argument == "--":
            return arguments[:index], arguments[index + 1 :]
        if argument == "demo" and "--torch" not in arguments[index - 1 : index]:
            return arguments[: index + 1], [item for item in arguments[index + 1 :] if item != "--"]
    return arguments, []


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools/dev", description=DESCRIPTION, epilog=EPILOG, formatter_class=plain)
    parser.add_argument("--torch", metavar="CHOICE", help="which torch to have, see below")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    setup = add("setup", "set up what is missing, and nothing else")
    setup.add_argument("--torch", metavar="CHOICE", default=argparse.SUPPRESS, help="see tools/dev --help")

    add("demo", "train handwritten digits on two processes; further arguments go to docs/examples/digits.py")

    test = add("test", "run the core tier: every package's tests and the integration tests; -- ARGS go to pytest")
    test.add_argument("packages", nargs="*", metavar="PACKAGE", help="only these (also integration-tests, tools)")
    for tier in TIERS.values():
        test.add_argument(f"--{tier.name}", action="store_true", help=tier.text)

    add("lint", "ruff, mypy and import-linter over everything")

    isolated = add(
        "isolated", "test built wheels, each in an environment with only what it declares; -- ARGS to pytest"
    )
    isolated.add_argument("packages", nargs="*", metavar="PACKAGE", help="only these; all by default")

    engines = add("engines", "test what needs large libraries, in environments of their own; -- ARGS to pytest")
    engines.add_argument("packages", nargs="*", metavar="PACKAGE", help="only these; all by default")

    clients = add("clients", "run libraries that build on the peer on it and on accel, in an environment of their own")
    clients.add_argument("names", nargs="*", metavar="NAME", help="such as trainer, lora; all by default")
    clients.add_argument("--processes", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    clients.add_argument("--write", action="store_true", help="write the results into docs/compatibility.md")

    lock = add("lock", "resolve uv.lock anew, without hosts and without torch")
    lock.add_argument("--upgrade", action="store_true", help="take the newest releases allowed")
    lock.add_argument("--check", action="store_true", help="only say whether it is up to date")

    version = add("version", "print the version, or write a new one everywhere")
    version.add_argument("version", nargs="?", metavar="X.Y.Z")

    surface = add("surface", "write the snapshot of public names, parameters, defaults and flags")
    surface.add_argument("--check", action="store_true", help="only show what differs from the committed snapshot")

    docs = add("docs", "check links and code blocks of every page, and that pages made from code are up to date")
    docs.add_argument("--write", action="store_true", help="make them anew: the reference and the pictures")

    bench = add("bench", "run benchmarks beside the peer, which gets an environment of its own")
    bench.add_argument("names", nargs="*", metavar="NAME", help="such as import, launch, step; all by default")
    bench.add_argument("--json", action="store_true", help="figures as JSON, one object per benchmark")
    bench.add_argument("--rounds", type=int, metavar="N", help="pairs of runs per row; each benchmark has its default")
    return parser


def chosen(names: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Check names given on the command line against those that exist; none given means all."""
    for name in names:
        if name not in allowed:
            import difflib

            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise DevError(f"there is no {name!r}{hint}; there are: {', '.join(allowed)}")
    return list(names) or list(allowed)


def _inside() -> None:
    """Go on inside the environment, for commands that need its packages."""
    if sys.prefix != str(ROOT / ".venv"):
        become([PYTHON, ROOT / "tools" / "dev", *sys.argv[1:]])


# ------------------------------------------------------------------ commands


def _setup(_options: argparse.Namespace, _extra: list[str]) -> int:
    print(f"ready: {PYTHON.relative_to(ROOT)}")
    return 0


def _demo(_options: argparse.Namespace, extra: list[str]) -> int:
    become([BIN / "accel", "launch", "--cpu", "--num-processes", "2", "docs/examples/digits.py", *extra])


def _test(options: argparse.Namespace, extra: list[str]) -> int:
    from devtool import tests

    tiers = [name for name in TIERS if getattr(options, name)]
    return tests.run_tests(chosen(options.packages, tests.targets()) if options.packages else [], tiers, extra)


def _lint(_options: argparse.Namespace, _extra: list[str]) -> int:
    from devtool import lint

    return lint.run_lint()


def _isolated(options: argparse.Namespace, extra: list[str]) -> int:
    _inside()
    from devtool import isolated

    return isolated.run_isolated(chosen(options.packages, packages()), extra)


def _engines(options: argparse.Namespace, extra: list[str]) -> int:
    _inside()
    from devtool import engines

    return engines.run_engines(options.packages, extra)


def _clients(options: argparse.Namespace, _extra: list[str]) -> int:
    _inside()
    from devtool import clients

    return clients.run_clients(chosen(options.names, clients.names()), options.processes, options.write)


def _lock(options: argparse.Namespace, _extra: list[str]) -> int:
    from devtool import lock

    return lock.run_lock(upgrade=options.upgrade, check=options.check)


def _version(options: argparse.Namespace, _extra: list[str]) -> int:
    from devtool import lock, version

    version.write(options.version)
    code = lock.run_lock()
    environment.ensure()
    return code


def _surface(options: argparse.Namespace, _extra: list[str]) -> int:
    _inside()
    from devtool import surface

    return surface.run_surface(check=options.check)


def _docs(options: argparse.Namespace, _extra: list[str]) -> int:
    _inside()
    from devtool import docs

    return docs.run_docs(write=options.write)


def _bench(options: argparse.Namespace, _extra: list[str]) -> int:
    _inside()
    from devtool import benches

    names = chosen(options.names, benches.names())
    return benches.run_benches(names, as_json=options.json, rounds=options.rounds)


_COMMANDS = {
    "setup": _setup,
    "demo": _demo,
    "test": _test,
    "lint": _lint,
    "isolated": _isolated,
    "engines": _engines,
    "clients": _clients,
    "lock": _lock,
    "version": _version,
    "surface": _surface,
    "docs": _docs,
    "bench": _bench,
}
