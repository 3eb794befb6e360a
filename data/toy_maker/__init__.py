"""What `data/make_toy.py` is made of: one stage or one noun a file, in the order in which they are used."""
