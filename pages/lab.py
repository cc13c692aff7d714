"""The Lab page."""

from ui import lab, frame

with frame.page("lab"):
    lab.draw()
