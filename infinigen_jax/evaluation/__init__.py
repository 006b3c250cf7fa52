"""Measuring quality through the engine that generates.

    configurations  the product of the policies, budgets, ... that were asked for
    session         what all sub-commands do: common options, one measurement a configuration
    parts           what was finished before an interruption
    report, plots   tables, provenance, diagrams
    naming          what tells the lines of a result apart

    perplexity      of a text: scoring, statistics
    recall          attention against exact top-k: study
    retrieval       finding things in long texts: haystacks, lost_in_the_middle, answers
    windows, texts  which tokens of a text are measured
    lm_eval         a model for the lm-evaluation-harness: likelihood, answers

A sub-command is a module with SUMMARY, add_options(parser) and run(arguments, say), and a line in
`infinigen_jax.evaluate`.
"""
