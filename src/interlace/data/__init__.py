"""From data files to batches of tokens; and pictures for a model that takes noise out of images.

documents.py  data files to documents, by suffix
tokens.py     text to tokens, once: tokenizers, and the token file that runs map
batches.py    which samples are held out, and in which order the others come
digits.py     scikit-learn's digits under noise; no part of `interlace train`
"""
