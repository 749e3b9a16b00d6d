"""Trains the full product of meshes and settings and compares every step with one process.

    python experiments/equal_runs.py [--steps 20] [--batch 16] [--seq 64] [--only TEXT]

float64, the default corpus, the default learning rate with AdamW and clipping. For each run: the largest relative
difference of loss and gradient norm over all steps. Ends with exit code 1 if one is above 1e-10.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from dtensor_lm.config import EvaluationConfig, SampleConfig, TrainConfig
from dtensor_lm.mesh import Mesh
from dtensor_lm.testing.workers import pool

MESHES = ("dp=2", "fsdp=2", "tp=2", "fsdp=4", "tp=4", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2", "dp=2,fsdp=2,tp=2")
TOLERANCE = 1e-10


def settings() -> list[dict[str, object]]:
    found = []
    for mesh in MESHES:
        zeros = (0, 1, 2, 3) if "dp=" in mesh.replace("fsdp=", "") else (0,)
        sequence = (True, False) if "tp=" in mesh else (True,)
        for zero, sp, micro, tied in itertools.product(zeros, sequence, (1, 4), (False, True)):
            found.append({"mesh": mesh, "zero": zero, "sequence_parallel": sp, "micro_batches": micro, "tied": tied})
    return found


def train(config: TrainConfig) -> None:
    from dtensor_lm.training.loop import run

    assert run(config) == 0


def losses(folder: str, **changes: object) -> list[tuple[float, float]]:
    config = TrainConfig(
        dtype="float64",
        device="cpu",
        json=False,
        progress=False,
        run_dir=folder,
        evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(tokens=0),
        **changes,  # type: ignore[arg-type]
    )
    pool(Mesh.parse(config.mesh).size).run(train, config, timeout=600)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [(r["loss"], r["grad_norm"]) for r in map(json.loads, lines)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--only", default="", help="runs whose description contains this text")
    args = parser.parse_args()
    size = {"steps": args.steps, "batch": args.batch, "seq": args.seq}
    worst, runs = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        reference = {t: losses(f"{folder}/reference-{t}", tied=t, **size) for t in (False, True)}
        for i, changes in enumerate(settings()):
            name = " ".join(f"{k}={v}" for k, v in changes.items())
            if args.only not in name:
                continue
            began = time.monotonic()
            found = losses(f"{folder}/{i}", **changes, **size)
            expected = reference[bool(changes["tied"])]
            error = max(
                abs(a - b) / abs(b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)
            )
            worst, runs = max(worst, error), runs + 1
            print(f"{error:.1e}  {time.monotonic() - began:5.1f} s  {name}", flush=True)
    print(f"{runs} runs of {args.steps} steps: largest relative difference of loss and norm {worst:.1e}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
