"""Charts as SVG text, for one self-contained page. Colours are the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 230
WIDE = 1140  # of a chart that has the page's whole width
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 40


def nice_ticks(least: float, most: float, count: int = 5) -> list[float]:
    """About `count` round numbers from at most `least` to at least `most`."""
    span = max(most - least, abs(most) * 1e-9, 1e-12)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def whole_ticks(most: float) -> list[float]:
    """Ticks from 0 for counts."""
    return [tick for tick in nice_ticks(0, max(most, 1), 4) if tick == round(tick)]


def short(value: float) -> str:
    """A tick's label."""
    if value and abs(value) < 0.001:
        return f"{value:.0e}"
    text = f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return text


@dataclass(frozen=True, slots=True)
class Frame:
    """Axes: the plotted data is between x0 and x1, and y0 and y1."""

    x0: float
    x1: float
    y0: float
    y1: float
    height: int = HEIGHT
    width: int = WIDTH

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        room = self.height - TOP - BOTTOM
        return self.height - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * room

    def across(self, y: float, css: str) -> str:
        """A horizontal line over the whole width, at a height in pixels."""
        x2 = self.width - RIGHT
        return f'<line class="{css}" x1="{LEFT}" x2="{x2}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def down(self, value: float, css: str, top: float = TOP, bottom: float | None = None) -> str:
        """A vertical line at a data position, down to the axis unless told otherwise."""
        x, y2 = self.x(value), self.height - BOTTOM if bottom is None else bottom
        return f'<line class="{css}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{y2:.1f}"/>'

    def box(self, css: str, span: tuple[float, float], rows: tuple[float, float], hint: str) -> str:
        """A rectangle between two data positions and two heights in pixels, with its tooltip."""
        left, right = self.x(span[0]), self.x(span[1])
        return (
            f'<rect class="{css}" x="{left:.1f}" y="{rows[0]:.1f}" '
            f'width="{max(0.4, right - left):.1f}" height="{max(0.0, rows[1] - rows[0]):.1f}">'
            f"<title>{escape(hint)}</title></rect>"
        )

    def grid(self, ticks: Sequence[float]) -> Iterator[str]:
        """Horizontal lines with labels."""
        for tick in ticks:
            y = self.y(tick)
            yield self.across(y, "grid")
            yield text(LEFT - 6, y + 4, short(tick), "end")

    def below(self, ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
        """Labels of the horizontal axis, at data positions."""
        base = self.height - BOTTOM
        yield self.across(base, "axis")
        for at, label in ticks:
            yield text(self.x(at), base + 16, label)

    def titles(self, across: str, up: str) -> Iterator[str]:
        """What the axes count, with units."""
        yield text((LEFT + self.width - RIGHT) / 2, self.height - 6, across, css="title")
        middle = (TOP + self.height - BOTTOM) / 2
        yield (
            f'<text class="title" text-anchor="middle" transform="translate(11 {middle:.0f}) '
            f'rotate(-90)">{escape(up)}</text>'
        )


def text(x: float, y: float, label: str, anchor: str = "middle", css: str = "label") -> str:
    """One line of text."""
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
    )


def chart(frame: Frame, parts: Sequence[str], label: str) -> str:
    """The whole picture; `label` is a description for screen readers."""
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join(parts)}</svg>'
    )


def bars(
    labels: Sequence[str],
    values: Sequence[float],
    across: str,
    up: str,
    *,
    ceiling: float | None = None,
    show: Callable[[float], str] = short,
    line: Sequence[float | None] | None = None,
) -> str:
    """One bar per label; `line` is a second series over them. `ceiling`: the height of the axis for
    values in per cent."""
    count = len(values)
    most = ceiling if ceiling is not None else max([*values, 1e-9]) * 1.12
    ticks = whole_ticks(most) if all(float(v).is_integer() for v in values) else nice_ticks(0, most)
    frame = Frame(0, count, 0, max(ticks[-1], most))
    shown = [tick for tick in ticks if ceiling is None or tick <= 100]  # per cent
    parts = [*frame.grid(shown)]
    every = math.ceil(count / 16)
    for index, value in enumerate(values):
        top = frame.y(value)
        hint = f"{labels[index]}: {show(value)}"
        parts.append(frame.box("bar", (index + 0.12, index + 0.88), (top, frame.y(0)), hint))
        if count <= 16 and line is None:
            parts.append(text(frame.x(index + 0.5), top - 4, show(value), css="value"))
        elif count <= 16:  # the second series runs above the bars
            parts.append(text(frame.x(index + 0.5), frame.y(0) - 6, show(value), css="inside"))
    places = [(i + 0.5, labels[i]) for i in range(0, count, every)]
    parts += [*frame.below(places), *frame.titles(across, up)]
    if line is not None:
        known = [(i + 0.5, value) for i, value in enumerate(line) if value is not None]
        parts += _line(frame, known, "second")
    return chart(frame, parts, f"{up} by {across}")


