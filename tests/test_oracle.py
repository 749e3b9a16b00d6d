"""Against numbers computed by Megatron-LM itself (see tests/data/README.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import dtensor_lm as dl
from dtensor_lm.state import wrap
from dtensor_lm.testing.equivalence import gathered, parts
from dtensor_lm.testing.workers import pool

FILE = Path(__file__).parent / "data" / "tiny_llama_megatron.npz"
NAMES = {
    "embed": "embed.weight",
    "final_norm": "head.norm.weight",
    "lm_head": "head.loss.weight",
    **{
        f"{i}.{theirs}": f"layers.{i}.{ours}.weight"
        for i in range(2)
        for theirs, ours in {
            "attn_norm": "attention_norm",
            "mlp_norm": "mlp_norm",
            **{n: f"attention.w{n}" for n in "qkvo"},
            **{n: f"mlp.{n}" for n in ("gate", "up", "down")},
        }.items()
    },
}


def errors(mesh_text: str) -> tuple[float, float, float]:
    """Largest differences of losses, of the first gradients, and of the weights after 5 steps."""
    oracle = np.load(FILE)

    def weights(kind: str) -> dict[str, torch.Tensor]:
        return {ours: torch.from_numpy(oracle[f"{kind}/{theirs}"]) for theirs, ours in NAMES.items()}

    model = dl.models.build(
        "tiny", vocab=96, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=88, rope_base=10_000.0
    )
    program = dl.resolve(model, dl.plans.standard(), dl.Mesh.parse(mesh_text), batch=4, seq=16, decay="all")
    step = dl.train_step(program, dl.adamw(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), device="cpu")
    state = step.load(weights("init"))
    tokens = torch.from_numpy(oracle["tokens"])
    losses, grad_error = [], 0.0
    for i, rows in enumerate(tokens):
        batch = parts(program, {"tokens": rows[:, :-1], "labels": rows[:, 1:]}, step.device)
        if i == 0:
            grads, _, count, _ = step.gradients(state, batch)
            whole = gathered({n: wrap(g, program.parameters[n].optimizer) for n, g in grads.items()})
            grad_error = max(float((whole[n] / count - g).abs().max()) for n, g in weights("grad1").items())
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    final = gathered(state.parameters)
    loss_error = float(np.abs(np.array(losses) - oracle["losses"]).max())
    return loss_error, grad_error, max(float((final[n] - w).abs().max()) for n, w in weights("final").items())


@pytest.mark.parametrize("mesh", [pytest.param("", marks=pytest.mark.quick), "tp=2", "fsdp=2", "fsdp=2,tp=2"])
def test_megatron(mesh: str) -> None:
    for loss_error, grad_error, weight_error in pool(dl.Mesh.parse(mesh).size).run(errors, mesh):
        assert loss_error < 2e-6
        assert grad_error < 1e-6
        assert weight_error < 3e-6
