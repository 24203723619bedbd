"""Parameter trees of other programs: tables from their arrays to the decoder's parameters.

    views      arrays that are read in parts, and their reshapes, transposes and selections
    rows       a row of a table: an array of the tree, operations, a parameter
    maxtext, tunix
               tables of trees by MaxText and by Tunix
    mapping    tables written by users, in mapping.json
    choose     the table for a tree, and the array of each parameter
    memory     trees in memory, in place of stored ones

All modules but `memory` import no JAX.
"""
