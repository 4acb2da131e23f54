"""Measurements that claims are made of; each run leaves one JSON file, named by hardware and date, in `results/`.

May import: everything of Bridge.
"""
