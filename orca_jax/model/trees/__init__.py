"""Parameter trees of other programs: tables from their arrays to the decoder's parameters.

    views      arrays that are read in parts, and their reshapes, transposes and selections
    rows       a row of a table: an array of the tree, operations, a parameter
    maxtext, tunix, own
               tables of trees by MaxText, by Tunix, and of modules with the decoder's own parameters
    mapping    tables written by users, in mapping.json
    choose     the table for a tree, and the array of each parameter

This package imports no JAX.
"""
