"""All mutations, by what they are about."""

from __future__ import annotations

from . import layouts, models, pipelines, programs, proofs, schedules, training

MUTATIONS = (
    *layouts.MUTATIONS,
    *programs.MUTATIONS,
    *training.MUTATIONS,
    *models.MUTATIONS,
    *proofs.MUTATIONS,
    *schedules.MUTATIONS,
    *pipelines.MUTATIONS,
)
