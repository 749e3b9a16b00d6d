"""Faults in pipeline schedules: tables, what is said of them, and their times."""

from __future__ import annotations

from .mutation import Mutation

VERDICTS = ("tests/test_schedule_checker.py::test_verdicts_of_corrupted_tables",)
NAMED = ("tests/test_schedule_checker.py::test_every_fault_is_named",)
LISTED = "tests/test_schedule_tables.py::test_equal_to_what_torch_lists"
TEXT = ("tests/test_schedule_drawings.py::test_the_text_says_what_the_timeline_says",)
PICTURE = ("tests/test_schedule_drawings.py::test_the_picture_says_what_the_timeline_says",)
VERDICT = r"assert (True|False) == not \["  # of the executor, and of the checker
ORDER = r"At index \d diff: '[0-9FBIW ]+' != '[0-9FBIW ]+'"  # of the actions of a rank

MUTATIONS = (
    Mutation(
        "schedule-warmup-short", "schedules/library.py",
        "warmup=(v - 1) * size + 2 * (p - 1 - rank)", "warmup=(v - 1) * size + (p - 1 - rank)",
        "interleaved 1F1B begins with fewer forwards than its paper, and waits more",
        (f"{LISTED}[interleaved-1f1b]",), ORDER,
    ),
    Mutation(
        "schedule-weights-never-late", "schedules/library.py",
        "if len(weights) > late:", "if len(weights) > 0:",
        "weight gradients fill no gaps: the bubble of ZB-H1 is that of 1F1B",
        (f"{LISTED}[zb-h1]",), ORDER,
    ),
    Mutation(
        "schedule-v-drain", "schedules/library.py",
        'line.add("I0 I1", r)', 'line.add("I1 I0", r)',
        "the drain of ZB-V does the wrong stage first: ranks pause",
        (f"{LISTED}[zb-v]",), ORDER,
    ),
    Mutation(
        "schedule-dualpipe-split-early", "schedules/library.py",
        'line.add("B1 I0", odd)', 'line.add("I1 I0", odd)',
        "the drain of DualPipe-V splits a backward too many, and its W is left over",
        (f"{LISTED}[dualpipe-v]",), ORDER,
    ),
    Mutation(
        "schedule-1f1b-warmup", "schedules/library.py",
        "warmup=p - 1 - r)", "warmup=p - r)",
        "1F1B keeps one micro-batch more on every rank",
        ("tests/test_schedule_checker.py::test_peaks",), r"assert \[5, 4, 3, 2\] == \[4, 3, 2, 1\]",
    ),
    Mutation(
        "schedule-deadlock-unseen", "schedules/checker.py",
        "if rank in path:", "if len(path) > 2:",
        "two ranks that wait for each other are not seen",
        VERDICTS, VERDICT,
    ),
    Mutation(
        "schedule-last-stage-any-order", "schedules/checker.py",
        "if schedule.training and after.micro_batch < before.micro_batch:",
        "if schedule.training and after.micro_batch > before.micro_batch + schedule.micro_batches:",
        "forwards of the last stage may come in any order: the engine takes losses of other micro-batches",
        VERDICTS, VERDICT,
    ),
    Mutation(
        "schedule-twice-unseen", "schedules/checker.py",
        "if count > 1:", "if count > 2:",
        "an action may be there twice",
        VERDICTS, VERDICT,
    ),
    Mutation(
        "schedule-own-row-unseen", "schedules/checker.py",
        "if owner == rank and there > position", "if owner == rank and there > position + 1",
        "an action may stand directly before what it needs",
        VERDICTS, VERDICT,
    ),
    Mutation(
        "schedule-weight-before-input", "schedules/table.py",
        'return [Action(stage, "I", micro_batch)]', "return []",
        "a W may stand before its I",
        NAMED, "1W0 stands before 1I0",
    ),
    Mutation(
        "schedule-half-a-backward", "schedules/checker.py",
        "elif not counts[whole] and not (counts[first] and counts[second]):",
        "elif not counts[whole] and not counts[first]:",
        "a W may be missing: gradients of weights lack a micro-batch",
        VERDICTS, VERDICT,
    ),
    Mutation(
        "schedule-sends-inside-a-rank", "schedules/simulator.py",
        "(durations.send if away else 0.0)", "durations.send",
        "what stays on a rank pays for a send that is none",
        ("tests/test_schedule_simulator.py::test_sends_cost_between_ranks_only",), r"assert 26\.0 == \(12 \+ ",
    ),
    Mutation(
        "schedule-bubble-of-one-rank", "schedules/simulator.py",
        "whole = self.makespan * len(self.spans)", "whole = self.makespan * (len(self.spans) + 1)",
        "the bubble is counted over a rank that is not there",
        ("tests/test_schedule_simulator.py::test_gpipe_and_1f1b",), r"assert 0\.5 == 0\.0 ± ",
    ),
    Mutation(
        "schedule-held-until-input-gradient", "schedules/checker.py",
        '{"F": 0, "B": 0, "I": 1, "W": -1}[kind]', '{"F": 0, "B": 0, "I": 0, "W": 0}[kind]',
        "what W still needs counts as free: split backwards look cheaper than they are",
        ("tests/test_schedule_checker.py::test_peaks",), r"assert \(Peak\(activations=3, gradients=0, held=3\)",
    ),
    Mutation(
        "schedule-file-of-two-owners", "schedules/table_file.py",
        "if owner != number:", "if owner > number:",
        "a stage may be on two ranks in a file",
        ("tests/test_schedule_tables.py::test_a_bad_file",), "1W0' is of stage 1, which row 1 has too",
    ),
    Mutation(
        "schedule-text-shifted", "schedules/drawing.py",
        "first, last = round(start * scale), round(end * scale)",
        "first, last = round(start * scale), round(end * scale) + (rank == 1)",
        "the text shows actions longer than they are",
        TEXT, "Extra items in the left set",
    ),
    Mutation(
        "schedule-picture-shifted", "schedules/svg.py",
        "x = _LEFT + (piece.start", "x = (piece.start",
        "the picture shows actions left of their time",
        PICTURE, r"== approx\(\(64(\.0)? ± ",
    ),
    Mutation(
        "schedule-names-cut", "schedules/drawing.py",
        "if column not in inside), latest)", "if column), latest)",
        "a line of the text ends within a name: F14 is read as F1",
        ("tests/test_schedule_drawings.py::test_no_name_is_cut_in_two",), "At index",
    ),
    Mutation(
        "schedule-run-forwards-first", "schedules/run.py",
        "for a in row] for rank,", "for a in sorted(row, key=lambda a: a[1] != 'F')] for rank,",
        "every schedule runs as GPipe: gradients are exact, and all micro-batches are kept",
        ("tests/test_pipeline_measured.py::test_a_table_is_what_runs_and_what_is_kept[1f1b-2]",), "At index",
    ),
)  # fmt: skip
