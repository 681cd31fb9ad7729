"""GSM8K and MATH, and the judge that compares mathematical expressions."""
