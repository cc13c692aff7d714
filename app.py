"""Home, the entry point: ``streamlit run app.py``."""

from ui import frame, home

with frame.page("home"):
    home.draw()