def histogram(values: Sequence[float], across: str, marks: Sequence[tuple[str, float]]) -> str:
    """How values are distributed, with named vertical lines such as percentiles."""
    least, most = min(values), max(values)
    if most <= least:
        least, most = least * 0.9, most * 1.1 or 1.0
    count = max(8, min(40, round(math.sqrt(len(values)) * 2)))
    width = (most - least) / count
    counts = [0] * count
    for value in values:
        counts[min(count - 1, int((value - least) / width))] += 1
    ticks = whole_ticks(max(counts) * 1.15)
    frame = Frame(least, most, 0, ticks[-1])
    parts = [*frame.grid(ticks)]
    for index, number in enumerate(counts):
        span = (least + index * width, least + (index + 1) * width)
        hint = f"{short(span[0])} to {short(span[1])}: {number}"
        parts.append(frame.box("bar", span, (frame.y(number), frame.y(0)), hint))
    inside = [tick for tick in nice_ticks(least, most, 6) if least <= tick <= most]
    parts += [*frame.below([(t, short(t)) for t in inside]), *frame.titles(across, "count")]
    last = -math.inf
    for name, value in marks:
        x = frame.x(value)
        parts.append(frame.down(value, "mark"))
        if x - last > 26:
            parts.append(text(min(x, WIDTH - RIGHT - 10), TOP - 3, name, css="value"))
            last = x
    return chart(frame, parts, f"distribution of {across}")


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    across: str,
    up: str,
    *,
    whole: bool = False,
) -> str:
    """Series over a common axis, drawn in the colours "first", "second"; `whole` ticks."""
    xs = [x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points]
    ticks = nice_ticks(0, max(ys) * 1.05)
    least, most = min(xs), max(xs)
    frame = Frame(least, most if most > least else least + 1, 0, ticks[-1])
    places = sorted(set(xs)) if whole else nice_ticks(least, most, 6)
    places = [x for x in places if frame.x0 <= x <= frame.x1]
    every = math.ceil(len(places) / 18)
    parts = [*frame.grid(ticks), *frame.below([(x, short(x)) for x in places[::every]])]
    parts += frame.titles(across, up)
    for (_, points), css in zip(series, ("first", "second"), strict=False):
        parts += _line(frame, points, css, dots=len(points) <= 64)
    return chart(frame, parts, f"{up} by {across}")


def _line(
    frame: Frame, points: Sequence[tuple[float, float]], css: str, *, dots: bool = True
) -> Iterator[str]:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    yield f'<polyline class="line {css}" points="{path}"/>'
    if dots:
        for x, y in points:
            yield (
                f'<circle class="dot {css}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3">'
                f"<title>{short(x)}: {short(y)}</title></circle>"
            )


def share_bar(parts: Sequence[tuple[str, float]], floor: float, across: str) -> str:
    """Parts of a time side by side, (css, length), and a line at the limit."""
    total = sum(length for _, length in parts)
    ticks = nice_ticks(0, max(total, floor) * 1.02, 8)
    frame = Frame(0, ticks[-1], 0, 1, height=112, width=WIDE)
    bottom = frame.height - BOTTOM - 4
    found = []
    at = 0.0
    for css, length in parts:
        hint = f"{css}: {short(length)}"
        found.append(frame.box(css, (at, at + length), (TOP + 8, bottom), hint))
        at += length
    found.append(frame.down(floor, "limit", TOP - 2, bottom + 4))
    found.append(text(frame.x(floor) + 5, TOP + 2, f"limit {short(floor)}", "start", "value"))
    found += frame.below([(tick, short(tick)) for tick in ticks])
    found.append(text((LEFT + WIDE) / 2, frame.height - 6, across, css="title"))
    return chart(frame, found, "share of the hardware limit")
