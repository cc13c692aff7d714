"""What is said: cards, strings, glossary, sources. Knows neither torch nor streamlit."""
