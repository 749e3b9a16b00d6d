"""Faults in what proves the rest: the law of regions, the comparison with one device, counting, exit codes."""

from __future__ import annotations

from .mutation import Mutation
from .says import NO_ERROR

LAW = "tests/test_regions.py::"
EQUAL = "tests/test_equivalence.py::"

MUTATIONS = (
    Mutation(
        "law-whole-cotangents", "testing/law.py",
        '"R": "addends", "I": "copies"}', '"R": "copies", "I": "copies"}',
        "parts get the whole cotangent of an equal output instead of addends",
        (f"{LAW}test_scale_of_cut_and_whole",), r"tensor='grad scale'",
    ),
    Mutation(
        "law-equal-addends", "testing/law.py",
        "pieces = [*some, x - sum(some)]", "pieces = [x / k] * k",
        "addends are all alike, so code that counts on that passes",
        (f"{LAW}test_equal_outputs_get_addends_that_differ",), r"assert set\(\) == ",
    ),
    Mutation(
        "law-tolerance", "testing/law.py",
        "TOLERANCE = 1e-9", "TOLERANCE = 1e9",
        "nothing is a violation",
        (f"{LAW}test_missing_sum_of_the_output",), r"in set\(\)",
    ),
    Mutation(
        "law-gradients-not-compared", "testing/law.py",
        'GRADIENTS = {"S": "slices", "P": "copies"', 'GRADIENTS = {"S": "slices", "P": "addends"',
        "gradients of sums are given and compared as addends",
        (f"{LAW}test_row_bias_enters_once",), r"'grad up\.weight'",
    ),
    Mutation(
        "law-one-number-of-parts", "testing/regions.py",
        "(ks or (2, 3, largest))", "(ks or (2,))",
        "cuts are tried in two parts only",
        (f"{LAW}test_each_cut_is_made_in_two_three_and_as_many_parts_as_possible",), r"assert \[2\] == \[2, 3, 6\]",
    ),
    Mutation(
        "law-always-kept", "testing/regions.py",
        "return not self.violations", "return True",
        "a report with violations is ok",
        (f"{LAW}test_the_law_that_copies_whole_cotangents_is_another",), r"assert not True",
    ),
    Mutation(
        "law-randomness-unnoticed", "testing/regions.py",
        "for f in piece.reproduced():", "for f in ():",
        "a region that gives something else each time is not named",
        (f"{LAW}test_randomness_is_named",), r"assert False",
    ),
    Mutation(
        "law-parameters-of-ones", "testing/recording.py",
        "made[id(p)] = nn.Parameter(x + 1 if", "made[id(p)] = nn.Parameter(torch.ones_like(x) if",
        "norms are checked with ones, which hide faults",
        (f"{LAW}test_every_parameter_is_random_and_ties_stay",), r"assert False",
    ),
    Mutation(
        "law-parts-exchange-nothing", "testing/exchange.py",
        "return self.exchange.every(self.i, x).sum(0)", "return x",
        "parts that should sum keep their own",
        (f"{LAW}test_loss_over_a_cut_vocabulary_must_say_that_it_is_whole",), r"cut='vocab', k=2, tensor='output 0'",
    ),
    Mutation(
        "equivalence-nan-is-equal", "testing/equivalence.py",
        "[error <= self.bounds.get(name, self.tolerance) for", "[not error > self.bounds.get(name, self.tolerance) for",
        "a loss that is not a number equals every other",
        (f"{EQUAL}test_every_difference_alone_is_seen",), r"nan",
    ),
    Mutation(
        "equivalence-norm-not-compared", "testing/equivalence.py",
        'errors = ("loss_error", "max_grad_error", "grad_norm_error",', 'errors = ("loss_error", "max_grad_error",',
        "a wrong norm passes",
        (f"{EQUAL}test_every_difference_alone_is_seen",), r"grad_norm_error",
    ),
    Mutation(
        "equivalence-copies-not-compared", "testing/assemble.py",
        "elif not same_bits(seen[box], block):", "elif False:",
        "copies of a parameter that differ between ranks pass",
        ("tests/cases/test_tensor_parallel.py::test_check_reports_copies_that_differ",), r"assert \(0, |assert 0 == 1",
    ),
    Mutation(
        "equivalence-batch-all-labels", "testing/equivalence.py",
        "labels[0] = IGNORE  # a row", "pass  # a row",
        "no rank of a comparison is without labels",
        (f"{EQUAL}test_batches_have_a_rank_without_labels",), r"assert \(\d+ == 0",
    ),
    Mutation(
        "counting-only-what-lacks", "testing/counting.py",
        "if expected[key] != found[key]:", "if expected[key] > found[key]:",
        "collectives that nobody predicted pass",
        ("tests/cases/test_hidden_collectives.py::test_every_step_issues_what_the_program_says[tp_sp]",),
        r"assert \[\] == \['all_reduce @tp float64 of 56 bytes",
    ),
    Mutation(
        "counting-only-ours", "testing/counting.py",
        'elif space in ("c10d", ', 'elif space in ("", ',
        "collectives that torch itself issues pass",
        ("tests/test_counting.py::test_collectives_of_torch_itself_are_seen",), r"assert \[\] == \['c10d::allreduce_'",
    ),
    Mutation(
        "user-errors-end-with-1", "cli.py",
        "        return 2\n    except BrokenPipeError:", "        return 1\n    except BrokenPipeError:",
        "a command that was used wrongly ends like one that failed",
        ("tests/test_train.py::test_bad_input_is_one_message[options0-axis tp has size -1]",), r"assert 1 == 2",
    ),
    Mutation(
        "exit-code-lost", "launch.py",
        "return int(result) if isinstance(result, int) else 0", "return 0",
        "the launcher does not pass on the exit code of what it ran",
        ("tests/test_launch.py::test_one_process_runs_here",), r"assert 0 == 4",
    ),
    Mutation(
        "check-ends-with-0", "commands.py",
        "return 0 if report.ok else 1", "return 0",
        "a check that found a difference ends like one that found none",
        ("tests/test_train.py::test_check_says_no_with_exit_code_1",), r"assert \[0\] == \[1\]",
    ),
    Mutation(
        "assert-equivalent-asserts-nothing", "testing/local.py",
        "if not report.ok:", "if False:",
        "the assertion accepts every difference",
        ("tests/test_step.py::test_assert_equivalent",), NO_ERROR,
    ),
)  # fmt: skip
