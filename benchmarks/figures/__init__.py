"""The paper's accuracy figures (InfiniGen, OSDI 2024) as commands, for any model.

    python -m benchmarks.figures NAME --model DIR --text F --json F --plot F

    kv-size       figure 11   quality against relative KV size
    chunks        figure 12   perplexity by position
    skewing       figure 13   with and without skewing
    sensitivity   figure 17   alpha and partial ratio (accuracy)
    long-context  figure 19   64 tokens kept at growing length
    pool          table 2     limits of the host pool, by what gives way

Each is a set of defaults for the options of `infinigen_jax.evaluate` (which all remain), with a
table and a diagram of its own; what is measured, and how, is `infinigen_jax.evaluation`'s business.
Where the paper has accuracy on tasks, --tasks (of lm-eval) stands in place of --text.
"""
