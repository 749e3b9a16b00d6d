"""All mutations, by what they are about."""

from __future__ import annotations

from . import layouts, models, programs, proofs, training

MUTATIONS = (
    *layouts.MUTATIONS,
    *programs.MUTATIONS,
    *training.MUTATIONS,
    *models.MUTATIONS,
    *proofs.MUTATIONS,
)
