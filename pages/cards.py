"""The Cards page."""

from ui import cards, frame

with frame.page("cards"):
    cards.draw()
