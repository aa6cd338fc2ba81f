"""Affine forms with error sets: one forward pass that bounds every tensor of a graph (theory.md, 2–4, 6)."""
