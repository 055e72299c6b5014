"""One file for each family of layers; ``families.py`` says which rule a module has, ``rule.py`` what a rule is."""
