"""Drawings say what the timeline says: in text without colours, in the picture, and from the command line."""

from __future__ import annotations

import contextlib
import io
import math
import re
import typing
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dtensor_lm.cli import main
from dtensor_lm.schedules.command import DrawConfig
from dtensor_lm.schedules.drawing import draw, ticks
from dtensor_lm.schedules.library import KNOWN, evaluation, generate
from dtensor_lm.schedules.simulator import Durations, Timeline, simulate
from dtensor_lm.schedules.svg import svg
from dtensor_lm.schedules.table import Action, vee
from dtensor_lm.schedules.table_file import read

pytestmark = pytest.mark.quick

DRAWN = """\
1f1b: 2 ranks, 2 stages, 3 micro-batches; time 12; idle 25.0%; activations held at most 2 (per rank: 2 1)

time    0              5              10
rank 0 |F0 F1 ......B0--- F2 B1--- ...B2---
rank 1 |...F0 B0--- F1 B1--- F2 B2--- ......

F forward  B backward  . idle
numbers are micro-batches"""


def command(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["draw", *argv])
    return code, out.getvalue(), err.getvalue()


def seen(text: str, timeline: Timeline) -> list[set[tuple[str, float, float]]]:
    """(name of an action, start, end) per rank, read back from a drawing in one block with 3 columns per time."""
    _, block, _ = text.split("\n\n")
    found: list[set[tuple[str, float, float]]] = [set() for _ in timeline.spans]
    for line in block.splitlines()[1:]:
        name, _, cells = line.partition("|")
        _, rank, *stage = name.split()
        stages = stage[1:] or [str(timeline.schedule.stages_of(int(rank))[0])]
        for match in re.finditer(r"([FBIW][0-9])-* ?", cells.ljust(round(timeline.makespan) * 3)):
            found[int(rank)].add((f"{stages[0]}{match[1]}", match.start() / 3, match.end() / 3))
    return found


# Text


def test_a_small_drawing() -> None:
    assert draw(simulate(generate("1f1b", 2, 3))) == DRAWN


@pytest.mark.parametrize("width", [80, 200, 2000])
@pytest.mark.parametrize("kind", KNOWN)
def test_the_text_says_what_the_timeline_says(kind: str, width: int) -> None:
    timeline = simulate(generate(kind, 4, 8))
    if width < 2000:
        assert max(map(len, draw(timeline, width).splitlines()[2:])) <= width
    read_back = seen(draw(timeline, 2000), timeline)
    for rank, spans in enumerate(timeline.spans):
        assert read_back[rank] == {(str(span.action), span.start, span.end) for span in spans}
    longest = max(map(len, draw(timeline, 2000).splitlines()))
    assert longest <= 200  # 4 ranks and 8 micro-batches need no second line on a wide terminal


def test_long_drawings_go_on_below() -> None:
    timeline = simulate(generate("1f1b", 16, 64))
    text = draw(timeline, 120)
    blocks = text.split("\n\n")[1:-1]
    assert len(blocks) == 9 and all(len(block.splitlines()) == 17 for block in blocks)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 120
    whole = draw(timeline, 5000).split("\n\n")[1].splitlines()[1:]
    lengths = [max(map(len, block.splitlines()[1:])) - len("rank 15 |") for block in blocks]
    rows = [[line.partition("|")[2] for line in block.splitlines()[1:]] for block in blocks]
    joined = ["".join(row[i].ljust(n) for row, n in zip(rows, lengths, strict=True)) for i in range(16)]
    assert [line.partition("|")[2].rstrip() for line in whole] == [line.rstrip() for line in joined]
    assert [block.split()[1] for block in blocks[:3]] == ["0", "30", "55"]


@pytest.mark.parametrize("durations", [Durations(), Durations(1, 1.7, 0.9, 0.8, 0.35)])
@pytest.mark.parametrize("width", [100, 101, 150])
@pytest.mark.parametrize("kind", KNOWN)
def test_no_name_is_cut_in_two(kind: str, width: int, durations: Durations) -> None:
    """F1 at the end of a line would be read as F1 where the next line goes on with the 4 of F14."""
    timeline = simulate(generate(kind, 4, 16), durations)
    blocks = draw(timeline, width).split("\n\n")[1:-1]
    names = [name for block in blocks for name in re.findall(r"[FBIW][0-9]+", block)]
    assert sorted(names) == sorted(str(action)[1:] for row in timeline.schedule.rows for action in row)


