"""Matrices in memory: plain, quantised with scales, packed for the library in C, and in the few bits of files.

Each form is a class with the protocol of `base.py`. Only these classes know how a matrix is stored.
"""
