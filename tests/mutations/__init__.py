"""Faults put into the package on purpose, one at a time, each of which a named test must see.

    python -m tests.mutations                    # all of them, from the root of the repository
    python -m tests.mutations --only ID ...      # some; --list shows them
    python -m tests.mutations --part 2/4         # every fourth, starting with the second

The last line is `N of N killed`; the exit code is 0 only then.
"""
