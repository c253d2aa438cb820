"""The commands of `python -m sparseflash`.

A command imports torch when it runs, so that `--help` is quick.
"""
