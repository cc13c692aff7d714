"""What CI and authors run: set-up, checks, receipts, screenshots."""
