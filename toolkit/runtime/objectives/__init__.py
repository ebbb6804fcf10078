"""Objectives besides cross-entropy: preferences, scores of texts, embeddings, a teacher. Their losses do not depend on
how a global batch is split. May import `recipe`, `runtime.models` and `runtime.distributed`.
"""
