"""The commands of `python -m sparseflash`. What needs torch is imported by one that runs: `--help`
takes no seconds.
"""