def test_the_title_keeps_to_the_width() -> None:
    text = draw(simulate(generate("zb-h1", 16, 64)), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert " ".join(text.split("\n\n")[0].split()).endswith("(per rank:" + " 16" * 16 + ")")


def test_colours_add_nothing_but_colour() -> None:
    timeline = simulate(generate("zb-v", 3, 4))
    plain, coloured = draw(timeline, 90), draw(timeline, 90, colour=True)
    assert plain != coloured and "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert len(set(re.findall(r"\x1b\[30;4[0-9]m", coloured))) == 3


@pytest.mark.parametrize(
    "durations",
    [
        Durations(1, 1.7, 0.9, 0.8, 0.35),
        Durations(0, 0, 0, 0),
        Durations(1e9, 1e-9, 1e-9, 1e-9, 1e9),
        Durations(1e-9, 1e-9, 1e-9, 1e-9, 1e9),
        Durations(1 / 3, 2 / 3, 1 / 3, 1 / 3),
    ],
)
def test_any_durations_can_be_drawn(durations: Durations) -> None:
    for kind in ("1f1b", "zb-v"):
        timeline = simulate(generate(kind, 2, 4), durations)
        assert draw(timeline, 100).startswith(f"{kind}: 2 ranks")
        ElementTree.fromstring(svg(timeline))


def test_ticks() -> None:
    assert ticks(0, 33, 10 / 3) == [0, 5, 10, 15, 20, 25, 30]
    assert ticks(0, 1, 0.1) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1])
    assert ticks(390, 1000, 101) == [400, 600, 800, 1000]


# Pictures


