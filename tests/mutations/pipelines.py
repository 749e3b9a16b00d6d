"""Faults in pipelines: where stages are cut, what they hand over, what is summed and what is counted."""

from __future__ import annotations

from .mutation import Mutation

EQUAL = "tests/test_pipeline.py::test_equal_to_one_device"
TIED = (f"{EQUAL}[1f1b-1-pp=2,fsdp=2-4-4-tied-1]",)
DROPOUT = (f"{EQUAL}[gpipe-1-pp=2,fsdp=2-3-4-gpt-2]",)
HALVES = (f"{EQUAL}[zb-h1-1-pp=2,fsdp=2-3-4-plain-1]",)
OWN_CODE = ("tests/test_stages.py::test_own_code_between_stages_is_of_the_first",)
SPLIT = ("tests/test_stages.py::test_a_backward_that_cannot_be_split",)

MUTATIONS = (
    Mutation(
        "own-code-on-the-stage-after", "sharding_plans/stages.py",
        "s.first <= max(gap - 1, 0) < s.stop", "s.first <= gap < s.stop",
        "what the model's own code does between two stages is taken for the second's",
        OWN_CODE, r"\(1,\) == \(0,\)|At index 0 diff: 1 != 0",
    ),
    Mutation(
        "cuts-through-a-skip", "chain.py",
        "range(origin.link + 1, last + 1)", "range(origin.link + 2, last + 1)",
        "a stage may begin where the one before hands over less than is needed",
        ("tests/test_stages.py::test_what_passes_by_a_stage_is_refused",), r"DID NOT RAISE|assert .* ==",
    ),
    Mutation(
        "shared-gradients-not-added", "rounds.py",
        "functools.reduce(torch.add, (x for _, x in sorted({**got, self.rank: flat}.items())))", "flat",
        "the two ends of a tied table are updated by their own gradients",
        TIED, r"replicas_equal=False",
    ),
    Mutation(
        "shared-parameter-counted-twice", "sharding_plans/program.py",
        "return self.pipeline.ranks_of(parameter)[0] == ", "return True or ",
        "the norm counts a parameter on every stage that uses it",
        ("tests/cases/test_pipelines.py::test_the_norm_of_a_shared_gradient_whose_square_is_800",), r"40\.0",
    ),
    Mutation(
        "masks-of-the-first-micro-batch", "schedules/run.py",
        "row=given.moment.row + i * given.rows", "row=given.moment.row",
        "all micro-batches of a pipeline drop alike",
        DROPOUT, r"loss_error=",
    ),
    Mutation(
        "masks-of-the-first-run", "schedules/run.py",
        "row=first * self.rows", "row=0",
        "all runs of a schedule in one step drop alike",
        DROPOUT, r"loss_error=",
    ),
    Mutation(
        "gradients-divided-by-micro-batches", "schedules/run.py",
        "seed.to(out.dtype), scale_grads=False", "seed.to(out.dtype), scale_grads=True",
        "torch's engine makes means of sums",
        TIED, r"max_grad_error=",
    ),
    Mutation(
        "two-gradients-in-one-tensor", "schedules/run.py",
        "if leaf.grad is None:", "if False:",
        "parameters that are added have one gradient, to which each adds",
        ("tests/test_stages.py::test_such_models_equal_one_device",), r"max_grad_error=",
    ),
    Mutation(
        "one-node-for-a-unit", "partition.py",
        "if self.owner.halves and torch.is_grad_enabled():", "if False:",
        "the second half of a backward goes through all of a unit again",
        (f"{EQUAL}[dualpipe-v-2-pp=2,fsdp=2,tp=2-4-4-plain-1]",), r"bytes: predicted",
    ),
    Mutation(
        "second-half-gathers-nothing", "sharding_plans/parts.py",
        "(2 * halves if stage else halves)", "halves",
        "what the second half of a backward gathers is not predicted",
        HALVES, r"all_gather @fsdp float64 of \d+ bytes: predicted",
    ),
    Mutation(
        "gradients-sent-for-nothing", "sharding_plans/pipeline.py",
        "if b.sent and b.stage == stage - 1:", "if False:",
        "what stages send back is not predicted",
        TIED, r"send @pp float64 of \d+ bytes: predicted",
    ),
    Mutation(
        "evaluation-counts-what-fills-it-up", "training/step.py",
        'torch.full_like(batch[-1]["labels"], IGNORE)', 'batch[-1]["labels"]',
        "the last batch of an evaluation counts as often as the schedule has micro-batches left",
        ("tests/test_pipeline.py::test_train_evaluate_train[1f1b]",), r"assert \[|approx",
    ),
    Mutation(
        "any-backward-is-split", "sharding_plans/halves.py",
        "0 if before & outputs else len(entries)", "1",
        "gradients that torch loses or counts twice are not refused",
        SPLIT, r"DID NOT RAISE",
    ),
)  # fmt: skip
