"""What is computed: torch and numpy, nothing else. Importing this room does not import torch."""
