"""Measuring quality through the engine that generates.

    texts           a text file, its tokens, windows of equal size
    configurations  the product of the policies, budgets, ... that were asked for
    scoring         windows through the engine: prefill a context, then teacher-forced decode steps
    statistics      means of those scores, standard errors, paired differences
    perplexity      the sub-command of that name
    report          tables, and what a result file says about model, machine and versions

A sub-command is a module with SUMMARY, add_options(parser) and run(arguments), and a line in
`infinigen_jax.evaluate`.
"""
