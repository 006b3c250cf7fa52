"""Evaluation of quality with the same engine that generates.

    configurations  combinations of the requested policies, budgets and formats
    session         common options, and one measurement per configuration
    parts           finished measurements of an interrupted run
    report          tables, provenance

    perplexity      perplexity of a text: scoring, statistics
    recall          attention compared with exact top-k: study
    retrieval       numbers in long texts: haystacks, answers
    texts           texts, and windows of their tokens
    lm_eval         a model for lm-evaluation-harness: likelihood, answers

A sub-command is a module with SUMMARY, add_options(parser) and run(arguments, say), listed in
`infinigen_jax.evaluate`.

Imports cli and what it imports. Start reading at session.py.
"""
