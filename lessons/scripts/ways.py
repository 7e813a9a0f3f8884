"""The ways to send less in lesson 19: one colour for each, in all of its pictures.

from scripts.ways import colored  # in a notebook of the folder lessons
"""

from course_lib import curves

COLORS = {"DDP": "#0072b2", "bf16": "#d55e00", "16 bits": "#d55e00", "fp16": "#999999", "top 1 %": "#009e73"}
COLORS |= {"PowerSGD": "#cc79a7", "nothing sent": "#000000", "local SGD": "#56b4e9", "DiLoCo": "#e69f00"}
COLORS |= {"4 × the batch": "#8a7f00"}
# The same colour, dotted
VARIANTS = ("random", "no feedback", "DiLoCo, H = 8", "local SGD, H = 40", "rank 4")


def colored(series, **words):
    """`curves`, in which each way to send less has one colour throughout lesson 19."""
    picture = curves(series, **words)
    (axes,), (legend,) = picture.figure.axes, picture.figure.legends
    for pair in zip(axes.lines, legend.get_lines(), strict=True):
        name = pair[0].get_label()
        for line in pair:
            line.set_color(next(color for way, color in COLORS.items() if name.startswith(way)))
            if name.endswith(VARIANTS):
                line.set(linestyle=":", markerfacecolor="white")
    return picture
