"""The Claims page."""

from ui import claims, frame

with frame.page("claims"):
    claims.draw()
