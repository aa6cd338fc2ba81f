"""Verification of properties: attack, bounds from cheap to tight, then the input set in parts.

engine.py: one property from start to end. branch.py: the loop over parts. boxes.py: parts of the input set.
watch.py, worker.py: the same in a process with limits on time and memory. answer.py: what is printed.
"""
