"""The Quiz page."""

from ui import frame, quiz

with frame.page("quiz"):
    quiz.draw()
