"""The command line: see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .catalogue import MUTATIONS
from .mutation import Mutation
from .runner import Runner

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Are all planted faults seen?")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutations")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth mutation, starting with the Ith")
    parser.add_argument("--list", action="store_true", help="show the mutations and end")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests on the package as it is first")
    parser.add_argument("--verbose", action="store_true", help="show what each killer said, to write `sees` by")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of one mutation")
    options = parser.parse_args(argv)
    try:
        chosen = choose(MUTATIONS, options.only, options.part)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for m in chosen:
            print(f"{m.id:32} {m.file:28} {m.breaks}")
        return 0
    with Runner(ROOT, limit=options.limit) as runner:
        runner.check_import()
        if not options.no_baseline and (failed := runner.unmutated(chosen)):
            print(f"{failed}\nthe tests fail on the package as it is: nothing can be said of mutations")
            return 1
        return run(runner, chosen, options.jobs, options.verbose)


def choose(mutations: Sequence[Mutation], only: Sequence[str] | None, part: str) -> list[Mutation]:
    """Raises ValueError for ids that do not exist and parts that cannot be."""
    known = {m.id for m in mutations}
    if unknown := [name for name in only or () if name not in known]:
        raise ValueError(f"no mutation is called {', '.join(unknown)}: --list shows them")
    i, slash, n = part.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ValueError(f"--part {part}: I/N with 1 <= I <= N, such as 2/4")
    some = [m for m in mutations if not only or m.id in only]
    return some[int(i) - 1 :: int(n)]


def run(runner: Runner, mutations: Sequence[Mutation], jobs: int, verbose: bool = False) -> int:
    """Prints a line for each as it ends, and what became of those that live. Returns the exit code."""
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for r in pool.map(runner.run, mutations):
            results.append(r)
            words = f"{r.mutation.id:36} {r.mutation.file:26} {r.status:8} {r.seconds:5.1f} s  {r.killer or '-'}"
            print(f"{words}\n    {r.mutation.breaks}", flush=True)
            if verbose:
                print("\n".join(f"    | {line}" for line in r.why.splitlines()[:12]), flush=True)
    alive = [r for r in results if r.status != "killed"]
    for r in alive:
        print(f"\n{r.status}: {r.mutation.id} ({r.mutation.file}): {r.mutation.breaks}\n{r.why}".rstrip())
    print(f"\n{len(results) - len(alive)} of {len(results)} killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
