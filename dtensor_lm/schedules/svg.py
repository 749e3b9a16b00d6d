"""A timeline as an SVG picture: a bar for each rank, a box for each action with its micro-batch, a time axis.

The colour says the kind. Where a rank has several stages, the first is the darkest and the last the lightest. Pointing
at a box shows its stage and its time.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from dtensor_lm.schedules.drawing import WORDS, summary, ticks
from dtensor_lm.schedules.simulator import Span, Timeline

# Colours that people with any kind of colour vision can tell apart: Okabe and Ito 2008, "Color universal design".
_COLOURS = {"F": (0, 114, 178), "B": (0, 158, 115), "I": (204, 121, 167), "W": (230, 159, 0)}
_IDLE = "#ededed"
_LEFT, _TOP, _BAR, _GAP, _RIGHT = 64, 34, 24, 6, 24
_NARROWEST, _WIDEST = 20, 12_000  # pixels: of the shortest action, and of the picture, which wins
_CHARACTER = 6.2  # pixels of a digit at 10 px


def svg(timeline: Timeline) -> str:
    """The picture of a timeline, as the text of an SVG file."""
    schedule = timeline.schedule
    lengths = [span.end - span.start for each in timeline.spans for span in each if span.end > span.start]
    makespan = timeline.makespan or 1.0
    scale = min(_NARROWEST / min(lengths, default=1.0), (_WIDEST - _LEFT - _RIGHT) / makespan)
    kinds = [kind for kind in WORDS if any(action.kind == kind for actions in schedule.rows for action in actions)]
    bottom = _TOP + schedule.ranks * (_BAR + _GAP)
    width = max(_LEFT + makespan * scale + _RIGHT, 560)
    height = bottom + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="Helvetica, Arial, sans-serif" font-size="10">',
        f"<title>{escape(summary(timeline))}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="12">{escape(summary(timeline))}</text>',
    ]
    for rank, spans in enumerate(timeline.spans):
        y = _TOP + rank * (_BAR + _GAP)
        parts.append(f'<text x="8" y="{y + 16}" font-size="12">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{makespan * scale:.2f}" height="{_BAR}" fill="{_IDLE}"/>')
        stages = schedule.stages_of(rank)
        parts += [_box(span, y, scale, stages.index(span.action.stage), len(stages)) for span in spans]
    parts += _axis(makespan, scale, bottom)
    parts += _legend(kinds, bottom + 34, schedule.virtual_stages)
    return "\n".join([*parts, "</svg>", ""])


def _shade(kind: str, place: int, stages: int) -> tuple[str, str]:
    """The colour of a box, and of the text on it."""
    white = 0.62 * place / (stages - 1) if stages > 1 else 0.0
    red, green, blue = (round(each + (255 - each) * white) for each in _COLOURS[kind])
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 125
    return f"#{red:02x}{green:02x}{blue:02x}", "#000000" if bright else "#ffffff"


def _box(span: Span, y: int, scale: float, place: int, stages: int) -> str:
    action, start, end = span
    fill, ink = _shade(action.kind, place, stages)
    x, width = _LEFT + start * scale, (end - start) * scale
    label = str(action.micro_batch)
    text = ""
    if len(label) * _CHARACTER <= width:
        text = f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" fill="{ink}">{label}</text>'
    about = f"{action}: {WORDS[action.kind]}, stage {action.stage}, micro-batch {label}, from {start:g} to {end:g}"
    return (
        f'<g><title>{about}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{fill}" '
        f'stroke="#ffffff" stroke-width="0.8"/>{text}</g>'
    )


def _axis(makespan: float, scale: float, y: int) -> list[str]:
    end = _LEFT + makespan * scale
    parts = [f'<line x1="{_LEFT}" y1="{y}" x2="{end:.2f}" y2="{y}" stroke="#000000"/>']
    for tick in ticks(0, makespan, 60 / scale):
        x = _LEFT + tick * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 4}" stroke="#000000"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 15}" text-anchor="middle">{tick:g}</text>')
    return [*parts, f'<text x="8" y="{y + 15}">time</text>']


def _legend(kinds: list[str], y: int, stages: int) -> list[str]:
    parts = []
    x = _LEFT
    for kind in [*kinds, ""]:
        word = f"{kind} {WORDS[kind]}" if kind else "idle"
        shades = [_shade(kind, place, stages)[0] for place in range(stages)] if kind else [_IDLE]
        for fill in shades:
            parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{fill}"/>')
            x += 12
        parts.append(f'<text x="{x + 4}" y="{y + 10}">{word}</text>')
        x += 4 + round(len(word) * 5.5) + 16
    if stages > 1:
        parts.append(f'<text x="{x}" y="{y + 10}">dark to light: the stages of a rank, in order</text>')
    return parts
