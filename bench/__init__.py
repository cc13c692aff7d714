"""The benchmarks: times and sizes with their aims. No wall-clock aim stands in a test; all of them stand here."""
