"""Faults in operations and models, where one device and a mesh may go wrong together."""

from __future__ import annotations

from .mutation import Mutation
from .says import FALSE

LAWFUL = ("tests/test_regions.py::test_llama_is_lawful_for_every_declared_cut[tied]",)
LOSS = "tests/cases/test_vocabulary.py::test_smoothing_and_z_loss_count"
OPS = "tests/test_ops.py::"
MEGATRON = ("tests/test_oracle.py::test_megatron[]",)
FAR = r"assert [\d.e-]+ < [\d.e-]+"
DROPOUT = "tests/test_dropout.py::"

MUTATIONS = (
    Mutation(
        "embedding-rows-of-others", "ops/embedding.py",
        " * mine.unsqueeze(-1).to(weight.dtype)", "",
        "for ids of other parts the first row is added",
        LAWFUL, r"embed: vocab cut by 2: output 0",
    ),
    Mutation(
        "embedding-rows-not-shifted", "ops/embedding.py",
        "local = ids - index[0]", "local = ids",
        "each part looks ids up as if its rows were the first",
        LAWFUL, r"embed: vocab cut by 2: output 0",
    ),
    Mutation(
        "labels-mask-ignored", "ops/cross_entropy.py",
        "kept = (labels != IGNORE).to(x.dtype)", "kept = torch.ones_like(labels).to(x.dtype)",
        "masked labels cost something",
        (f"{LOSS}[plain]",), r"assert [\d.]+ == ",
    ),
    Mutation(
        "largest-logit-of-the-part", "ops/cross_entropy.py",
        'parts.max(x.amax(-1), "batch seq")', "x.amax(-1)",
        "parts of a vocabulary subtract different maxima before they sum",
        LAWFUL, r"head\.loss: vocab cut by 2: output 0",
    ),
    Mutation(
        "softmax-of-the-part", "ops/cross_entropy.py",
        'parts.sum(torch.stack([exp.sum(-1), target, *mean]), "_ batch seq")',
        "torch.stack([exp.sum(-1), target, *mean])",
        "the sum of exponentials misses the other parts of the vocabulary",
        LAWFUL, r"head\.loss: vocab cut by 2: output 0",
    ),
    Mutation(
        "largest-logits-added", "collectives.py",
        'return all_reduce(x, self.group, "max")', "return all_reduce(x, self.group)",
        "the largest logits of the parts are added: exact for small logits, infinite for large ones",
        (f"{OPS}test_large_logits_over_a_cut_vocabulary",), r"assert (nan|inf) == ",
    ),
    Mutation(
        "z-loss-dropped", "ops/cross_entropy.py",
        "loss = loss + z * lse.square()", "pass",
        "the z-loss is not added",
        (f"{LOSS}[smoothed]",), r"assert [\d.]+ == ",
    ),
    Mutation(
        "z-loss-gradient-halved", "ops/cross_entropy.py",
        "factor * (1 + 2 * z * lse)", "factor * (1 + z * lse)",
        "the gradient of the z-loss is not that of its square",
        (f"{OPS}test_gradients_of_the_loss",), r"Tensor-likes are not close",
    ),
    Mutation(
        "smoothing-gradient-dropped", "ops/cross_entropy.py",
        "grad -= (smoothing / vocab) * scale.unsqueeze(-1)", "pass",
        "label smoothing has no gradient",
        (f"{OPS}test_gradients_of_the_loss",), r"Tensor-likes are not close",
    ),
    Mutation(
        "kv-heads-interleaved", "ops/attention.py",
        "pick = head_index // group - kv_index[0]", "pick = head_index % kv_heads",
        "query heads read other kv heads than their own",
        LAWFUL, r"attention\.core: core_heads cut by 2: output 0",
    ),
    Mutation(
        "attention-sees-the-future", "ops/attention.py",
        "is_causal=True", "is_causal=False",
        "a query sees the keys after it",
        MEGATRON, FAR,
    ),
    Mutation(
        "dropout-not-scaled", "ops/dropout.py",
        " * (1 / (1 - p))", "",
        "what dropout keeps is not scaled up",
        (f"{DROPOUT}test_kept_elements_are_scaled_and_evaluation_keeps_all",), FALSE,
    ),
    Mutation(
        "dropout-alike-in-every-step", "ops/dropout.py",
        'keys(f"dropout/{seed}/{step}")', 'keys(f"dropout/{seed}")',
        "every step drops the same elements",
        (f"{DROPOUT}test_masks_depend_on_seed_step_and_site_and_on_nothing_else",), r"assert not True",
    ),
    Mutation(
        "positions-from-zero", "models/llama.py",
        "positions = indices(positions, x.shape[1], x.device)", "positions = indices(None, x.shape[1], x.device)",
        "rotary positions start at zero in every part of a sequence",
        LAWFUL, r"layers\.0\.attention: seq cut by 2",
    ),
    Mutation(
        "rope-not-a-rotation", "models/llama.py",
        "b * cos + a * sin", "b * cos - a * sin",
        "rotary positions turn one half the wrong way",
        MEGATRON, FAR,
    ),
    Mutation(
        "rope-low-frequencies-kept", "models/llama.py",
        "(keep + (1 - keep) / scaling.factor)", "((1 - keep) + keep / scaling.factor)",
        "Llama 3.1's scaling stretches the high frequencies instead of the low ones",
        (f"{OPS}test_stretched_frequencies",), r"Tensor-likes are not close",
    ),
    Mutation(
        "sum-over-heads-not-declared", "models/llama.py",
        'outputs="batch seq embed +heads -> batch res embed"', 'outputs="batch seq embed -> batch res embed"',
        "the output of attention is not said to be a sum over heads",
        LAWFUL, r"add \+heads to output 0",
    ),
    Mutation(
        "gpt-sees-the-next-token", "models/gpt.py",
        ".triu(1)", ".triu(2)",
        "attention with dropout sees the key after its own",
        (f"{OPS}test_attention_whose_dropout_keeps_all",), r"Tensor-likes are not close",
    ),
    Mutation(
        "gpt-bias-on-every-part", "models/gpt.py",
        '"wo.bias": "embed +heads"', '"wo.bias": "embed"',
        "a bias inside the sum over heads is not marked, so every rank adds it",
        (f"{DROPOUT}test_the_law_holds_with_dropout_and_sees_numbers_that_are_named_wrongly",),
        r"add \+heads to wo\.bias",
    ),
    Mutation(
        "tied-table-forgotten", "models/llama.py",
        "self.head.loss.weight = self.embed.weight", "pass",
        "a tied model has two tables",
        ("tests/test_resolve.py::test_a_tied_table_has_one_home",), r"head\.loss\.weight",
    ),
    Mutation(
        "branches-start-large", "models/llama.py",
        'name.endswith(("wo.weight", "down.weight"))', "False",
        "weights that end a residual branch start as large as the others",
        (f"{OPS}test_initial_sizes",), r"wo\.weight\nassert 0\.5",
    ),
)  # fmt: skip
