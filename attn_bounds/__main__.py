"""`python -m attn_bounds`: the command line."""

from .cli import main

main()
