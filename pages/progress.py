"""The Progress page."""

from ui import frame, progress

with frame.page("progress"):
    progress.draw()
