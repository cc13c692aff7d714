"""The Lab page."""

from ui import frame, lab

with frame.page("lab"):
    lab.draw()
