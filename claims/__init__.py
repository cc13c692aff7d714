"""What binds content to engine: verify a claim, keep and compare receipts, put measured numbers into prose."""
