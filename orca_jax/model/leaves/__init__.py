"""The one reader of weights: leaves of files of every format fill the parameters of a decoder."""
