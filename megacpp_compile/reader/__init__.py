"""What a value is, for matching alone; the graph stays as it is.

`links` follows chains of casts, copies and views, `dims` says which dimension is which behind a permutation, a
repetition, a reshape, a reduction or dimensions of size 1, `parts` what is cut out of a tensor, `index_reads` which
rows are read from it or added to it, `products` which dimension of a factor is which of a product's, `factors` what
views, sums and products in several steps multiply. Sizes may be symbols.
"""
