"""What is remembered and asked: items made of cards, grading, the log of events and its stores, dates, and the plan."""
