"""A timeline as an SVG picture: a bar for each rank, a box for each action with its micro-batch, a time axis.

The colour says the kind. Where a rank has several stages, the first is the darkest and the last the lightest. Pointing
at a box shows its stage and its time. A long picture goes on below, from a round time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import NamedTuple
from xml.sax.saxutils import escape

from dtensor_lm.schedules.drawing import WORDS, summary, tick, ticks
from dtensor_lm.schedules.simulator import Span, Timeline

# Colours that people with any kind of colour vision can tell apart: Okabe and Ito 2008, "Color universal design".
_COLOURS = {"F": (0, 114, 178), "B": (0, 158, 115), "I": (204, 121, 167), "W": (230, 159, 0)}
_IDLE = "#ededed"
_LEFT, _TOP, _BAR, _GAP, _RIGHT, _AXIS = 64, 34, 24, 6, 24, 32
_PANEL = 1600  # pixels: what is wider goes on below
_NARROWEST, _LONGEST = 20, 12_000  # pixels: of the shortest action, and of all panels side by side, which wins
_CHARACTER, _TITLE_CHARACTER, _TICKS = 6.2, 7.0, 60  # pixels: of a digit at 10 px, any at 12 px; between ticks


def svg(timeline: Timeline) -> str:
    """The picture of a timeline, as the text of an SVG file."""
    schedule = timeline.schedule
    lengths = [span.end - span.start for each in timeline.spans for span in each if span.end > span.start]
    makespan = timeline.makespan or 1.0
    scale = min(_NARROWEST / min(lengths, default=1.0), _LONGEST / makespan)
    kinds = [kind for kind in WORDS if any(action.kind == kind for actions in schedule.rows for action in actions)]
    borders = _borders(makespan, scale)
    panel = schedule.ranks * (_BAR + _GAP) + _AXIS
    bottom = _TOP + (len(borders) - 1) * panel
    legend, legend_right = _legend(kinds, bottom + 2, schedule.virtual_stages)
    title = summary(timeline)
    right = _LEFT + max(end - begin for begin, end in pairwise(borders)) * scale
    width = max(right, legend_right, 8 + len(title) * _TITLE_CHARACTER) + _RIGHT
    height = bottom + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="Helvetica, Arial, sans-serif" font-size="10">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="12">{escape(title)}</text>',
    ]
    for number, (begin, end) in enumerate(pairwise(borders)):
        top = _TOP + number * panel
        long = (end - begin) * scale
        for rank in range(schedule.ranks):
            y = top + rank * (_BAR + _GAP)
            parts.append(f'<text x="8" y="{y + 16}" font-size="12">rank {rank}</text>')
            parts.append(f'<rect x="{_LEFT}" y="{y}" width="{long:.2f}" height="{_BAR}" fill="{_IDLE}"/>')
        parts += _axis(begin, end, scale, top + schedule.ranks * (_BAR + _GAP))
    for rank, spans in enumerate(timeline.spans):
        stages = schedule.stages_of(rank)
        for span in spans:
            colours = _shade(span.action.kind, stages.index(span.action.stage), len(stages))
            pieces = _pieces(span, borders)
            longest = max(pieces, key=lambda piece: piece.end - piece.start)
            for piece in pieces:
                y = _TOP + piece.panel * panel + rank * (_BAR + _GAP)
                x = _LEFT + (piece.start - borders[piece.panel]) * scale
                parts.append(_box(span, x, y, (piece.end - piece.start) * scale, colours, piece is longest))
    return "\n".join([*parts, *legend, "</svg>", ""])


def _borders(makespan: float, scale: float) -> list[float]:
    """The times at which panels begin, and the end."""
    if makespan * scale <= _PANEL:
        return [0.0, makespan]
    step = tick(_TICKS / scale)
    step *= max(int(_PANEL / (step * scale)), 1)
    found = [0.0]
    while found[-1] + step < makespan:
        found.append(len(found) * step)
    return [*found, makespan]


def _shade(kind: str, place: int, stages: int) -> tuple[str, str]:
    """The colour of a box, and of the text on it."""
    white = 0.62 * place / (stages - 1) if stages > 1 else 0.0
    red, green, blue = (round(each + (255 - each) * white) for each in _COLOURS[kind])
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 125
    return f"#{red:02x}{green:02x}{blue:02x}", "#000000" if bright else "#ffffff"


class _Piece(NamedTuple):
    """What of a span lies in one panel."""

    panel: int
    start: float
    end: float


def _pieces(span: Span, borders: list[float]) -> list[_Piece]:
    first = bisect_right(borders, span.start, hi=len(borders) - 1) - 1
    last = max(bisect_left(borders, span.end) - 1, first)
    return [_Piece(i, max(span.start, borders[i]), min(span.end, borders[i + 1])) for i in range(first, last + 1)]


def _box(span: Span, x: float, y: int, width: float, colours: tuple[str, str], named: bool) -> str:
    action, start, end = span
    fill, ink = colours
    label = str(action.micro_batch)
    text = ""
    if named and len(label) * _CHARACTER <= width:
        text = f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" fill="{ink}">{label}</text>'
    about = f"{action}: {WORDS[action.kind]}, stage {action.stage}, micro-batch {label}, from {start:g} to {end:g}"
    return (
        f'<g><title>{about}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{fill}" '
        f'stroke="#ffffff" stroke-width="0.8"/>{text}</g>'
    )


def _axis(begin: float, end: float, scale: float, y: int) -> list[str]:
    right = _LEFT + (end - begin) * scale
    parts = [f'<line x1="{_LEFT}" y1="{y}" x2="{right:.2f}" y2="{y}" stroke="#000000"/>']
    for time in ticks(begin, end, _TICKS / scale):
        x = _LEFT + (time - begin) * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 4}" stroke="#000000"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 15}" text-anchor="middle">{time:g}</text>')
    return [*parts, f'<text x="8" y="{y + 15}">time</text>']


def _legend(kinds: list[str], y: int, stages: int) -> tuple[list[str], float]:
    """The legend, and where it ends."""
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
        word = "dark to light: the stages of a rank, in order"
        parts.append(f'<text x="{x}" y="{y + 10}">{word}</text>')
        x += round(len(word) * 5.5)
    return parts, x
