"""From files and data sets to token ids: sources, formats, tokenizers, the token cache, the stream reader.

May import distributed and the pure packages of toolkit.
"""
