"""The parts of a Program whose layers go over a pipeline: what one stage runs, and what one rank does."""

from __future__ import annotations

from dataclasses import replace

from dtensor_lm.sharding_plans.predict import micro_batch_collectives, step_collectives
from dtensor_lm.sharding_plans.program import Program


def stage_program(program: Program, stage: int) -> Program:
    """What one stage runs: its units and the model's own code, with the parameters that it uses."""
    pipe = program.pipeline
    assert pipe is not None
    here = pipe.stages[stage]
    used = {name for name, stages in pipe.homes.items() if stage in stages}
    calls = {unit: 0 for unit in {link.unit for link in pipe.links}}
    every = dict(calls)
    for i, link in enumerate(pipe.links):
        every[link.unit] += 1
        calls[link.unit] += here.first <= i < here.stop
    share = {unit: (n, every[unit]) for unit, n in calls.items() if n} | {"": (1, 1)}
    regions = {}
    for path, region in program.regions.items():
        if region.unit in share:
            n, of = share[region.unit]
            kept = {local: e for local, e in region.parameters.items() if e.parameter in used}
            absent = {local: e.target for local, e in region.parameters.items() if local not in kept}
            regions[path] = replace(
                region,
                inputs={name: replace(e, count=e.count * n // of) for name, e in region.inputs.items()},
                outputs=tuple(e and replace(e, count=e.count * n // of) for e in region.outputs),
                parameters={local: replace(e, count=e.count * n // of) for local, e in kept.items()},
                exchanges=tuple(replace(c, count=c.count * n // of) for c in region.exchanges),
                absent=absent,
            )
    whole, halves = pipe.times(stage, "B"), pipe.times(stage, "I")
    passes = whole + (2 * halves if stage else halves)  # the first stage has nothing to do in the first half
    gathers = []
    for g in program.gathers:
        names = tuple(name for name in g.parameters if name in used)
        if g.unit in share and names:
            n, of = share[g.unit]
            again = passes * (n if g.unit else 1) if g.again else 0
            gathers.append(replace(g, parameters=names, count=g.count * n // of, again=again))
    parameters = {name: p for name, p in program.parameters.items() if name in used}
    part = replace(program, parameters=parameters, regions=regions, gathers=tuple(gathers), held=(stage,))
    return replace(part, by_rank=(tuple(micro_batch_collectives(part)),))


def rank_program(program: Program, rank: int) -> Program:
    """What the ranks at one place of the pipeline's axis run: all of their stages together."""
    pipe = program.pipeline
    assert pipe is not None
    parts = [stage_program(program, stage) for stage in pipe.on(rank)]
    names = {name for part in parts for name in part.parameters}
    part = replace(
        program,
        parameters={name: p for name, p in program.parameters.items() if name in names},
        regions={path: region for part in parts for path, region in part.regions.items()},
        gathers=tuple(g for part in parts for g in part.gathers),
        held=pipe.on(rank),
    )
    every = [*(c for each in parts for c in each.collectives), *pipe.sends(pipe.on(rank)), *step_collectives(part)]
    return replace(part, by_rank=(tuple(every),))


def part(program: Program, rank: int) -> Program:
    """What a rank of the mesh runs: the stages of its place in the pipeline; everything without one."""
    if program.pipeline is None or program.held is not None:
        return program
    return rank_program(program, program.mesh.coordinate(rank)[program.pipeline.axis])


def complete(program: Program) -> Program:
    """The Program with its collectives."""
    if program.pipeline is None:
        return replace(program, by_rank=((*micro_batch_collectives(program), *step_collectives(program)),))
    ranks = range(program.mesh[program.pipeline.axis])
    return replace(program, by_rank=tuple(rank_program(program, rank).collectives for rank in ranks))
