"""Describes matplotlib's figures as E2B's charts."""

import datetime
import functools
import math
import re

import matplotlib.dates
import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.patches import Wedge

MAX_POINTS = 20_000  # of a chart; one with more has no data
BOXES = "_barchan_boxes"


def watch_boxes():
    """Has axes keep the statistics of their boxes: the lines of a plot do not tell them."""
    draw = Axes.bxp

    @functools.wraps(draw)
    def bxp(self, bxpstats, positions=None, vert=True, **options):
        places = positions if positions is not None else range(1, len(bxpstats) + 1)
        kept = self.__dict__.setdefault(BOXES, {})
        for place, stats in zip(places, bxpstats):
            kept[float(place)] = (stats, vert)
        return draw(self, bxpstats, positions=positions, vert=vert, **options)

    Axes.bxp = bxp


def chart_of(figure):
    """Returns the chart of a figure, a superchart if it has several axes, and nothing if it has none."""
    axes = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    if not axes or sum(points_in(ax) for ax in axes) > MAX_POINTS:
        return None
    if len(axes) == 1:
        return axes_chart(axes[0])
    title = figure._suptitle.get_text() if figure._suptitle else None
    return {"type": "superchart", "title": title, "elements": [axes_chart(ax) for ax in axes]}


def points_in(ax):
    return sum(len(line.get_xdata(orig=False)) for line in ax.lines) + sum(len(c.get_offsets()) for c in ax.collections) + len(ax.patches)


def axes_chart(ax):
    kind, elements, swapped = contents(ax)
    chart = {"type": kind, "title": ax.get_title() or None, "elements": elements}
    if kind not in ("pie", "unknown"):
        x, y = ("y", "x") if swapped else ("x", "y")
        chart |= label(x, ax.get_xlabel()) | label(y, ax.get_ylabel())
    if kind in ("line", "scatter"):
        chart |= ticks("x", ax.xaxis, ax.get_xscale()) | ticks("y", ax.yaxis, ax.get_yscale())
    return chart


def contents(ax):
    """Returns the type of an axes' chart, its elements, and whether it lies on its side."""
    wedges = [p for p in ax.patches if isinstance(p, Wedge)]
    bars = [c for c in ax.containers if isinstance(c, BarContainer)]
    scatters = [c for c in ax.collections if isinstance(c, PathCollection)]
    lines = [line for line in ax.lines if not is_reference(ax, line)]
    if getattr(ax, BOXES, None):
        return boxes(ax)
    if wedges:
        return "pie", [pie(ax, i, w) for i, w in enumerate(wedges)], False
    if bars:
        return bar_chart(ax, bars)
    if scatters and not lines:
        return "scatter", [points(f"Group {i}", c, *numpy.ma.getdata(c.get_offsets()).T, ax) for i, c in enumerate(scatters)], False
    if lines:
        return "line", [points(f"Line {i}", line, line.get_xdata(), line.get_ydata(), ax) for i, line in enumerate(lines)], False
    return "unknown", [], False


def is_reference(ax, line):
    """Reports whether a line is drawn across the axes, as by axhline, and has no data."""
    return line.get_transform() in (ax.get_xaxis_transform(which="grid"), ax.get_yaxis_transform(which="grid"))


def name_of(artist, otherwise):
    text = str(artist.get_label())
    return otherwise if text.startswith("_") or not text else text


def points(otherwise, artist, xs, ys, ax):
    return {"label": name_of(artist, otherwise), "points": [[coordinate(x, ax.xaxis), coordinate(y, ax.yaxis)] for x, y in zip(xs, ys)]}


def coordinate(value, axis):
    if is_dated(axis) and isinstance(value, (int, float, numpy.number)):
        value = matplotlib.dates.num2date(value).replace(tzinfo=None)
    return plain(value)


def is_dated(axis):
    return isinstance(axis.get_converter() if hasattr(axis, "get_converter") else axis.converter, (
        matplotlib.dates._SwitchableDateConverter, matplotlib.dates.DateConverter))


def bar_chart(ax, containers):
    swapped = all(c.orientation == "horizontal" for c in containers)
    axis = ax.yaxis if swapped else ax.xaxis
    names = tick_names(axis)
    elements = []
    for i, container in enumerate(containers):
        group = name_of(container, f"Group {i}")
        for j, bar in enumerate(container.patches):
            low, size, value = (bar.get_y(), bar.get_height(), bar.get_width()) if swapped else (bar.get_x(), bar.get_width(), bar.get_height())
            # Bars of several groups stand beside the tick that names them all.
            name = nearest(names, low + size / 2, reach=0.5)
            elements.append({"label": name if name is not None else f"{low + size / 2:g}", "group": group, "value": plain(value)})
    return "bar", elements, swapped


def boxes(ax):
    kept = getattr(ax, BOXES)
    swapped = not all(vert for _, vert in kept.values())
    names = tick_names(ax.yaxis if swapped else ax.xaxis)
    elements = []
    for place, (stats, _) in sorted(kept.items()):
        name = nearest(names, place, reach=0.5)
        elements.append({
            "label": name if name is not None else str(stats.get("label", f"{place:g}")),
            "min": plain(stats["whislo"]), "first_quartile": plain(stats["q1"]), "median": plain(stats["med"]),
            "third_quartile": plain(stats["q3"]), "max": plain(stats["whishi"]),
            "outliers": [plain(v) for v in stats.get("fliers", [])],
        })
    return "box_and_whisker", elements, swapped


def pie(ax, i, wedge):
    return {"label": name_of(wedge, f"Slice {i}"), "angle": round(abs(wedge.theta2 - wedge.theta1), 4), "radius": plain(wedge.r)}


def tick_names(axis):
    """Returns the texts of an axis' ticks by place."""
    return [(place, tick.get_text()) for place, tick in zip(axis.get_ticklocs(), axis.get_ticklabels()) if tick.get_text()]


def nearest(names, place, reach):
    near = min(names, key=lambda n: abs(n[0] - place), default=None)
    return near[1] if near is not None and abs(near[0] - place) <= reach else None


def label(axis, text):
    unit = re.search(r"\s\((.*?)\)|\[(.*?)\]", text)
    return {f"{axis}_label": text or None, f"{axis}_unit": (unit.group(1) or unit.group(2)) if unit else None}


def ticks(name, axis, scale):
    places = list(axis.get_ticklocs())
    names = [text.get_text() for text in axis.get_ticklabels()]
    if is_dated(axis):
        scale, places = "datetime", [matplotlib.dates.num2date(p).isoformat() for p in places]
    elif scale == "linear" and places and all(p == i and n != str(i) for i, (p, n) in enumerate(zip(places, names))):
        scale = "categorical"
    return {f"{name}_ticks": [plain(p) for p in places], f"{name}_tick_labels": names, f"{name}_scale": scale}


def plain(value):
    """Returns a value as JSON has it: numbers, text, true and false, dates as text; null for what is missing."""
    if isinstance(value, numpy.datetime64):
        value = pandas.Timestamp(value)
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or value is pandas.NaT or value is pandas.NA:
        return None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bool, int, str)):
        return value
    return str(value)
