"""Faults on one rank and in a run: the partitioned module, the state, the step, the optimizer, data, initial values."""

from __future__ import annotations

from .mutation import Mutation
from .says import FALSE, gradients, report

LABELS = "tests/cases/test_token_weights.py::"
REPLICAS = (f"{LABELS}test_ranks_with_7_labels_and_1[0]",)
SHARDS = (f"{LABELS}test_ranks_with_7_labels_and_1[3]",)
UNUSUAL = "tests/test_unusual_plans.py::test_equal_to_one_device"
STATE_I = ("tests/test_step.py::test_a_loss_in_state_r_starts_backward_once[compute0]",)  # the loss in state I over tp
MEGATRON = ("tests/test_oracle.py::test_megatron[]",)
NARROW = "tests/cases/test_optimizer_state.py::"
DATA = "tests/test_data.py::"
VALUES = "tests/test_initial_values.py::"

MUTATIONS = (
    # What one rank runs
    Mutation(
        "index-of-the-first-part", "partition.py",
        "torch.arange(*block(size, axes, mesh, place), device=device)",
        "torch.arange(*block(size, axes, mesh, dict.fromkeys(place, 0)), device=device)",
        "every rank is told that it holds the first part: rotary positions start at zero on each",
        (f"{UNUSUAL}[sequence of bodies cut, core whole]",), report("loss_error"),
    ),
    Mutation(
        "regather-stale-shards", "gathering.py",
        "self.groups.append((g, shards))", 'self.groups.append((g, g.__dict__.setdefault("first", shards)))',
        "backward gathers the parameters of the first forward again",
        (f"{NARROW}test_a_step_has_no_parameters_of_its_own",), FALSE,
    ),
    Mutation(
        "regather-though-kept", "partition.py",
        "if g.regather and torch.is_grad_enabled():", "if torch.is_grad_enabled():",
        "weights that a plan keeps are gathered again: collectives that nobody predicted",
        (f"{UNUSUAL}[weights stay gathered]",), report("collectives_match"),
    ),
    Mutation(
        "narrow-reduction-of-gradients", "gathering.py",
        "have = {n: g.to(self.dtype) for", "have = {n: g.bfloat16().to(self.dtype) for",
        "gradients of shards are rounded to bfloat16 before they are summed",
        SHARDS, gradients(),
    ),
    Mutation(
        "donated-state-still-usable", "state.py",
        "self._donated = True", "self._donated = False",
        "a state that a step has taken can be used again",
        ("tests/test_step.py::test_a_donated_state_cannot_be_used",), r"assert \[\] == \['this state was donated",
    ),
    Mutation(
        "steps-not-counted", "state.py",
        "self._step + 1", "self._step",
        "every step is the first one",
        ("tests/test_step.py::test_a_donated_state_cannot_be_used",), r"assert after\.step == 1",
    ),
    Mutation(
        "state-in-the-order-of-the-mesh", "state.py",
        "return tuple(axes)", "return tuple(layout.mesh.active)",
        "a tensor that is cut by axes in another order than the mesh's is put together wrongly",
        ("tests/test_layout.py::test_blocks_are_those_of_dtensor",), FALSE,
    ),
    Mutation(
        "state-aliases-what-was-loaded", "state.py",
        "return whole.clone(memory_format=torch.contiguous_format)", "return whole.contiguous()",
        "training writes into the tensors that a state was loaded from",
        REPLICAS, report("max_param_error_adamw", "max_param_error"),
    ),
    # The step
    Mutation(
        "backward-starts-on-every-rank", "training/step.py",
        "torch.tensor(1.0 if alone else 0.0, device=device)", "torch.tensor(1.0, device=device)",
        "gradients are multiplied by the size of axes on which the loss is whole",
        ("tests/test_step.py::test_a_loss_in_state_r_starts_backward_once[compute2]",), report("max_grad_error"),
    ),
    Mutation(
        "loss-counted-per-copy", "training/step.py",
        "loss / self.loss_copies,", "loss,",
        "the loss is summed over ranks that hold the same loss",
        STATE_I, report("loss_error"),
    ),
    Mutation(
        "tokens-counted-per-copy", "training/step.py",
        "tokens / self.label_copies]", "tokens]",
        "tokens are counted once for every rank that reads them",
        STATE_I, report("loss_error"),
    ),
    Mutation(
        "tokens-of-this-rank", "training/step.py",
        "statistics = all_reduce(statistics, self.world)",
        "statistics = torch.cat([all_reduce(statistics, self.world)[:2], statistics[2:]])",
        "the token count is not summed over ranks",
        REPLICAS, r"assert \(",
    ),
    Mutation(
        "mean-of-means", "training/passes.py",
        "out.backward(self.seed.to(out.dtype))",
        'out.backward(self.seed.to(out.dtype) / max(1, int((inputs["labels"] != -100).sum())))',
        "every rank and micro-batch weighs the same, however many tokens it has",
        REPLICAS, gradients(),
    ),
    Mutation(
        "last-micro-batch-dropped", "training/passes.py",
        "for i, inputs in enumerate(batch):", "for i, inputs in enumerate(batch[:-1] or batch):",
        "the last micro-batch is not computed",
        (f"{LABELS}test_micro_batches_with_8_4_2_and_1_labels[1-real0]",), gradients(),
    ),
    Mutation(
        "norm-counts-copies", "training/step.py",
        " / self.parameters[n].optimizer.copies for n in", " for n in",
        "replicated gradients are counted once per rank in the norm",
        REPLICAS, r"assert \d[\d.e-]* <= \(1e-12 \* ",
    ),
    Mutation(
        "clip-by-the-local-norm", "training/step.py",
        "self.clip_norm / (norm + 1e-6)",
        "self.clip_norm / (sum(g.double().square().sum().item() for g in grads.values()) ** 0.5 / count + 1e-6)",
        "each rank clips by the norm of its own shards",
        SHARDS, report("max_param_error", "max_param_error_adamw"),
    ),
    Mutation(
        "clip-skipped", "training/step.py",
        "if self.clip_norm:", "if False:",
        "gradients are not clipped",
        REPLICAS, report("max_param_error"),
    ),
    Mutation(
        "not-finite-applied", "training/step.py",
        "if finite:", "if True:",
        "a step that is not finite changes parameters and moments",
        ("tests/test_step.py::test_a_step_that_is_not_finite_changes_nothing",), r"\(True, False\)",
    ),
    Mutation(
        "narrow-accumulation", "training/step.py",
        "leaf.grad_dtype = self.master_dtype", "leaf.grad_dtype = leaf.dtype",
        "gradients of micro-batches are accumulated in bfloat16",
        (f"{NARROW}test_256_and_1_and_minus_256_are_1[micro-batches]",), r"assert \[\[\[",
    ),
    Mutation(
        "masters-not-used", "training/step.py",
        'masters[name] = local(state.optimizer["master"][name])',
        "masters[name] = narrow(local(state.parameters[name]), p.storage, p.optimizer).to(self.master_dtype)",
        "the optimizer starts from the rounded parameters, and small updates are lost",
        (f"{NARROW}test_a_bf16_weight_at_one_moves_as_in_fp32[ddp]",), FALSE,
    ),
    Mutation(
        "rows-of-every-micro-batch-alike", "training/passes.py",
        "replace(moment, row=i * self.rows)", "replace(moment, row=0)",
        "dropout draws the same numbers for every micro-batch",
        ("tests/test_dropout.py::test_masks_and_initial_values_are_the_same_bits_on_every_mesh[one-4]",),
        r"AssertionError: [a-z0-9_.]+random",
    ),
    Mutation(
        "evaluation-in-training-mode", "training/passes.py",
        "self.module.eval()", "self.module.train(True)",
        "an evaluation smooths labels and drops out",
        (f"{LABELS}test_an_evaluation_leaves_no_trace[]",), r"assert [\d.]+ != [\d.]+",
    ),
    Mutation(
        "adamw-bias-correction-one-step-late", "training/optimizer.py",
        "step - 1.0, device=device)", "float(step), device=device)",
        "AdamW corrects its moments as if one more step had been taken",
        MEGATRON, r"assert [\d.e-]+ < [23]e-06",
    ),
    Mutation(
        "adamw-decay-dropped", "training/optimizer.py",
        "weight_decay=self.weight_decay if group.decay else 0.0, eps=self.eps", "weight_decay=0.0, eps=self.eps",
        "nothing decays under AdamW",
        MEGATRON, r"assert [\d.e-]+ < [23]e-06",
    ),
    Mutation(
        "cosine-ends-early", "training/learning_rate.py",
        "max(1, total - 1 - warmup_steps)", "max(1, total - warmup_steps)",
        "the learning rate has not come down to its final value at the last step",
        ("tests/test_learning_rate.py::test_cosine",), r"assert \[1\.0, 0\.98",
    ),
    Mutation(
        "warmup-starts-at-zero", "training/learning_rate.py",
        "(step + 1) / steps)", "step / steps)",
        "the first step of the warm-up does nothing",
        ("tests/test_learning_rate.py::test_warm_up[constant]",), r"assert \[0\.0, 0\.25, 0\.5, 0\.75\]",
    ),
    # Data and initial values
    Mutation(
        "feed-rows-of-the-first-micro-batch", "training/feed.py",
        "[m * self.rows + r for r in mine]", "list(mine)",
        "every micro-batch has the rows of the first",
        ("tests/cases/test_layout_independence.py::test_parts_of_a_whole_batch_are_the_same_parts",), FALSE,
    ),
    Mutation(
        "feed-rows-of-the-first-rank", "training/feed.py",
        "return range(start, stop),", "return range(stop - start),",
        "every rank reads the rows of the first",
        ("tests/cases/test_layout_independence.py::test_parts_of_a_whole_batch_are_the_same_parts",), FALSE,
    ),
    Mutation(
        "labels-not-shifted", "data/batch.py",
        "text[:-1], text[1:]", "text[:-1], text[:-1]",
        "the label of a token is the token itself",
        (f"{DATA}test_labels_are_the_next_tokens",), FALSE,
    ),
    Mutation(
        "epochs-in-one-order", "data/batch.py",
        "[self.seed % 2**64, epoch]", "[self.seed % 2**64, 0]",
        "every epoch has the order of the first",
        (f"{DATA}test_samples_run_across_the_border_of_epochs",), r"assert 1 > 25",
    ),
    Mutation(
        "padding-counts", "data/batch.py",
        "if p < self.sequences else None for p", "for p",
        "the last batch of an evaluation counts sequences twice, or past the end",
        (f"{DATA}test_each_sequence_counts_once_whatever_the_batch[99-windows5-3]",), r"assert \d+ <= 205",
    ),
    Mutation(
        "initial-values-without-the-seed", "initial_values.py",
        'keys(f"{seed}/{draws_before}/{name}")', 'keys(f"{draws_before}/{name}")',
        "all seeds give the same values",
        (f"{VALUES}test_names_seeds_and_draws_are_independent_streams",), r"assert 0\.99\d+ < ",
    ),
    Mutation(
        "initial-values-without-the-name", "initial_values.py",
        'keys(f"{seed}/{draws_before}/{name}")', 'keys(f"{seed}/{draws_before}")',
        "all parameters get the same values",
        (f"{VALUES}test_names_seeds_and_draws_are_independent_streams",), r"assert 0\.99\d+ < ",
    ),
    Mutation(
        "initial-values-alike-on-all-shards", "initial_values.py",
        "runs.append((start, stop))", "runs.append((0, stop - start))",
        "every shard draws the numbers of the first",
        (f"{VALUES}test_shards_concatenate_bitwise_to_the_whole[parts1-normal]",), FALSE,
    ),
    Mutation(
        "one-key-only", "counters.py",
        "z.bitwise_xor_(second)", "pass",
        "streams are windows of one sequence",
        (f"{VALUES}test_the_stream_is_the_written_down_one",), r"assert \[\[",
    ),
)  # fmt: skip
