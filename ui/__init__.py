"""What is drawn: the only room, with app.py and pages/, that knows Streamlit."""
