"""Faults in what is read from a model and a plan, and in what a Program says of them."""

from __future__ import annotations

from .mutation import Mutation
from .says import FALSE, NO_ERROR, gradients, report

RESOLVE = "tests/test_resolve.py::"
REPLICAS_ZERO_1 = ("tests/cases/test_token_weights.py::test_ranks_with_7_labels_and_1[1]",)
COUNTED = "tests/cases/test_hidden_collectives.py::test_every_step_issues_what_the_program_says"

MUTATIONS = (
    Mutation(
        "signature-sums-dropped", "region.py",
        "sums.append(name[1:])", "pass",
        "outputs that are sums are taken for whole ones",
        (f"{RESOLVE}test_sequence_parallel_regions_gather_once_and_scatter_once",), "reduce_scatter|P:tp",
    ),
    Mutation(
        "trace-nothing-saved", "trace.py",
        "self.saved[self.units[self.stack[-1].path]].add(name)", "pass",
        "no weight is gathered again in backward",
        (f"{RESOLVE}test_whole_gathers_are_one_per_unit",), r"parameters again",
    ),
    Mutation(
        "trace-copies-of-layers-save-nothing", "trace.py",
        "self.saved[path] |= {moved(name) for name in saved}", "pass",
        "of equal layers only the first gathers its weights again",
        (f"{RESOLVE}test_whole_gathers_are_one_per_unit",), r"layers.1: parameters again",
    ),
    Mutation(
        "trace-in-the-models-mode", "trace.py",
        "model.train()  # a step trains", "pass  # a step trains",
        "a model in evaluation mode is traced without what training adds",
        ("tests/test_refusals.py::test_a_model_is_traced_in_training_mode",), r"assert \[\d+\] == \[\d+\]",
    ),
    Mutation(
        "trace-parameters-visible-to-all", "trace.py",
        "module._parameters[name] = None  # a region sees", "pass  # a region sees",
        "a region may use a parameter that it does not name",
        ("tests/test_step.py::test_a_parameter_that_a_region_does_not_name_is_not_seen",), NO_ERROR,
    ),
    Mutation(
        "biases-decay", "sharding_plans/resolve.py",
        'matrix = len(value.shape) >= 2 and "bias" not in name.rsplit(".", 1)[-1]', "matrix = len(value.shape) >= 2",
        "weight decay on biases of two dims",
        ("tests/cases/test_optimizer_state.py::test_matrices_decay_and_nothing_else[tp]",), r"AssertionError: .*bias",
    ),
    Mutation(
        "norms-decay", "sharding_plans/resolve.py",
        'self.decay == "all" or matrix,', "True,",
        "weight decay on norms",
        ("tests/cases/test_optimizer_state.py::test_matrices_decay_and_nothing_else[tp]",), r"AssertionError: .*norm",
    ),
    Mutation(
        "narrow-gradients", "sharding_plans/resolve.py",
        'master = value.dtype if ITEMSIZE[value.dtype] >= 4 else "float32"', "master = value.dtype",
        "gradients and master weights are as narrow as the parameters",
        (f"{RESOLVE}test_narrow_parameters_have_wide_gradients_and_masters",), r"bf16\[embed",
    ),
    Mutation(
        "equal-outputs-not-marked", "sharding_plans/resolve.py",
        'frozenset() if spec.whole or spec.kind != "float" else', 'frozenset() if spec.kind != "float" else',
        "the mark = is not read: gradients of a loss over a cut vocabulary are taken for addends",
        ("tests/cases/test_vocabulary.py::test_every_layout_of_the_head_has_the_same_loss[2-options0-cut]",),
        gradients(),
    ),
    Mutation(
        "home-of-the-first-use", "sharding_plans/resolve.py",
        "(self.live[use.region] for use in uses))", "(self.live[use.region] for use in uses[:1]))",
        "a parameter of several regions is reduced at every use but the first",
        (f"{RESOLVE}test_a_parameter_of_two_regions_is_reduced_once",), r"f32\[embed=8\] I:tp",
    ),
    Mutation(
        "gathers-once-for-all-micro-batches", "sharding_plans/resolve.py",
        "calls[unit] * self.micro", "calls[unit]",
        "gathers are predicted for one micro-batch",
        (f"{RESOLVE}test_whole_gathers_are_one_per_unit",), r"parameters', 1, 'forward'",
    ),
    Mutation(
        "whole-gradients-reduced", "sharding_plans/program.py",
        'if self.optimizer.state(axis) == "R")', 'if self.optimizer.state(axis) in "RI")',
        "gradients that are equal on all ranks are added up",
        ("tests/cases/test_gradient_scale.py::test_equal_copies_of_a_computation_are_not_summed",), FALSE,
    ),
    Mutation(
        "bytes-of-one-shard", "sharding_plans/predict.py",
        '(1 if self.op in ("all_reduce", "send") else self.axes_size)', "1",
        "collectives of parameters are predicted with the bytes of one shard",
        (f"{COUNTED}[zero 3]",), r"all_gather @dp .* found",
    ),
    Mutation(
        "second-gather-not-predicted", "sharding_plans/predict.py",
        "if g.again:", "if False:",
        "what backward gathers again is in no prediction",
        (f"{RESOLVE}test_whole_gathers_are_one_per_unit",), r"parameters again",
    ),
    Mutation(
        "backward-of-what-is-not-used", "reach.py",
        "value.grad = value.grad and node in seen", "pass",
        "a branch whose result is thrown away is promised the collectives of a backward",
        ("tests/test_reach.py::test_what_a_gradient_reaches",), r"assert",
    ),
    Mutation(
        "tensors-in-lists", "signatures.py",
        "if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):", "if False:",
        "a tensor inside a list gets no edge, and nobody says so",
        ("tests/test_borders.py::test_tensors_without_a_signature",), r"DID NOT RAISE|in ",
    ),
    Mutation(
        "mask-without-row", "ops/dropout.py",
        "moment.row * self.row_stride * STEP", "0 * self.row_stride * STEP",
        "every micro-batch has the same mask",
        ("tests/test_dropout.py::test_masks_depend_on_seed_step_and_site_and_on_nothing_else",), r"assert",
    ),
    Mutation(
        "update-not-predicted", "sharding_plans/predict.py",
        "yield Collective(r.op, r.axes, r.dtype, r.bytes, 1, \"step\", \"updated parameters\")", "yield from ()",
        "the gather of updated parameters is in no prediction",
        REPLICAS_ZERO_1, report("collectives_match"),
    ),
    Mutation(
        "check-sizes", "sharding_plans/checks.py",
        'if name != "batch" and size % self.mesh.product(axes):', "if False:",
        "sizes that axes do not divide are not reported",
        (f"{RESOLVE}test_sizes_that_do_not_divide",), NO_ERROR,
    ),
    Mutation(
        "check-batch", "sharding_plans/checks.py",
        "if self.batch % (parts * self.micro):", "if self.batch % parts:",
        "a batch that micro-batches do not divide is not reported",
        (f"{RESOLVE}test_batches_that_micro_batches_do_not_divide_are_shown_with_the_rest",), r"3 sequences in 2",
    ),
    Mutation(
        "check-idle-axes", "sharding_plans/checks.py",
        "if axis not in used:", "if False:",
        "an axis that shards nothing is not reported",
        (f"{RESOLVE}test_an_axis_that_shards_nothing",), NO_ERROR,
    ),
    Mutation(
        "check-prefixes", "sharding_plans/checks.py",
        "if rows[table][: len(rows[b])] != rows[b]]", "if False]",
        "an optimizer cut in another order than the parameters is not reported",
        (f"{RESOLVE}test_the_prefix_rule_and_its_repair",), "must begin with its axes in",
    ),
    Mutation(
        "check-needed-whole", "sharding_plans/checks.py",
        "if not cut or cut in region.cuts:", "if len(cut) < 2 or cut in region.cuts:",
        "a cut that a region does not allow is not reported",
        (f"{RESOLVE}test_a_name_that_is_needed_whole",), NO_ERROR,
    ),
    Mutation(
        "check-bundles", "sharding_plans/checks.py",
        "if len(heads) > 1:", "if len(heads) > 2:",
        "query heads and kv heads cut in different orders are not reported",
        (f"{RESOLVE}test_axes_of_a_bundle_stand_in_one_order",), NO_ERROR,
    ),
    Mutation(
        "plans-overwrite-each-other", "sharding_plans/plan.py",
        "if mine[name] != theirs[name]", "if False",
        "of two plans that disagree the second wins in silence",
        ("tests/test_plans.py::test_plans_that_disagree",), NO_ERROR,
    ),
)  # fmt: skip