@pytest.mark.parametrize(
    ("kind", "p", "m"), [("zb-h1", 4, 8), ("zb-v", 4, 8), ("1f1b", 16, 64), ("dualpipe-v", 16, 64)]
)
def test_the_picture_says_what_the_timeline_says(kind: str, p: int, m: int) -> None:
    timeline = simulate(generate(kind, p, m))
    root = ElementTree.fromstring(svg(timeline))
    at = "{http://www.w3.org/2000/svg}"
    names: dict[str, list[str]] = {}
    boxes: dict[str, list[tuple[float, ...]]] = {}
    colours: dict[tuple[str, int], set[str]] = {}
    for group in root.iter(f"{at}g"):
        box, text, title = (group.find(at + tag) for tag in ("rect", "text", "title"))
        assert box is not None and title is not None and title.text is not None
        name = title.text.partition(":")[0]
        action = Action.parse(name)
        if text is not None:
            names.setdefault(name, []).append(text.text or "")
            assert float(box.get("width", 0)) >= 6.2 * len(text.text or "")
        boxes.setdefault(name, []).append((*(float(box.get(each, 0)) for each in ("x", "y", "width")),))
        of_rank = timeline.schedule.stages_of(timeline.schedule.placement[action.stage])
        colours.setdefault((action.kind, of_rank.index(action.stage)), set()).add(box.get("fill", ""))
    # A panel is 30 px for each rank and 32 for its axis; an action that goes on in the next one has two boxes.
    scale = boxes["0F0"][0][2] / (timeline.spans[0][0].end - timeline.spans[0][0].start)
    long = 1600  # pixels of a panel: 80 in time
    for rank, spans in enumerate(timeline.spans):
        for action, start, end in spans:
            pieces = boxes.pop(str(action))
            assert names.pop(str(action)) == [str(action.micro_batch)], f"{action} has no room for its number"
            assert sum(w for _, _, w in pieces) == pytest.approx((end - start) * scale, abs=0.02)
            panel = int((start * scale + 1e-6) // long)
            for x, y, w in pieces:
                assert y == 34 + panel * (30 * p + 32) + 30 * rank
                from_left = max(start * scale - panel * long, 0)
                assert (x, x + w) == pytest.approx(
                    (64 + from_left, 64 + min(end * scale - panel * long, long)), abs=0.02
                )
                panel += 1
    assert not boxes
    assert all(len(each) == 1 for each in colours.values())  # one colour for a kind and a stage of a rank
    assert len(set.union(*colours.values())) == len(colours)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    rights = [float(r.get("x", 0)) + float(r.get("width", 0)) for r in root.iter(f"{at}rect")]
    bottoms = [float(r.get("y", 0)) + float(r.get("height", 0)) for r in root.iter(f"{at}rect")]
    assert max(rights) <= width and max(bottoms) <= height
    words = [text.text for text in root.iter(f"{at}text")]
    assert {"F forward", "idle", "time", "0", f"rank {p - 1}"} <= set(words)
    assert words.count("time") == words.count("rank 0") == math.ceil(timeline.makespan * scale / long)
    title = next(text for text in root.iter(f"{at}text"))
    assert len(title.text or "") * 6.7 <= width  # digits of 12 px are so wide in Helvetica


def test_names_are_escaped() -> None:
    table = generate("1f1b", 2, 2)
    named = type(table)("<b>&", table.placement, table.micro_batches, table.rows)
    title = ElementTree.fromstring(svg(simulate(named))).find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text is not None and title.text.startswith("<b>&: 2 ranks")


# The command


def test_the_command_draws() -> None:
    code, out, err = command("schedule", "--kind", "1f1b", "--ranks", "2", "--micro-batches", "3")
    assert (code, out, err) == (0, DRAWN + "\n", "")
    assert set(typing.get_args(typing.get_type_hints(DrawConfig)["kind"])) == set(KNOWN)


def test_the_command_writes_and_reads_tables_and_pictures(tmp_path: Path) -> None:
    table, picture = tmp_path / "zb-v.csv", tmp_path / "out.svg"
    made = command("schedule", "--kind", "zb-v", "--ranks", "2", "--csv", str(table), "--svg", str(picture))
    assert made[0] == 0 and read(str(table)) == generate("zb-v", 2, 8)
    assert command("schedule", "--file", str(table)) == made  # it is named after its file
    assert picture.read_text() == svg(simulate(generate("zb-v", 2, 8)))
    code, out, _ = command("schedule", "--file", str(table), "--evaluation", "--durations.forward", "2")
    assert code == 0 and out == draw(simulate(evaluation(vee(2), 8), Durations(2)), 200) + "\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "draw what? there are drawings of schedules: dtensor-lm draw schedule --help"),
        (("plan",), "draw 'plan': there are drawings of schedules: dtensor-lm draw schedule --help"),
        (
            ("schedule", "--kind", "zbv", "--ranks", "0", "--durations.send", "-1", "--svg", ""),
            "these options cannot be used\n"
            "  - --kind is 'zbv': expected one of gpipe, 1f1b, interleaved-1f1b, looped-bfs, interleaved-zero-bubble, "
            "zb-h1, zb-v, dualpipe-v\n"
            "  - ranks is 0: must be at least 1\n"
            "  - svg is '': must be a name\n"
            "  - durations.send is -1.0: must be 0, or from 1e-9 to 1e9",
        ),
        (
            ("schedule", "--file", "x.csv", "--micro-batches", "3", "--kind", "zb-v"),
            "these options cannot be used\n"
            "  - kind would do nothing: the table of x.csv is drawn\n"
            "  - micro_batches would do nothing: the table of x.csv is drawn",
        ),
        (("schedule", "--file", "none.csv"), "the table none.csv cannot be read: No such file or directory"),
        (
            ("schedule", "--file", "bad.csv"),
            "the schedule bad cannot be run:\n"
            "  - rank 0: 0B0 stands before 0F0, which it needs: move it behind",
        ),
        (
            ("schedule", "--kind", "dualpipe-v", "--micro-batches", "7"),
            "there is no schedule dualpipe-v with these numbers:\n"
            "  - 7 micro-batches: dualpipe-v needs at least as many as it has stages, use 8 or more",
        ),
        (
            ("schedule", "--virtual-stages", "1000000000", "--kind", "looped-bfs"),
            "4000000000 stages and 8 micro-batches are too many to draw: their product may be at most 50,000",
        ),
        (
            ("schedule", "--micro-batches", "10000"),
            "80,000 actions are too many to draw (at most 50,000): take fewer micro-batches",
        ),
        (("schedule", "--svg", "none/x.svg"), "the picture none/x.svg cannot be written: No such file or directory"),
    ],
)  # fmt: skip
def test_bad_input(argv: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("0B0,0F0\n")
    assert command(*argv) == (2, "", f"error: {message}\n")
