"""The stored form of masks (BlockSet) and the operations on it. Nothing here is public.

grid.py, intervals.py   block numbering; sets of integers as runs
bit_tiles.py            element masks of partial blocks
block_set.py            BlockSet and the algebra on it
others                  functions from BlockSet to BlockSet, and conversions
"""
