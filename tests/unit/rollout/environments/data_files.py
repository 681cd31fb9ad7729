"""Small data sets in the form of GSM8K and MATH."""

from pathlib import Path

DATA = Path(__file__).parent / "data"
GSM8K = str(DATA / "gsm8k.jsonl")
MATH = str(DATA / "math.jsonl")
