"""What is checked before the first step, on synthetic examples; ``independence.py`` lists it and what it can miss."""
