"""Evaluation of quality with the same engine that generates.

    session         common options, configurations, and one measurement per configuration
    report          tables, provenance

    perplexity      perplexity of a text; `scoring` scores its windows by decode steps
    recall          attention compared with exact top-k; `study` computes both in each layer
    retrieval       numbers in long texts; `answers` decodes the answers
    texts           texts, and windows of their tokens
    lm_eval         a model for lm-evaluation-harness, by `answers`; not a sub-command

A sub-command is a module with SUMMARY, add_options(parser) and run(arguments, say), listed in
`infinigen_jax.evaluate`.

Imports cli and what it imports. Start reading at session.py.
"""
